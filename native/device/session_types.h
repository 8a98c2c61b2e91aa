// What a session of onnxruntime says of its inputs and outputs.
#pragma once

#include "model_file.h"
#include "ort.h"

namespace onnxtrain::device {

// A type without a name; its code is 0 if it is not a tensor. A scalar and an unknown shape look alike.
ValueType declared_type(const RuntimePointer& runtime, const OrtTypeInfo* info);

Held<OrtTypeInfo> hold(const RuntimePointer& runtime, OrtTypeInfo* info);

// What a session takes and returns, and those of the wanted entries in the metadata of its model that are there.
struct SessionInterface {
  std::vector<ValueType> inputs, outputs;
  std::map<std::string, std::string> metadata;
};

SessionInterface interface_of(const RuntimePointer& runtime, const OrtSession* session,
                              const std::vector<const char*>& metadata_keys);

}  // namespace onnxtrain::device
