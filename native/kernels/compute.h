// The computations that are compiled once for each instruction set, and the choice among them.
#pragma once

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace onnxtrain {

// C = A · B + bias. Strides are in elements.
struct Product {
  int64_t rows, columns, depth;
  const float* a;
  int64_t a_row, a_depth;  // from row to row, and along the depth
  const float* b;
  int64_t b_depth, b_column;
  float* c;
  int64_t c_row;
  const float* bias = nullptr;  // a row that is added to all rows
  bool bf16 = false;            // round A and B to bfloat16 where the processor multiplies these faster
};

constexpr int kMostAxes = 3;

// A convolution of up to three axes; those that it lacks have size 1. All of one group.
struct Convolution {
  int64_t batch, groups, in_channels, out_channels;  // channels of one group
  int64_t in[kMostAxes], out[kMostAxes], kernel[kMostAxes];
  int64_t stride[kMostAxes], dilation[kMostAxes], pad[kMostAxes];  // the pad before
  bool bf16 = false;                                               // as in Product

  int64_t in_size() const { return in[0] * in[1] * in[2]; }
  int64_t out_size() const { return out[0] * out[1] * out[2]; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};

struct Compute {
  void (*product)(const Product&, const Parallel&);
  // y = x * w + bias; the bias may be missing.
  void (*convolve)(const Convolution&, const float* x, const float* w, const float* bias, float* y, const Parallel&);
  // The gradient with respect to w.
  void (*convolve_weight_gradient)(const Convolution&, const float* x, const float* dy, float* dw, const Parallel&);
  // The gradient with respect to x.
  void (*convolve_input_gradient)(const Convolution&, const float* dy, const float* w, float* dx, const Parallel&);
};

ONNXTRAIN_TABLE(Compute, kCompute, compute)

}  // namespace onnxtrain
