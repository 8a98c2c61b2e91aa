// The native kernels, which this library may contain.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "ort.h"

namespace onnxtrain::device {

// The functions of a graph that kernels can stand in for.
std::set<std::string> served_functions(const std::vector<std::string>& functions);

// Lets them, in the session that is made with these options.
void register_kernels(const RuntimePointer& runtime, OrtSessionOptions* options,
                      const std::vector<std::string>& functions);

}  // namespace onnxtrain::device
