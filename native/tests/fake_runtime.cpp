#include "fake_runtime.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "kernel.h"

namespace onnxtrain {

extern "C" int onnxtrain_expect(const char* names);
extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base);

// What onnxruntime's opaque types are here.
struct OrtStatus {
  std::string text;
};

struct OrtCustomOpDomain {
  std::vector<const OrtCustomOp*> operators;
};

struct OrtSessionOptions {
  std::vector<OrtCustomOpDomain*> domains;
};

struct OrtKernelInfo {
  const std::vector<CaseAttribute>* attributes;
};

struct OrtTensorTypeAndShapeInfo {
  int type;
  std::vector<int64_t> shape;
};

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 28;

// Memory of exactly some bytes; it ends where the block of the allocator ends.
class Memory {
 public:
  Memory(size_t size, size_t shift) : block_(std::malloc(size + shift + (size + shift == 0))), shift_(shift) {
    if (block_ == nullptr) throw std::bad_alloc();
  }
  ~Memory() { std::free(block_); }
  Memory(const Memory&) = delete;
  char* data() const { return static_cast<char*>(block_) + shift_; }

 private:
  void* block_;
  size_t shift_;
};

}  // namespace

struct OrtValue {
  int type;
  std::vector<int64_t> shape;
  std::unique_ptr<Memory> memory;
  int64_t bytes = 0;
};

struct OrtKernelContext {
  std::vector<std::unique_ptr<OrtValue>> inputs, outputs;
  std::vector<int> output_types;
  Order order;
  bool misaligned;
};

namespace {

OrtStatus* create_status(OrtErrorCode, const char* text) { return new OrtStatus{text}; }
const char* error_message(const OrtStatus* status) { return status->text.c_str(); }
void release_status(OrtStatus* status) { delete status; }
OrtStatus* failed(const char* text) { return new OrtStatus{text}; }

OrtStatus* create_domain(const char*, OrtCustomOpDomain** made) {
  *made = new OrtCustomOpDomain;
  return nullptr;
}
OrtStatus* add_operator(OrtCustomOpDomain* domain, const OrtCustomOp* op) {
  domain->operators.push_back(op);
  return nullptr;
}
OrtStatus* add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) {
  options->domains.push_back(domain);
  return nullptr;
}

const CaseAttribute* attribute(const OrtKernelInfo* info, const char* name, int type) {
  for (const CaseAttribute& known : *info->attributes)
    if (known.name == name && known.type == type) return &known;
  return nullptr;
}
OrtStatus* read_number(const OrtKernelInfo* info, const char* name, float* value) {
  const CaseAttribute* found = attribute(info, name, CaseAttribute::kNumber);
  if (found == nullptr) return failed("there is no such attribute");
  *value = found->number;
  return nullptr;
}
OrtStatus* read_integer(const OrtKernelInfo* info, const char* name, int64_t* value) {
  const CaseAttribute* found = attribute(info, name, CaseAttribute::kInteger);
  if (found == nullptr) return failed("there is no such attribute");
  *value = found->integers.at(0);
  return nullptr;
}
OrtStatus* read_integers(const OrtKernelInfo* info, const char* name, int64_t* values, size_t* count) {
  const CaseAttribute* found = attribute(info, name, CaseAttribute::kIntegers);
  if (found == nullptr) return failed("there is no such attribute");
  *count = found->integers.size();
  if (values != nullptr) std::copy(found->integers.begin(), found->integers.end(), values);
  return nullptr;
}
OrtStatus* read_text(const OrtKernelInfo* info, const char* name, char* text, size_t* size) {
  const CaseAttribute* found = attribute(info, name, CaseAttribute::kText);
  if (found == nullptr) return failed("there is no such attribute");
  const size_t room = *size;
  *size = found->text.size() + 1;
  if (text == nullptr) return nullptr;
  if (room < *size) return failed("there is not enough room for the attribute");
  std::memcpy(text, found->text.c_str(), *size);
  return nullptr;
}

OrtStatus* data_of(OrtValue* value, void** data) {
  *data = value->memory->data();
  return nullptr;
}
OrtStatus* info_of(const OrtValue* value, OrtTensorTypeAndShapeInfo** info) {
  *info = new OrtTensorTypeAndShapeInfo{value->type, value->shape};
  return nullptr;
}
void release_info(OrtTensorTypeAndShapeInfo* info) { delete info; }
OrtStatus* type_of(const OrtTensorTypeAndShapeInfo* info, int* type) {
  *type = info->type;
  return nullptr;
}
OrtStatus* rank_of(const OrtTensorTypeAndShapeInfo* info, size_t* rank) {
  *rank = info->shape.size();
  return nullptr;
}
OrtStatus* dims_of(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t rank) {
  for (size_t i = 0; i < rank; ++i) dims[i] = info->shape.at(i);
  return nullptr;
}

OrtStatus* input_count(const OrtKernelContext* context, size_t* count) {
  *count = context->inputs.size();
  return nullptr;
}
OrtStatus* output_count(const OrtKernelContext* context, size_t* count) {
  *count = context->outputs.size();
  return nullptr;
}
OrtStatus* get_input(const OrtKernelContext* context, size_t index, const OrtValue** value) {
  if (index >= context->inputs.size()) return failed("there is no such input");
  *value = context->inputs[index].get();
  return nullptr;
}

