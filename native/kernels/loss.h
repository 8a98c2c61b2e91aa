// Softmax and what is built on it, along rows that lie in one piece or along columns of a matrix.
#pragma once

#include <cstdint>

#include "isa.h"

namespace onnxtrain {

// Scores of one sample: `classes` rows of `columns` positions, `stride` elements from row to row.
struct Scores {
  int64_t classes, columns, stride;
};

struct Softmax {
  // The largest score of each position, and the sum of exp(score - largest).
  void (*statistics)(const Scores&, const float* x, float* largest, float* sum);
  // The sum of score - largest over the classes.
  void (*sums)(const Scores&, const float* x, const float* largest, float* sum);
  // dx = exp(x - largest) · factor + offset at each position.
  void (*scaled)(const Scores&, const float* x, const float* largest, const float* factor, const float* offset,
                 float* dx);
  // dx = y (dy - Σ y dy) and dx = dy - exp(y) Σ dy of a row.
  void (*softmax_grad)(const float* dy, const float* y, float* dx, int64_t classes);
  void (*log_softmax_grad)(const float* dy, const float* y, float* dx, int64_t classes);
};

ONNXTRAIN_TABLE(Softmax, kSoftmax, softmax)

}  // namespace onnxtrain
