#include "session_types.h"

namespace onnxtrain::device {

namespace {

// A text of onnxruntime's, which is freed.
std::string taken(const RuntimePointer& runtime, char* text) {
  if (text == nullptr) return "";
  const std::string made = text;
  runtime->check(ONNXTRAIN_CALL(runtime->api, AllocatorFree)(runtime->allocator, text));
  return made;
}

template <class Count, class Name, class Type>
std::vector<ValueType> values_of(const RuntimePointer& runtime, const OrtSession* session, Count* count, Name* name,
                                 Type* type) {
  std::vector<ValueType> made;
  size_t size = 0;
  runtime->check(count(session, &size));
  for (size_t index = 0; index < size; ++index) {
    OrtTypeInfo* info = nullptr;
    char* text = nullptr;
    runtime->check(type(session, index, &info));
    const Held<OrtTypeInfo> held = hold(runtime, info);
    runtime->check(name(session, index, runtime->allocator, &text));
    made.push_back(declared_type(runtime, info));
    made.back().name = taken(runtime, text);
  }
  return made;
}

}  // namespace

Held<OrtTypeInfo> hold(const RuntimePointer& runtime, OrtTypeInfo* info) {
  return Held<OrtTypeInfo>(info, [runtime](OrtTypeInfo* last) { ONNXTRAIN_CALL(runtime->api, ReleaseTypeInfo)(last); });
}

ValueType declared_type(const RuntimePointer& runtime, const OrtTypeInfo* info) {
  const OrtApi* api = runtime->api;
  ValueType made;
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  runtime->check(ONNXTRAIN_CALL(api, CastTypeInfoToTensorInfo)(info, &tensor));
  if (tensor == nullptr) return made;
  size_t rank = 0;
  runtime->check(ONNXTRAIN_CALL(api, GetTensorElementType)(tensor, &made.code));
  runtime->check(ONNXTRAIN_CALL(api, GetDimensionsCount)(tensor, &rank));
  Dims sizes(rank);
  std::vector<const char*> symbols(rank);
  runtime->check(ONNXTRAIN_CALL(api, GetDimensions)(tensor, sizes.data(), rank));
  runtime->check(ONNXTRAIN_CALL(api, GetSymbolicDimensions)(tensor, symbols.data(), rank));
  for (size_t i = 0; i < rank; ++i) made.dims.push_back({sizes[i], symbols[i] == nullptr ? "" : symbols[i]});
  made.has_shape = true;
  return made;
}

SessionInterface interface_of(const RuntimePointer& runtime, const OrtSession* session,
                              const std::vector<const char*>& metadata_keys) {
  const OrtApi* api = runtime->api;
  SessionInterface made;
  made.inputs = values_of(runtime, session, ONNXTRAIN_CALL(api, SessionGetInputCount),
                          ONNXTRAIN_CALL(api, SessionGetInputName), ONNXTRAIN_CALL(api, SessionGetInputTypeInfo));
  made.outputs = values_of(runtime, session, ONNXTRAIN_CALL(api, SessionGetOutputCount),
                           ONNXTRAIN_CALL(api, SessionGetOutputName), ONNXTRAIN_CALL(api, SessionGetOutputTypeInfo));
  OrtModelMetadata* metadata = nullptr;
  runtime->check(ONNXTRAIN_CALL(api, SessionGetModelMetadata)(session, &metadata));
  const Held<OrtModelMetadata> held(metadata, ONNXTRAIN_CALL(api, ReleaseModelMetadata));
  const auto look_up = ONNXTRAIN_CALL(api, ModelMetadataLookupCustomMetadataMap);
  for (const char* key : metadata_keys) {
    char* text = nullptr;
    runtime->check(look_up(metadata, runtime->allocator, key, &text));
    if (text != nullptr) made.metadata[key] = taken(runtime, text);
  }
  return made;
}

}  // namespace onnxtrain::device
