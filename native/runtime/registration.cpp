// The border to onnxruntime: describes kernels as custom operators, hands tensors in and out, and
// lets no exception pass.
#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>

#include "isa.h"
#include "kernel.h"

namespace onnxtrain {
namespace {

constexpr const char* kDomain = "ai.onnxtrain";

OrtStatus* status(const OrtApi* api, const char* what) {
  return ONNXTRAIN_CALL(api, CreateStatus)(kFail, what);
}

// Runs a function and turns an exception into a status.
template <class F>
OrtStatus* guarded(const OrtApi* api, const char* name, F function) noexcept {
  try {
    function();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return status(api, "there is not enough memory");
  } catch (const std::exception& error) {
    try {
      return status(api, (std::string("ai.onnxtrain::") + name + ": " + error.what()).c_str());
    } catch (...) {
      return status(api, "a kernel of onnxtrain failed");
    }
  } catch (...) {
    return status(api, "a kernel of onnxtrain failed");
  }
}

// Throws what onnxruntime reports.
void check(const OrtApi* api, OrtStatus* reported) {
  if (reported == nullptr) return;
  const char* text = reinterpret_cast<const char* (*)(const OrtStatus*)>(api->entries[2])(reported);
  const std::string copy(text == nullptr ? "an unknown error" : text);
  ONNXTRAIN_CALL(api, ReleaseStatus)(reported);
  throw KernelError(copy);
}

// Whether an attribute was found; one that is absent is no error.
bool found(const OrtApi* api, OrtStatus* reported) {
  if (reported == nullptr) return true;
  ONNXTRAIN_CALL(api, ReleaseStatus)(reported);
  return false;
}

Tensor tensor_of(const OrtApi* api, OrtValue* value) {
  Tensor tensor;
  if (value == nullptr) return tensor;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, ONNXTRAIN_CALL(api, GetTensorTypeAndShape)(value, &info));
  int type = 0;
  size_t rank = 0;
  OrtStatus* reported = ONNXTRAIN_CALL(api, GetTensorElementType)(info, &type);
  if (reported == nullptr) reported = ONNXTRAIN_CALL(api, GetDimensionsCount)(info, &rank);
  if (reported == nullptr) {
    tensor.shape.resize(rank);
    reported = ONNXTRAIN_CALL(api, GetDimensions)(info, tensor.shape.data(), rank);
  }
  ONNXTRAIN_CALL(api, ReleaseTensorTypeAndShapeInfo)(info);
  check(api, reported);
  tensor.type = static_cast<ElementType>(type);
  tensor.elements = elements_of(tensor.shape);
  check(api, ONNXTRAIN_CALL(api, GetTensorMutableData)(value, &tensor.data));
  return tensor;
}

// A custom operator and the kernel behind it.
struct Operator : OrtCustomOp {
  const KernelKind* kind;
  std::string name;

  Operator(const KernelKind& kernel, std::string full_name);
};

struct Instance {
  const OrtApi* api;
  const char* name;
  std::unique_ptr<Kernel> kernel;
};

const Operator& self(const OrtCustomOp* op) { return *static_cast<const Operator*>(op); }

OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** made) {
  const Operator& own = self(op);
  return guarded(api, own.kind->name, [&] {
    *made = new Instance{api, own.kind->name, own.kind->make(Attributes(api, info))};
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Instance& own = *static_cast<const Instance*>(kernel);
  return guarded(own.api, own.name, [&] {
    Run run(own.api, context);
    own.kernel->run(run);
  });
}

Operator::Operator(const KernelKind& kernel, std::string full_name)
    : OrtCustomOp{}, kind(&kernel), name(std::move(full_name)) {
  version = kOrtVersion;
  GetName = [](const OrtCustomOp* op) { return self(op).name.c_str(); };
  GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  GetInputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  GetInputType = [](const OrtCustomOp*, size_t) -> int { return kUndefined; };
  GetOutputTypeCount = [](const OrtCustomOp* op) { return self(op).kind->outputs.size(); };
  GetOutputType = [](const OrtCustomOp* op, size_t i) -> int { return self(op).kind->outputs[i]; };
  GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kVariadic; };
  GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) -> int {
    return i + 1 == self(op).kind->outputs.size() ? kVariadic : kRequired;
  };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return std::numeric_limits<int>::max(); };
  CreateKernelV2 = create;
  KernelComputeV2 = compute;
  KernelDestroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
}

// Operators live as long as the process: sessions refer to them.
struct Registry {
  std::mutex guard;
  std::deque<Operator> operators;
  std::vector<std::string> expected;
};

Registry& registry() {
  static Registry only;
  return only;
}

// `ConvGradWeight_7` is the kernel `ConvGradWeight`.
const KernelKind* kind_named(const std::string& name) {
  const std::string family = name.substr(0, name.find('_'));
  for (const KernelKind& kind : kernel_kinds())
    if (family == kind.name) return &kind;
  return nullptr;
}

}  // namespace

int64_t elements_of(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    require(size >= 0, "a dimension is negative");
    require(size == 0 || count <= (int64_t{1} << 48) / size, "a tensor has too many elements");
    count *= size;
  }
  return count;
}

const float* Tensor::floats() const {
  require(type == kFloat, "a tensor is not of type float");
  return static_cast<const float*>(data);
}

