// Normalization within one sample: over rows (LayerNormalization, RMSNormalization), and over groups
// of channels (GroupNormalization, InstanceNormalization).
#pragma once

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace onnxtrain {

struct RowNormForward {
  int64_t rows, width;
  float epsilon;
  const float *x, *scale, *bias;  // the bias may be missing
  float *y, *mean, *inverse;      // without a mean: y = x / the root of the mean square
};

struct RowNormBackward {
  int64_t rows, width;
  float epsilon;
  const float *dy, *x, *scale, *mean, *inverse;  // without a mean, neither is given
  float *dx, *dscale, *dbias;                    // the last two may be missing
  const float* bias;                             // may be missing
  float* y;                                      // the output once more; may be missing
};

// x has the shape (samples, groups, channels, plane): channels of one group.
struct GroupNormShape {
  int64_t samples, groups, channels, plane;
  float epsilon;
  bool per_channel;  // scale and bias: one for each channel, or for each group
};

struct GroupNormForward {
  const float *x, *scale, *bias;
  float* y;
};

struct GroupNormBackward {
  const float *dy, *x, *scale;
  float *dx, *dscale, *dbias;
};

struct NormTable {
  void (*row_forward)(const RowNormForward&, const Parallel&);
  void (*row_backward)(const RowNormBackward&, const Parallel&);
  void (*group_forward)(const GroupNormShape&, const GroupNormForward&, const Parallel&);
  void (*group_backward)(const GroupNormShape&, const GroupNormBackward&, const Parallel&);
};

ONNXTRAIN_TABLE(NormTable, kNorm, norm)

}  // namespace onnxtrain
