// Convolutions whose groups have one input channel each: every output channel sees one plane.
#pragma once

#include "compute.h"

namespace onnxtrain {

struct Depthwise {
  // Whether the functions below can take a convolution.
  bool (*takes)(const Convolution&);
  // As in Compute.
  void (*convolve)(const Convolution&, const float* x, const float* w, const float* bias, float* y, const Parallel&);
  void (*weight_gradient)(const Convolution&, const float* x, const float* dy, float* dw, const Parallel&);
  void (*input_gradient)(const Convolution&, const float* dy, const float* w, float* dx, const Parallel&);
};

ONNXTRAIN_TABLE(Depthwise, kDepthwise, depthwise)

}  // namespace onnxtrain
