// What a user feeds: checked against the inputs of a graph, and converted where nothing is lost.
#pragma once

#include <vector>

#include "model_file.h"
#include "ort.h"

namespace onnxtrain::device {

// The values to bind to the inputs.
std::vector<Held<OrtValue>> prepared(const RuntimePointer& runtime, const std::vector<ValueType>& inputs,
                                     const std::vector<const OrtValue*>& given);

}  // namespace onnxtrain::device
