// Many tensors, cut into pieces of about equal size: small ones share a piece, large ones have many.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "kernel.h"

namespace onnxtrain {

class TensorList {
 public:
  void add(int64_t elements) { ends_.push_back(total() + elements); }
  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }

  // How many pieces there are; it depends on the sizes alone, not on the number of threads.
  int64_t pieces() const { return (total() + kPiece - 1) / kPiece; }

  // Calls work(tensor, first element, number of elements) for all that is in a piece.
  template <class Work>
  void in_piece(int64_t piece, Work work) const {
    int64_t at = piece * kPiece;
    const int64_t end = std::min(total(), at + kPiece);
    size_t tensor = std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin();
    for (; at < end; ++tensor) {
      const int64_t begin = tensor == 0 ? 0 : ends_[tensor - 1];
      const int64_t count = std::min(end, ends_[tensor]) - at;
      if (count > 0) work(tensor, at - begin, count);
      at += count;
    }
  }

 private:
  static constexpr int64_t kPiece = 16384;
  std::vector<int64_t> ends_;
};

// The memory that a kernel reads and writes, tensor by tensor. What is written may be what was read for the same
// element, and nothing else: tasks run in any order.
class Ranges {
 public:
  void add(const std::vector<const float*>& read, const std::vector<const float*>& written, int64_t count) {
    if (count == 0) return;
    for (const float* each : written) found_.push_back({each, each + count, true});
    for (const float* each : read)
      if (std::find(written.begin(), written.end(), each) == written.end())
        found_.push_back({each, each + count, false});
  }

  void require_apart() {
    const std::less<const float*> before;
    std::sort(found_.begin(), found_.end(), [&](const Range& a, const Range& b) { return before(a.begin, b.begin); });
    const Range* last = nullptr;  // the one that ends last so far
    for (const Range& each : found_) {
      const bool overlaps = last != nullptr && before(each.begin, last->end);
      require(!overlaps || !(each.written || last->written), "an output overlaps another output or a part of an input");
      if (last == nullptr || before(last->end, each.end)) last = &each;
    }
  }

 private:
  struct Range {
    const float *begin, *end;
    bool written;
  };
  std::vector<Range> found_;
};

}  // namespace onnxtrain
