// What a kernel sees: tensors, attributes, threads. Nothing of onnxruntime's interface.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_interface.h"
#include "parallel.h"

namespace onnxtrain {

// An error of a kernel: a sentence that onnxruntime hands to the user.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raises a KernelError unless a condition holds.
inline void require(bool holds, const char* otherwise) {
  if (!holds) throw KernelError(otherwise);
}

using Shape = std::vector<int64_t>;

// The number of elements of a shape; an error if it is negative or does not fit.
int64_t elements_of(const Shape& shape);

// A tensor that a kernel reads or writes.
struct Tensor {
  void* data = nullptr;
  ElementType type = kUndefined;
  Shape shape;
  int64_t elements = 0;

  bool exists() const { return type != kUndefined; }
  const float* floats() const;  // an error if the elements are of another type
  float* floats();
  const int64_t* integers() const;
};

// The tensor that a value of onnxruntime holds; one that does not exist for none.
Tensor tensor_of(const OrtApi* api, OrtValue* value);

// The attributes of a node, and what else is known of it before it runs.
class Attributes {
 public:
  Attributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  int64_t integer(const char* name, int64_t otherwise) const;
  float number(const char* name, float otherwise) const;
  std::vector<int64_t> integers(const char* name) const;
  // Whether an input is a constant of the graph, which is the same in every run.
  bool is_constant(size_t input) const;

 private:
  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

// The memory that an output may share with inputs: none; for output 0 that of input 0; or what the kernel checks itself.
enum class Sharing { none, first, checked_by_kernel };

// One run of a kernel.
class Run {
 public:
  Run(const OrtApi* api, OrtKernelContext* context, Sharing sharing = Sharing::checked_by_kernel)
      : api_(api), context_(context), sharing_(sharing) {}
  size_t input_count() const;
  size_t output_count() const;
  Tensor input(size_t index) const;  // one that does not exist if it was left out
  // The output; an error if the node leaves it out, or if it shares memory with a tensor that was asked for before.
  Tensor output(size_t index, const Shape& shape);
  // Calls work(0) … work(count - 1) on onnxruntime's threads; errors come back to the caller.
  void parallel(int64_t count, const std::function<void(int64_t)>& work) const;
  // The same as a function, which computations take.
  Parallel in_parallel() const {
    return [this](int64_t count, const std::function<void(int64_t)>& work) { parallel(count, work); };
  }

 private:
  struct Place {
    size_t index;
    uintptr_t begin, end;
  };

  static Place place_of(const Tensor& tensor, size_t index);
  static bool are_apart(const Place& one, const Place& other);
  bool may_share(const Place& given, const Place& made) const;

  const OrtApi* api_;
  OrtKernelContext* context_;
  Sharing sharing_;
  mutable std::vector<Place> read_;
  std::vector<Place> written_;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  // Whether outputs may be the memory of any input, which the kernel then checks itself.
  virtual bool checks_sharing() const { return false; }
  virtual void run(Run& run) const = 0;
};

// A kernel under the name of its function, without the number behind it. A kernel may be given any
// number of inputs of any type and checks them itself; those beyond the ones that it knows are read
// by the plain form of the function only. The last type of outputs stands for all that follow.
struct KernelKind {
  const char* name;
  std::vector<ElementType> outputs;
  std::unique_ptr<Kernel> (*make)(const Attributes&);
  bool in_place;  // whether output 0 may be the memory of input 0, where nobody else reads that any more
};

// The kind of a kernel class that is made from attributes.
template <class K>
KernelKind kind_of(const char* name, std::vector<ElementType> outputs, bool in_place = false) {
  const auto make = [](const Attributes& of) -> std::unique_ptr<Kernel> { return std::make_unique<K>(of); };
  return {name, std::move(outputs), make, in_place};
}

const std::vector<KernelKind>& kernel_kinds();

}  // namespace onnxtrain
