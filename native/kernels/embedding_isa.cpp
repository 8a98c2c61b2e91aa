// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "embedding.h"

#include <algorithm>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

// So many rows are added up by themselves: a sum of thousands of rows stays accurate.
constexpr int64_t kGroup = 64;
constexpr int kMost = kLanes == 16 ? 16 : 8;  // vectors side by side: long pieces of rows are read faster

template <int vectors>
void sum_vectors(const float* from, const int64_t* positions, int64_t count, int64_t stride, float* to) {
  for (int64_t first = 0; first < count; first += kGroup) {
    Vector part[vectors] = {};
    for (int64_t i = first; i < std::min(count, first + kGroup); ++i)
      for (int n = 0; n < vectors; ++n) part[n] += load(from + positions[i] * stride + n * kLanes);
    for (int n = 0; n < vectors; ++n) store(to + n * kLanes, first == 0 ? part[n] : load(to + n * kLanes) + part[n]);
  }
}

float sum_column(const float* from, const int64_t* positions, int64_t count, int64_t stride) {
  float total = 0.0f;
  for (int64_t first = 0; first < count; first += kGroup) {
    float part = 0.0f;
    for (int64_t i = first; i < std::min(count, first + kGroup); ++i) part += from[positions[i] * stride];
    total += part;
  }
  return total;
}

void sum_rows(const float* from, const int64_t* positions, int64_t count, int64_t stride, int64_t width, float* to) {
  if (count == 1) {
    std::copy_n(from + positions[0] * stride, width, to);
    return;
  }
  int64_t i = 0;
  for (; i + kMost * kLanes <= width; i += kMost * kLanes)
    sum_vectors<kMost>(from + i, positions, count, stride, to + i);
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) sum_vectors<4>(from + i, positions, count, stride, to + i);
  for (; i + kLanes <= width; i += kLanes) sum_vectors<1>(from + i, positions, count, stride, to + i);
  for (; i < width; ++i) to[i] = sum_column(from + i, positions, count, stride);
}

}  // namespace

const Embedding kEmbedding = {sum_rows};

}  // namespace onnxtrain::ONNXTRAIN_ISA
