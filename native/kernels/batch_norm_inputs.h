// What kernels are told of a BatchNormalization.
#pragma once

#include "batch_norm.h"
#include "kernel.h"

namespace onnxtrain {

// What the attributes epsilon, clipped, low and high of a kernel say.
struct BatchNormSettings {
  float epsilon, low, high;
  bool clipped;

  explicit BatchNormSettings(const Attributes& of);
  BatchNormShape shape_of(const Tensor& x) const;
};

// One number for each channel; an error if they are not as many.
const float* per_channel(const Tensor& given, const BatchNormShape& shape);

}  // namespace onnxtrain
