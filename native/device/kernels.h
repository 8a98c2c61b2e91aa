// The native kernels, which this library may contain.
#pragma once

#include <string>
#include <vector>

#include "ort.h"

namespace onnxtrain::device {

// Whether kernels stand in for any of the functions of a graph.
bool serves_kernels(const std::vector<std::string>& functions);

// Lets them, in the session that is made with these options.
void register_kernels(const RuntimePointer& runtime, OrtSessionOptions* options,
                      const std::vector<std::string>& functions);

}  // namespace onnxtrain::device
