// Sums of rows, for the gradient of a table.
#pragma once

#include <cstdint>

#include "isa.h"

namespace onnxtrain {

struct Embedding {
  // to = Σ from[position · stride …], `width` elements of each of `count` rows, in their order.
  void (*sum_rows)(const float* from, const int64_t* positions, int64_t count, int64_t stride, int64_t width,
                   float* to);
};

ONNXTRAIN_TABLE(Embedding, kEmbedding, embedding)

}  // namespace onnxtrain
