// A block of a network that does not train: a convolution, one of each channel by itself, and a 1×1 convolution.
#pragma once

#include "compute.h"

namespace onnxtrain {

// What an activation leaves: everything without one.
struct Bounds {
  float low, high;
};

// The sizes of a block. Axis 0 of its convolutions has size 1, and dilations are 1.
struct BlockShape {
  bool expands;           // whether there is a convolution of all channels in front
  Convolution expansion;  // that one
  Convolution depthwise;
  int64_t out_channels;
  Bounds bounds[3];  // behind each convolution
};

struct BlockWeights {
  const float *weights[3], *biases[3];  // no bias is zero; without an expansion, the first are not there
};

struct BlockData {
  const float* x;
  const float* packed;    // the weights
  const float* residual;  // which is added to the output, or nothing
  float* y;
};

struct InvertedResiduals {
  // Weights in the order in which the computation reads them: how many floats that takes, whatever the size of
  // images is, and these.
  int64_t (*packed_size)(const BlockShape&);
  void (*pack)(const BlockShape&, const BlockWeights&, float* to);
  void (*forward)(const BlockShape&, const BlockData&, const Parallel&);
};

ONNXTRAIN_TABLE(InvertedResiduals, kInvertedResiduals, inverted_residuals)

}  // namespace onnxtrain
