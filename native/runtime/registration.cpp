// The border to onnxruntime: describes kernels as custom operators, hands tensors in and out, and
// lets no exception pass.
#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <set>

#include "isa.h"
#include "kernel.h"
#include "recorder.h"
#include "scratch.h"

namespace onnxtrain {
namespace {

constexpr const char* kDomain = "ai.onnxtrain";

OrtStatus* status(const OrtApi* api, const char* what) { return ONNXTRAIN_CALL(api, CreateStatus)(kFail, what); }

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
  const char* text = ONNXTRAIN_CALL(api, GetErrorMessage)(reported);
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

// A custom operator and the kernel behind it.
struct Operator : OrtCustomOp {
  const KernelKind* kind;
  std::string name;

  Operator(const KernelKind& kernel, std::string full_name);
};

// The memory of a session, for large blocks of its kernels; none where the runtime has no such thing.
class SessionMemory {
 public:
  SessionMemory(const OrtApi* api, const OrtKernelInfo* info) : api_(api) {
    constexpr int kDefaultMemory = 0;
    if (api->entries[kKernelInfoGetAllocator] == nullptr) return;
    found(api, ONNXTRAIN_CALL(api, KernelInfoGetAllocator)(info, kDefaultMemory, &allocator_));
  }
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;
  ~SessionMemory() {
    if (allocator_ != nullptr) ONNXTRAIN_CALL(api_, ReleaseAllocator)(allocator_);
  }
  bool exists() const { return allocator_ != nullptr; }
  Lender lender() {
    const auto take = [](void* self, size_t bytes) {
      const SessionMemory& own = *static_cast<SessionMemory*>(self);
      void* memory = nullptr;
      const bool taken = found(own.api_, ONNXTRAIN_CALL(own.api_, AllocatorAlloc)(own.allocator_, bytes, &memory));
      return taken ? memory : nullptr;
    };
    const auto give_back = [](void* self, void* memory) {
      const SessionMemory& own = *static_cast<SessionMemory*>(self);
      found(own.api_, ONNXTRAIN_CALL(own.api_, AllocatorFree)(own.allocator_, memory));
    };
    return {take, give_back, this};
  }

