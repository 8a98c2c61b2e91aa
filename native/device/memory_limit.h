// A bound for the memory that onnxruntime takes.
#pragma once

#include "ort.h"

namespace onnxtrain::device {

// An environment of onnxruntime, of which a process has one: all that are made are the same.
Held<OrtEnv> new_env(const RuntimePointer& runtime);

// Lets sessions that ask for it share an allocator that has so many bytes at most.
void limit_memory(const RuntimePointer& runtime, uint64_t bytes);

}  // namespace onnxtrain::device
