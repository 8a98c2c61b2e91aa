// Matrices transposed through registers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// A square of kLanes × kLanes.
inline void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride, float factor) {
  Vector rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = load(from + i * from_stride);
  transpose(rows);
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
