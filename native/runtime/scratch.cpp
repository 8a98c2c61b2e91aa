#include "scratch.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

namespace onnxtrain {
namespace {

constexpr std::align_val_t kAlignment{64};
// What a thread keeps for its next kernel, at most. More than that is rare, and goes back at once.
constexpr size_t kMostKept = size_t{16} << 20;

struct Deleter {
  void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
};
using Memory = std::unique_ptr<std::byte, Deleter>;

Memory new_memory(size_t bytes) { return Memory(static_cast<std::byte*>(::operator new(bytes, kAlignment))); }

// Nothing takes a place too, so that each block that was taken is counted.
size_t aligned(size_t bytes) { return (std::max<size_t>(bytes, 1) + 63) / 64 * 64; }

// Pieces of memory, each a stack. What does not fit into the last one gets a new one; when all are
// empty, one that is large enough for all takes their place.
class Stack {
 public:
  void* take(size_t bytes) {
    if (pieces_.empty() || pieces_.back().size - pieces_.back().used < bytes) {
      Memory made = new_memory(bytes);
      pieces_.push_back({std::move(made), bytes, 0});
    }
    Piece& last = pieces_.back();
    void* const taken = last.memory.get() + last.used;
    last.used += bytes;
    used_ += bytes;
    most_ = std::min(std::max(most_, used_), kMostKept);
    return taken;
  }

  void give_back(size_t bytes) noexcept {
    pieces_.back().used -= bytes;
    used_ -= bytes;
    if (pieces_.back().used > 0) return;
    if (pieces_.size() > 1) pieces_.pop_back();
    if (used_ == 0 && pieces_.back().size < most_) pieces_.clear();
    if (used_ == 0 && pieces_.empty()) reserve();
  }

 private:
  struct Piece {
    Memory memory;
    size_t size, used;
  };

  void reserve() noexcept try { pieces_.push_back({new_memory(most_), most_, 0}); } catch (const std::bad_alloc&) {
    most_ = 0;  // the next kernel tries again
  }

  std::vector<Piece> pieces_;
  size_t used_ = 0, most_ = 0;
};

Stack& own_stack() {
  thread_local Stack own;
  return own;
}

// A tool that watches each block of memory for errors has to see each.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ONNXTRAIN_WATCHED 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define ONNXTRAIN_WATCHED 1
#endif
#if defined(ONNXTRAIN_WATCHED)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

bool keeps(size_t bytes) { return kKeeps && bytes <= kMostKept; }

}  // namespace

void* take_scratch(size_t bytes) {
  return keeps(bytes) ? own_stack().take(aligned(bytes)) : new_memory(bytes).release();
}

void give_back_scratch(void* memory, size_t bytes) noexcept {
  if (keeps(bytes))
    own_stack().give_back(aligned(bytes));
  else
    ::operator delete(memory, kAlignment);
}

}  // namespace onnxtrain
