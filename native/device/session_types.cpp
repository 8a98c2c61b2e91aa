#include "session_types.h"

namespace onnxtrain::device {

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

}  // namespace onnxtrain::device
