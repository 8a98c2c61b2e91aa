// Matrices transposed through registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Takes `kStep` lanes of a and of b by turns: from their first lanes of each pair of runs, or the second.
template <int kStep, bool kSecond, int... kLane>
Vector interleave(Vector a, Vector b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(
      a, b,
      ((kLane & ~(2 * kStep - 1)) + (kSecond ? kStep : 0) + (kLane & (kStep - 1)) + (kLane & kStep ? kLanes : 0))...);
}

// Exchanges blocks of `kStep` lanes between rows that are `kStep` apart; the last call is a transposition.
template <int kStep>
void exchange(Vector (&rows)[kLanes]) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if ((i & kStep) == 0) {
      const Vector a = rows[i], b = rows[i + kStep];
      rows[i] = interleave<kStep, false>(a, b, lanes);
      rows[i + kStep] = interleave<kStep, true>(a, b, lanes);
    }
  if constexpr (2 * kStep < kLanes) exchange<2 * kStep>(rows);
}

// A square of kLanes × kLanes.
inline void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride, float factor) {
  Vector rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = load(from + i * from_stride);
  exchange<1>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(to + i * to_stride, rows[i] * factor);
}

// Writes a matrix of rows × columns, times a factor, as columns × rows.
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                      int64_t to_stride, float factor = 1) {
  const int64_t whole_rows = rows / kLanes * kLanes, whole_columns = columns / kLanes * kLanes;
  for (int64_t i = 0; i < whole_rows; i += kLanes)
    for (int64_t j = 0; j < whole_columns; j += kLanes)
      transpose_square(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride, factor);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j)
      to[j * to_stride + i] = from[i * from_stride + j] * factor;
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
