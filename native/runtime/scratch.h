// Memory that kernels compute in: a stack for each thread, which is used again by the next kernel.
//
// The memory of an allocator comes back in another order than it was given out, from several
// threads, and a step of a network then holds several times what its kernels need at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain {

// Aligned for vectors, neither zeroed nor shared. What was taken last by a thread goes back first.
void* take_scratch(size_t bytes);
void give_back_scratch(void* memory, size_t bytes) noexcept;

// Who lends large blocks to the thread that runs a kernel: onnxruntime has room for them between the
// tensors of a step, where a stack that is as large as the largest block would come on top.
struct Lender {
  void* (*take)(void* self, size_t bytes);  // null if there is no memory
  void (*give_back)(void* self, void* memory);
  void* self;
};

// Lets this thread borrow for a scope; from nobody if there is no lender.
class Borrowing {
 public:
  explicit Borrowing(const Lender* lender);
  Borrowing(const Borrowing&) = delete;
  Borrowing& operator=(const Borrowing&) = delete;
  ~Borrowing();

 private:
  const Lender* before_;
};

const Lender* present_lender();

// Floats of a scope.
class Floats {
 public:
  explicit Floats(int64_t count)
      : bytes_(sizeof(float) * static_cast<size_t>(count)), data_(static_cast<float*>(take_scratch(bytes_))) {}
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  ~Floats() { give_back_scratch(data_, bytes_); }
  float* get() const { return data_; }

 private:
  size_t bytes_;
  float* data_;
};

}  // namespace onnxtrain
