#include "scratch.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define ONNXTRAIN_HAS_PAGES 1
#endif

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

namespace onnxtrain {
namespace {

constexpr std::align_val_t kAlignment{64};
// What a thread keeps for its next kernel, at most. More than that is rare, and goes back at once.
constexpr size_t kMostKept = size_t{16} << 20;

// Blocks from this size on are borrowed, if there is a lender.
constexpr size_t kLeastBorrowed = size_t{1} << 19;

// A stack grows in the first step, while onnxruntime allocates beside it: on the heap, what it
// outgrew would stay there as gaps. Pages of its own go back to the system.
#if defined(ONNXTRAIN_HAS_PAGES)
std::byte* new_pages(size_t bytes) {
  void* const made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(made);
}
void free_pages(std::byte* memory, size_t bytes) noexcept { munmap(memory, bytes); }
#else
std::byte* new_pages(size_t bytes) { return static_cast<std::byte*>(::operator new(bytes, kAlignment)); }
void free_pages(std::byte* memory, size_t) noexcept { ::operator delete(memory, kAlignment); }
#endif

class Pages {
 public:
  explicit Pages(size_t bytes) : memory_(new_pages(bytes)), bytes_(bytes) {}
  Pages(Pages&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Pages() {
    if (memory_ != nullptr) free_pages(memory_, bytes_);
  }
  std::byte* get() const { return memory_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* memory_;
  size_t bytes_;
};

// Nothing takes a place too, so that each block that was taken is counted.
size_t aligned(size_t bytes) { return (std::max<size_t>(bytes, 1) + 63) / 64 * 64; }

// Pieces of memory, each a stack. What does not fit into the last one gets a new one; when all are
// empty, one that is large enough for all takes their place.
class Stack {
 public:
  void* take(size_t bytes) {
    if (pieces_.empty() || pieces_.back().pages.size() - pieces_.back().used < bytes) {
      pieces_.push_back({Pages(bytes), 0});
    }
    Piece& last = pieces_.back();
    void* const taken = last.pages.get() + last.used;
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
    if (used_ == 0 && pieces_.back().pages.size() < most_) pieces_.clear();
    if (used_ == 0 && pieces_.empty()) reserve();
  }

 private:
  struct Piece {
    Pages pages;
    size_t used;
  };

  void reserve() noexcept try { pieces_.push_back({Pages(most_), 0}); } catch (const std::bad_alloc&) {
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

thread_local const Lender* own_lender = nullptr;

bool is_borrowed(size_t bytes) { return kKeeps && bytes >= kLeastBorrowed && own_lender != nullptr; }
bool is_kept(size_t bytes) { return kKeeps && bytes <= kMostKept; }

}  // namespace

Borrowing::Borrowing(const Lender* lender) : before_(std::exchange(own_lender, lender)) {}
Borrowing::~Borrowing() { own_lender = before_; }

const Lender* present_lender() { return own_lender; }

void* take_scratch(size_t bytes) {
  if (is_borrowed(bytes)) {
    void* const lent = own_lender->take(own_lender->self, bytes);
    if (lent == nullptr) throw std::bad_alloc();
    return lent;
  }
  if (is_kept(bytes)) return own_stack().take(aligned(bytes));
  return kKeeps ? new_pages(bytes) : ::operator new(bytes, kAlignment);
}

void give_back_scratch(void* memory, size_t bytes) noexcept {
  if (is_borrowed(bytes))
    own_lender->give_back(own_lender->self, memory);
  else if (is_kept(bytes))
    own_stack().give_back(aligned(bytes));
  else if (kKeeps)
    free_pages(static_cast<std::byte*>(memory), bytes);
  else
    ::operator delete(memory, kAlignment);
}

}  // namespace onnxtrain
