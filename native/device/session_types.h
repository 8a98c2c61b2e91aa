// What a session of onnxruntime says of its inputs and outputs.
#pragma once

#include "model_file.h"
#include "ort.h"

namespace onnxtrain::device {

// A type without a name; its code is 0 if it is not a tensor. A scalar and an unknown shape look alike.
ValueType declared_type(const RuntimePointer& runtime, const OrtTypeInfo* info);

Held<OrtTypeInfo> hold(const RuntimePointer& runtime, OrtTypeInfo* info);

}  // namespace onnxtrain::device