 private:
  const OrtApi* api_;
  OrtAllocator* allocator_ = nullptr;
};

struct Instance {
  const OrtApi* api;
  const char* name;
  std::unique_ptr<Kernel> kernel;
  SeenAttributes attributes;
  SessionMemory memory;
  Sharing sharing;
};

const Operator& self(const OrtCustomOp* op) { return *static_cast<const Operator*>(op); }

OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** made) {
  const Operator& own = self(op);
  return guarded(api, own.kind->name, [&] {
    const OrtApi* used = observed(api);
    std::unique_ptr<Kernel> kernel = own.kind->make(Attributes(used, info));
    const Sharing sharing = kernel->checks_sharing() ? Sharing::checked_by_kernel
                            : own.kind->in_place     ? Sharing::first
                                                     : Sharing::none;
    *made = new Instance{used, own.kind->name, std::move(kernel), take_attributes(), {used, info}, sharing};
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  Instance& own = *static_cast<Instance*>(kernel);
  return recorded(own.api, own.name, own.attributes, context, [&] {
    return guarded(own.api, own.name, [&] {
      const Lender lender = own.memory.lender();
      const Borrowing borrowing(own.memory.exists() ? &lender : nullptr);
      Run run(own.api, context, own.sharing);
      own.kernel->run(run);
    });
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
  if (kind->in_place) {
    GetMayInplace = [](int** inputs, int** outputs) {
      static int first_input = 0, first_output = 0;
      *inputs = &first_input;
      *outputs = &first_output;
      return size_t{1};
    };
    ReleaseMayInplace = [](int*, int*) {};
  }
}

// Operators and domains live as long as the process: sessions and their options refer to them.
struct Registry {
  std::mutex guard;
  std::map<std::string, Operator> operators;
  std::map<std::string, OrtCustomOpDomain*> domains;  // by the names of their operators, one a line
  std::string accepted;                               // those of the next session
  const OrtApi* api = nullptr;
};

Registry& registry() {
  static Registry* const only = new Registry;  // never freed: sessions may be the last to go
  return *only;
}

const KernelKind* kind_named(const std::string& name) {
  for (const KernelKind& kind : kernel_kinds())
    if (name == kind.name) return &kind;
  return nullptr;
}

// `ConvGradWeight_7` is served by the kernel `ConvGradWeight`.
std::string kind_of_function(const std::string& name) { return name.substr(0, name.find('_')); }

// `Attention`, `AttentionOrZero` and `AttentionGrad` are partners: the last one reads what the others
// saved, in a form of their own. Partners are known by their names up to `Grad`: one begins with the
// other.
bool are_partners(const std::string& kind, const std::string& other) {
  const std::string a = kind.substr(0, kind.find("Grad")), b = other.substr(0, other.find("Grad"));
  return a.compare(0, b.size(), b) == 0 || b.compare(0, a.size(), a) == 0;
}

std::vector<std::string> lines_of(const char* text) {
  std::vector<std::string> lines;
  while (*text != 0) {
    const size_t length = std::strcspn(text, "\n");
    if (length > 0) lines.emplace_back(text, length);
    text += length + (text[length] != 0);
  }
  return lines;
}

// The functions of a graph that kernels serve. Of partners all are served or none: without a
// kernel for its gradient, a function has to save what the plain form of the gradient reads.
std::vector<std::string> served(const std::vector<std::string>& functions) {
  std::set<std::string> unknown;
  for (const std::string& name : functions)
    if (kind_named(kind_of_function(name)) == nullptr) unknown.insert(kind_of_function(name));
  std::vector<std::string> found;
  for (const std::string& name : functions) {
    const auto is_partner = [&](const std::string& of) { return are_partners(kind_of_function(name), of); };
    if (std::none_of(unknown.begin(), unknown.end(), is_partner)) found.push_back(name);
  }
  return found;
}

// Adds the operators of some functions to a domain.
void add_operators(Registry& own, OrtCustomOpDomain* domain, const std::vector<std::string>& functions) {
  for (const std::string& name : functions) {
    const auto known = own.operators.try_emplace(name, *kind_named(kind_of_function(name)), name).first;
    check(own.api, ONNXTRAIN_CALL(own.api, CustomOpDomain_Add)(domain, &known->second));
  }
}

OrtCustomOpDomain* new_domain(Registry& own, const std::vector<std::string>& functions) {
  OrtCustomOpDomain* domain = nullptr;
  check(own.api, ONNXTRAIN_CALL(own.api, CreateCustomOpDomain)(kDomain, &domain));
  add_operators(own, domain, functions);
  return domain;
}

}  // namespace

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

int64_t elements_of(const Shape& shape) {
  constexpr int64_t most = int64_t{1} << 48, most_beside_zero = int64_t{1} << 31;
  int64_t count = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    require(size >= 0, "a dimension is negative");
    require(size == 0 || count <= most / size, "a tensor has too many elements");
    size == 0 ? empty = true : count *= size;
  }
  // Kernels compute with the others, and go along some of them, before they look at the count.
  require(!empty || count <= most_beside_zero, "an empty tensor has other dimensions that are too large");
  return empty ? 0 : count;
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

bool Attributes::is_constant(size_t input) const {
  if (api_->entries[kKernelInfoGetConstantInput_tensor] == nullptr) return false;
  int constant = 0;
  const OrtValue* value = nullptr;
  return found(api_, ONNXTRAIN_CALL(api_, KernelInfoGetConstantInput_tensor)(info_, input, &constant, &value)) &&
         constant != 0;
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

constexpr char kOverlap[] = "an output overlaps another tensor";

Tensor Run::input(size_t index) const {
  const OrtValue* value = nullptr;
  check(api_, ONNXTRAIN_CALL(api_, KernelContext_GetInput)(context_, index, &value));
  const Tensor given = tensor_of(api_, const_cast<OrtValue*>(value));
  if (sharing_ == Sharing::checked_by_kernel || given.elements == 0) return given;
  const Place own = place_of(given, index);
  for (const Place& made : written_) require(may_share(own, made) || are_apart(own, made), kOverlap);
  read_.push_back(own);
  return given;
}

// Outputs are written while inputs are still read, among them labels and lengths that were checked before.
Tensor Run::output(size_t index, const Shape& shape) {
  elements_of(shape);
  OrtValue* value = nullptr;
  check(api_, ONNXTRAIN_CALL(api_, KernelContext_GetOutput)(context_, index, shape.data(), shape.size(), &value));
  require(value != nullptr, "an output is left out, and the kernel computes it");
  const Tensor made = tensor_of(api_, value);
  if (sharing_ == Sharing::checked_by_kernel || made.elements == 0) return made;
  const Place own = place_of(made, index);
  for (const Place& given : read_) require(may_share(given, own) || are_apart(given, own), kOverlap);
  for (const Place& other : written_) require(other.index == index || are_apart(other, own), kOverlap);
  written_.push_back(own);
  return made;
}

Run::Place Run::place_of(const Tensor& tensor, size_t index) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  return {index, begin, begin + static_cast<uintptr_t>(tensor.elements * size_of_type(tensor.type))};
}

// Whether an output may be an input: the first one in the place of the first one.
bool Run::may_share(const Place& given, const Place& made) const {
  return sharing_ == Sharing::first && given.index == 0 && made.index == 0 && given.begin == made.begin;
}

bool Run::are_apart(const Place& one, const Place& other) {
  return one.end <= other.begin || other.end <= one.begin;
}

void Run::parallel(int64_t count, const std::function<void(int64_t)>& work) const {
  if (count <= 1) {
    if (count == 1) work(0);
    return;
  }
  struct Shared {
    const std::function<void(int64_t)>& work;
    const Lender* lender;
    std::mutex guard;
    std::exception_ptr failure;
  } shared{work, present_lender(), {}, nullptr};
  const auto call = [](void* given, size_t index) {
    Shared& own = *static_cast<Shared*>(given);
    try {
      const Borrowing borrowing(own.lender);
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

// What the device half and the library have to agree on: these functions, and what kernels read
// and write. A kernel that reads or writes something else than before gets another name.
ONNXTRAIN_EXPORT int onnxtrain_interface() { return 1; }

// The instruction set in use, and the kernels, one a line.
ONNXTRAIN_EXPORT const char* onnxtrain_isa() { return isa_name(isa()); }

ONNXTRAIN_EXPORT const char* onnxtrain_kernels() {
  try {
    static const std::string names = [] {
      std::string made;
      for (const KernelKind& kind : kernel_kinds()) made += (made.empty() ? "" : "\n") + std::string(kind.name);
      return made;
    }();
    return names.c_str();
  } catch (...) {
    return "";
  }
}

// Takes the names of the functions that the next session has, one a line, and returns how many of
// them kernels serve. The caller keeps other threads from registering in between.
ONNXTRAIN_EXPORT int onnxtrain_expect(const char* names) {
  try {
    const std::vector<std::string> functions = served(lines_of(names));
    Registry& own = registry();
    const std::lock_guard<std::mutex> lock(own.guard);
    own.accepted.clear();
    for (const std::string& name : functions) own.accepted += (own.accepted.empty() ? "" : "\n") + name;
    return static_cast<int>(functions.size());
  } catch (...) {
    return -1;
  }
}

// The names that kernels serve, of those that were last expected.
ONNXTRAIN_EXPORT const char* onnxtrain_accepted() { return registry().accepted.c_str(); }

// For options that serve several sessions: a domain of their own, which grows before each session.
// Options can be given a domain once only.
ONNXTRAIN_EXPORT OrtCustomOpDomain* onnxtrain_last_domain() {
  try {
    Registry& own = registry();
    const std::lock_guard<std::mutex> lock(own.guard);
    const auto found = own.domains.find(own.accepted);
    if (found == own.domains.end()) return nullptr;
    OrtCustomOpDomain* domain = found->second;
    own.domains.erase(found);  // nobody else is given it
    return domain;
  } catch (...) {
    return nullptr;
  }
}

// Adds functions to the domain of such options. None of them is in it yet.
ONNXTRAIN_EXPORT int onnxtrain_extend(OrtCustomOpDomain* domain, const char* names) {
  try {
    Registry& own = registry();
    const std::lock_guard<std::mutex> lock(own.guard);
    add_operators(own, domain, served(lines_of(names)));
    return 0;
  } catch (...) {
    return -1;
  }
}

ONNXTRAIN_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kOrtVersion);
  if (api == nullptr) return nullptr;  // an older runtime runs the functions themselves
  return guarded(api, "RegisterCustomOps", [&] {
    Registry& own = registry();
    const std::lock_guard<std::mutex> lock(own.guard);
    own.api = api;
    OrtCustomOpDomain*& domain = own.domains[own.accepted];
    if (domain == nullptr) domain = new_domain(own, lines_of(own.accepted.c_str()));
    check(api, ONNXTRAIN_CALL(api, AddCustomOpDomain)(options, domain));
  });
}
