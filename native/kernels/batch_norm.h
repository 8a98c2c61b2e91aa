// BatchNormalization by the statistics of the batch, and its gradient.
#pragma once

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace onnxtrain {

// x has the shape (batch, channels, plane); what follows is clipped to lie between two bounds if so asked.
struct BatchNormShape {
  int64_t batch, channels, plane;
  float epsilon;
  bool clipped;
  float low, high;
};

struct BatchNormForward {
  const float *x, *scale, *bias;
  const float* residual;  // is added to what is normalized, if there is one
  float *y, *mean, *variance;
};

struct BatchNormBackward {
  const float *dy, *x, *scale, *bias, *mean, *variance;
  bool of_batch;  // the statistics depend on x
  float *dx, *dscale, *dbias;
};

struct BatchNormTable {
  void (*forward)(const BatchNormShape&, const BatchNormForward&, const Parallel&);
  void (*backward)(const BatchNormShape&, const BatchNormBackward&, const Parallel&);
  // y from x and statistics that are known, as `forward` computed it.
  void (*apply)(const BatchNormShape&, const BatchNormForward&, const Parallel&);
};

ONNXTRAIN_TABLE(BatchNormTable, kBatchNorm, batch_norm)

}  // namespace onnxtrain