float* Tensor::floats() {
  require(type == kFloat, "a tensor is not of type float");
  return static_cast<float*>(data);
}

const int64_t* Tensor::integers() const {
  require(type == kInt64, "a tensor is not of type int64");
  return static_cast<const int64_t*>(data);
}

int64_t Attributes::integer(const char* name, int64_t otherwise) const {
  int64_t value = otherwise;
  return found(api_, ONNXTRAIN_CALL(api_, KernelInfoGetAttribute_int64)(info_, name, &value)) ? value : otherwise;
}

float Attributes::number(const char* name, float otherwise) const {
  float value = otherwise;
  return found(api_, ONNXTRAIN_CALL(api_, KernelInfoGetAttribute_float)(info_, name, &value)) ? value : otherwise;
}

std::vector<int64_t> Attributes::integers(const char* name) const {
  size_t count = 0;
  const auto read = ONNXTRAIN_CALL(api_, KernelInfoGetAttributeArray_int64);
  if (!found(api_, read(info_, name, nullptr, &count))) return {};
  std::vector<int64_t> values(count);
  if (count > 0) check(api_, read(info_, name, values.data(), &count));
  return values;
}

size_t Run::input_count() const {
  size_t count = 0;
  check(api_, ONNXTRAIN_CALL(api_, KernelContext_GetInputCount)(context_, &count));
  return count;
}

size_t Run::output_count() const {
  size_t count = 0;
  check(api_, ONNXTRAIN_CALL(api_, KernelContext_GetOutputCount)(context_, &count));
  return count;
}

Tensor Run::input(size_t index) const {
  const OrtValue* value = nullptr;
  check(api_, ONNXTRAIN_CALL(api_, KernelContext_GetInput)(context_, index, &value));
  return tensor_of(api_, const_cast<OrtValue*>(value));
}

Tensor Run::output(size_t index, const Shape& shape) {
  elements_of(shape);
  OrtValue* value = nullptr;
  check(api_, ONNXTRAIN_CALL(api_, KernelContext_GetOutput)(context_, index, shape.data(), shape.size(), &value));
  return tensor_of(api_, value);
}

void Run::parallel(int64_t count, const std::function<void(int64_t)>& work) const {
  if (count <= 1) {
    if (count == 1) work(0);
    return;
  }
  struct Shared {
    const std::function<void(int64_t)>& work;
    std::mutex guard;
    std::exception_ptr failure;
  } shared{work, {}, nullptr};
  const auto call = [](void* given, size_t index) {
    Shared& own = *static_cast<Shared*>(given);
    try {
      own.work(static_cast<int64_t>(index));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(own.guard);
      own.failure = std::current_exception();
    }
  };
  check(api_, ONNXTRAIN_CALL(api_, KernelContext_ParallelFor)(context_, call, static_cast<size_t>(count), 0, &shared));
  if (shared.failure) std::rethrow_exception(shared.failure);
}

}  // namespace onnxtrain

using namespace onnxtrain;

#define ONNXTRAIN_EXPORT extern "C" __attribute__((visibility("default")))

// The instruction set in use, and the kernels, one a line.
ONNXTRAIN_EXPORT const char* onnxtrain_isa() { return isa_name(isa()); }

ONNXTRAIN_EXPORT const char* onnxtrain_kernels() {
  static const std::string names = [] {
    std::string made;
    for (const KernelKind& kind : kernel_kinds()) made += (made.empty() ? "" : "\n") + std::string(kind.name);
    return made;
  }();
  return names.c_str();
}

// Names of functions that the next session has, one a line: each is served by the kernel whose name
// it begins with. The caller keeps other threads from registering in between.
ONNXTRAIN_EXPORT int onnxtrain_expect(const char* names) {
  Registry& own = registry();
  const std::lock_guard<std::mutex> lock(own.guard);
  own.expected.clear();
  int known = 0;
  for (const char* begin = names; *begin != 0;) {
    const size_t length = std::strcspn(begin, "\n");
    own.expected.emplace_back(begin, length);
    known += kind_named(own.expected.back()) != nullptr;
    begin += length + (begin[length] != 0);
  }
  return known;
}

ONNXTRAIN_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kOrtVersion);
  if (api == nullptr) return nullptr;  // an older runtime runs the functions themselves
  return guarded(api, "RegisterCustomOps", [&] {
    Registry& own = registry();
    const std::lock_guard<std::mutex> lock(own.guard);
    OrtCustomOpDomain* domain = nullptr;
    check(api, ONNXTRAIN_CALL(api, CreateCustomOpDomain)(kDomain, &domain));
    const auto add = reinterpret_cast<OrtStatus* (*)(OrtCustomOpDomain*, const OrtCustomOp*)>(api->entries[27]);
    for (const std::string& name : own.expected)
      if (const KernelKind* kind = kind_named(name)) {
        auto known = std::find_if(own.operators.begin(), own.operators.end(),
                                  [&](const Operator& op) { return op.name == name; });
        if (known == own.operators.end()) known = own.operators.emplace(own.operators.end(), *kind, name);
        check(api, add(domain, &*known));
      }
    check(api, ONNXTRAIN_CALL(api, AddCustomOpDomain)(options, domain));
  });
}
