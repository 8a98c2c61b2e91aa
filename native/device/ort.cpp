#include "ort.h"

namespace onnxtrain::device {

namespace {

template <class T, class Release>
Held<T> held(const RuntimePointer& runtime, T* object, Release* release) {
  return Held<T>(object, [runtime, release](T* last) { release(last); });
}

struct ReleaseValueOnce {
  RuntimePointer runtime;
  bool is_ours = true;
  void operator()(OrtValue* value) const {
    if (is_ours) ONNXTRAIN_CALL(runtime->api, ReleaseValue)(value);
  }
};

}  // namespace

Runtime::Runtime(const OrtApi* given) : api(given) {
  constexpr int kArena = 1, kDefault = 0;
  check(ONNXTRAIN_CALL(api, CreateCpuMemoryInfo)(kArena, kDefault, &memory));
  check(ONNXTRAIN_CALL(api, GetAllocatorWithDefaultOptions)(&allocator));
}

Runtime::~Runtime() { ONNXTRAIN_CALL(api, ReleaseMemoryInfo)(memory); }

void Runtime::check(OrtStatus* status) const {
  if (status == nullptr) return;
  const std::string message = ONNXTRAIN_CALL(api, GetErrorMessage)(status);
  ONNXTRAIN_CALL(api, ReleaseStatus)(status);
  throw Error(message);
}

Held<OrtValue> hold(const RuntimePointer& runtime, OrtValue* value) {
  return Held<OrtValue>(value, ReleaseValueOnce{runtime});
}

OrtValue* released(const Held<OrtValue>& value) {
  std::get_deleter<ReleaseValueOnce>(value)->is_ours = false;
  return value.get();
}

Held<OrtSession> hold(const RuntimePointer& runtime, OrtSession* session) {
  return held(runtime, session, ONNXTRAIN_CALL(runtime->api, ReleaseSession));
}

Held<OrtSessionOptions> hold(const RuntimePointer& runtime, OrtSessionOptions* options) {
  return held(runtime, options, ONNXTRAIN_CALL(runtime->api, ReleaseSessionOptions));
}

Held<OrtIoBinding> hold(const RuntimePointer& runtime, OrtIoBinding* binding) {
  return held(runtime, binding, ONNXTRAIN_CALL(runtime->api, ReleaseIoBinding));
}

Held<OrtRunOptions> hold(const RuntimePointer& runtime, OrtRunOptions* options) {
  return held(runtime, options, ONNXTRAIN_CALL(runtime->api, ReleaseRunOptions));
}

Held<OrtValue> value_over(const RuntimePointer& runtime, void* data, uint64_t size, int code, const Dims& dims) {
  static uint8_t nothing[1] = {};  // a tensor without elements has an address, too
  OrtValue* value = nullptr;
  runtime->check(ONNXTRAIN_CALL(runtime->api, CreateTensorWithDataAsOrtValue)(
      runtime->memory, data == nullptr ? nothing : data, static_cast<size_t>(size), dims.data(), dims.size(), code,
      &value));
  return hold(runtime, value);
}

Held<OrtValue> new_value(const RuntimePointer& runtime, int code, const Dims& dims) {
  OrtValue* value = nullptr;
  const auto create = ONNXTRAIN_CALL(runtime->api, CreateTensorAsOrtValue);
  runtime->check(create(runtime->allocator, dims.data(), dims.size(), code, &value));
  return hold(runtime, value);
}

ValueShape shape_of(const RuntimePointer& runtime, const OrtValue* value) {
  const OrtApi* api = runtime->api;
  ValueShape found;
  int is_tensor = 0;
  runtime->check(ONNXTRAIN_CALL(api, IsTensor)(value, &is_tensor));
  if (is_tensor == 0) return found;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  runtime->check(ONNXTRAIN_CALL(api, GetTensorTypeAndShape)(value, &info));
  const Held<OrtTensorTypeAndShapeInfo> released(info, ONNXTRAIN_CALL(api, ReleaseTensorTypeAndShapeInfo));
  size_t rank = 0;
  runtime->check(ONNXTRAIN_CALL(api, GetTensorElementType)(info, &found.code));
  runtime->check(ONNXTRAIN_CALL(api, GetDimensionsCount)(info, &rank));
  found.dims.resize(rank);
  runtime->check(ONNXTRAIN_CALL(api, GetDimensions)(info, found.dims.data(), rank));
  return found;
}

uint8_t* data_of(const RuntimePointer& runtime, const OrtValue* value) {
  void* data = nullptr;
  runtime->check(ONNXTRAIN_CALL(runtime->api, GetTensorMutableData)(const_cast<OrtValue*>(value), &data));
  return static_cast<uint8_t*>(data);
}

}  // namespace onnxtrain::device
