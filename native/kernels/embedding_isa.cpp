// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "embedding.h"

#include <algorithm>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

constexpr int kVectors = 4;
// So many rows are added up by themselves: a sum of thousands of rows stays accurate.
constexpr int64_t kGroup = 64;

void sum_vectors(const float* from, const int64_t* positions, int64_t count, int64_t stride, float* to) {
  Vector total[kVectors] = {};
  for (int64_t first = 0; first < count; first += kGroup) {
    Vector part[kVectors] = {};
    for (int64_t i = first; i < std::min(count, first + kGroup); ++i)
      for (int n = 0; n < kVectors; ++n) part[n] += load(from + positions[i] * stride + n * kLanes);
    for (int n = 0; n < kVectors; ++n) total[n] += part[n];
  }
  for (int n = 0; n < kVectors; ++n) store(to + n * kLanes, total[n]);
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
  for (; i + kVectors * kLanes <= width; i += kVectors * kLanes) sum_vectors(from + i, positions, count, stride, to + i);
  for (; i < width; ++i) to[i] = sum_column(from + i, positions, count, stride);
}

}  // namespace

const Embedding kEmbedding = {sum_rows};

}  // namespace onnxtrain::ONNXTRAIN_ISA
