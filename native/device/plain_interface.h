// The public header, with onnxruntime's types as this library declares them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ort.h"

namespace onnxtrain {

struct OrtCheckpointState;
struct OrtTrainingSession;
#include "../include/onnxtrain.h"

}  // namespace onnxtrain
