// Gradients of pools over windows.
#pragma once

#include "compute.h"

namespace onnxtrain {

struct Pool {
  // The gradient of a maximum: that of each window goes to its first maximum. Planes are described as
  // a convolution whose groups have one channel each.
  void (*max_gradient)(const Convolution&, const float* x, const float* dy, float* dx, const Parallel&);
  // The gradient of an average, where windows of two by two lie side by side; false for others.
  bool (*average_two_by_two)(const Convolution&, float factor, const float* dy, float* dx, const Parallel&);
  // Writes planes of `size` elements that are all `factor` times the plane's own number.
  void (*spread)(int64_t planes, int64_t size, float factor, const float* numbers, float* to, const Parallel&);
};

ONNXTRAIN_TABLE(Pool, kPool, pool)

}  // namespace onnxtrain
