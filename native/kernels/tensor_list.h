// Many tensors, cut into pieces of about equal size: small ones share a piece, large ones have many.
#pragma once

#include <algorithm>
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

// Whether two ranges of as many floats share memory without being the same.
inline bool overlap_in_part(const float* a, const float* b, int64_t elements) {
  return a != b && a < b + elements && b < a + elements;
}

}  // namespace onnxtrain