std::unique_ptr<OrtValue> value_of(int type, std::vector<int64_t> shape, bool misaligned) {
  int64_t bytes = size_of_type(type);
  for (const int64_t size : shape)
    if (size < 0 || (size > 0 && bytes > kMostBytes / size))
      return nullptr;
    else
      bytes *= size;
  auto made = std::make_unique<OrtValue>();
  *made = {type, std::move(shape), std::make_unique<Memory>(bytes, misaligned ? size_of_type(type) : 0), bytes};
  return made;
}

OrtStatus* get_output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t rank, OrtValue** value) {
  if (index >= context->outputs.size()) return failed("there is no such output");
  auto made = value_of(context->output_types[index], {shape, shape + rank}, context->misaligned);
  if (made == nullptr) return failed("the output does not fit into memory");
  std::memset(made->memory->data(), 0xff, made->bytes);  // NaN: what a kernel forgets is seen
  context->outputs[index] = std::move(made);
  *value = context->outputs[index].get();
  return nullptr;
}

OrtStatus* parallel_for(const OrtKernelContext* context, void (*task)(void*, size_t), size_t total, size_t,
                        void* data) {
  if (context->order == Order::forward)
    for (size_t i = 0; i < total; ++i) task(data, i);
  if (context->order == Order::backward)
    for (size_t i = total; i-- > 0;) task(data, i);
  if (context->order == Order::threads) {
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i = next++; i < total; i = next++) task(data, i);
    };
    std::thread other(work);
    work();
    other.join();
  }
  return nullptr;
}

const OrtApi* api_of(uint32_t) {
  static const OrtApi table = [] {
    OrtApi made{};
    const auto set = [&](int index, auto* function) { made.entries[index] = reinterpret_cast<void*>(function); };
    set(kCreateStatus, create_status);
    set(kGetErrorMessage, error_message);
    set(kReleaseStatus, release_status);
    set(kCreateCustomOpDomain, create_domain);
    set(kCustomOpDomain_Add, add_operator);
    set(kAddCustomOpDomain, add_domain);
    set(kGetTensorMutableData, data_of);
    set(kGetTensorElementType, type_of);
    set(kGetDimensionsCount, rank_of);
    set(kGetDimensions, dims_of);
    set(kGetTensorTypeAndShape, info_of);
    set(kReleaseTensorTypeAndShapeInfo, release_info);
    set(kKernelInfoGetAttribute_float, read_number);
    set(kKernelInfoGetAttribute_int64, read_integer);
    set(kKernelInfoGetAttributeArray_int64, read_integers);
    set(kKernelInfoGetAttribute_string, read_text);
    set(kKernelContext_GetInputCount, input_count);
    set(kKernelContext_GetOutputCount, output_count);
    set(kKernelContext_GetInput, get_input);
    set(kKernelContext_GetOutput, get_output);
    set(kKernelContext_ParallelFor, parallel_for);
    return made;
  }();
  return &table;
}

const OrtCustomOp* operator_of(const std::string& kind) {
  static std::map<std::string, const OrtCustomOp*> known;
  const OrtCustomOp*& op = known[kind];
  if (op == nullptr) {
    onnxtrain_expect((kind + "_0").c_str());
    OrtSessionOptions options;
    const OrtApiBase base{api_of, [] { return "1.19.0"; }};
    RegisterCustomOps(&options, &base);
    if (options.domains.at(0)->operators.empty()) throw std::runtime_error("there is no kernel " + kind);
    op = options.domains[0]->operators[0];
  }
  return op;
}

std::string text_and_release(OrtStatus* status) {
  const std::string text = status->text;
  delete status;
  if (text.empty()) throw std::runtime_error("an error without a sentence");
  return text;
}

std::unique_ptr<OrtKernelContext> context_of(const Case& one, const OrtCustomOp* op, Order order, bool misaligned) {
  auto context = std::make_unique<OrtKernelContext>();
  context->order = order;
  context->misaligned = misaligned;
  for (const CaseTensor& given : one.inputs) {
    context->inputs.push_back(given.type == 0 ? nullptr : value_of(given.type, given.shape, misaligned));
    const OrtValue* made = context->inputs.back().get();
    if (made == nullptr) continue;
    const size_t size = std::min<size_t>(made->bytes, given.bytes.size());
    std::memset(made->memory->data(), 0, made->bytes);
    if (size > 0) std::memcpy(made->memory->data(), given.bytes.data(), size);
  }
  const size_t types = op->GetOutputTypeCount(op);
  for (size_t i = 0; i < std::max(one.outputs.size(), types); ++i)
    context->output_types.push_back(op->GetOutputType(op, std::min(i, types - 1)));
  context->outputs.resize(context->output_types.size());
  return context;
}

}  // namespace

Result run_case(const Case& one, Order order, bool misaligned) {
  const OrtCustomOp* op = operator_of(one.kind);
  const OrtKernelInfo info{&one.attributes};
  void* kernel = nullptr;
  if (OrtStatus* status = op->CreateKernelV2(op, api_of(0), &info, &kernel)) return {{}, text_and_release(status)};
  const auto context = context_of(one, op, order, misaligned);
  OrtStatus* status = op->KernelComputeV2(kernel, context.get());
  op->KernelDestroy(kernel);
  if (status != nullptr) return {{}, text_and_release(status)};
  Result result;
  for (const auto& value : context->outputs) {
    CaseTensor copy;
    if (value != nullptr) {
      copy.type = value->type;
      copy.shape = value->shape;
      copy.bytes.assign(value->memory->data(), value->memory->data() + value->bytes);
    }
    result.outputs.push_back(std::move(copy));
  }
  return result;
}

}  // namespace onnxtrain
