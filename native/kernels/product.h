// One matrix product: C = A · B, or C += A · B, where packers read A and B from wherever they are.
//
// The product is cut into tiles of kRows × kColumns that live in registers. Panels of A (kRows high)
// and of B (kColumns wide) are packed so that a tile reads memory in order. A packer is a function
// object that writes a panel: a matrix, its transpose, or the patches of an image, which is how a
// convolution becomes a product without a matrix of columns.
//
// This file is compiled once for each instruction set, in a namespace of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Depth of a packed panel: a panel of B (kDepth × kColumns floats) stays in the first cache.
constexpr int64_t kDepth = 256;
// Rows of A that are packed at once; they stay in the second cache.
constexpr int64_t kBlockRows = kRows * (240 / kRows);
// Columns of B that are packed at once.
constexpr int64_t kBlockColumns = kColumns * (1024 / kColumns);

// Adds the product of two packed panels to a tile of C, `depth` long.
inline void add_tile(int64_t depth, const float* a, const float* b, float* c, int64_t stride,
                     bool fresh) {
  constexpr int kVectors = kColumns / kLanes;
  Vector sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector right[kVectors];
    for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vector left = broadcast(a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += left * right[j];
    }
    a += kRows;
    b += kColumns;
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) {
      float* place = c + i * stride + j * kLanes;
      store(place, fresh ? sum[i][j] : load(place) + sum[i][j]);
    }
}

// The same for a tile at the edge, of which only `rows` × `columns` belong to C.
inline void add_edge(int64_t depth, const float* a, const float* b, float* c, int64_t stride,
                     int64_t rows, int64_t columns, bool fresh) {
  alignas(64) float tile[kRows * kColumns];
  add_tile(depth, a, b, tile, kColumns, true);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float& place = c[i * stride + j];
      place = fresh ? tile[i * kColumns + j] : place + tile[i * kColumns + j];
    }
}

// Memory for the packed panels of one thread.
constexpr int64_t kPanelFloats = kBlockRows * kDepth + kBlockColumns * kDepth;

// Computes rows [row, row_end) × columns [column, column_end) of C.
//
// `pack_a(panel, row, rows, k, depth)` writes rows of A as panel[k][kRows], zeros behind the last;
// `pack_b(panel, column, columns, k, depth)` columns of B as panel[k][kColumns].
template <class PackA, class PackB>
void multiply_block(const PackA& pack_a, const PackB& pack_b, int64_t row, int64_t row_end,
                    int64_t column, int64_t column_end, int64_t k_begin, int64_t k_end, float* c,
                    int64_t stride, bool add, float* panels) {
  float* const packed_a = panels;
  float* const packed_b = panels + kBlockRows * kDepth;
  for (int64_t jc = column; jc < column_end; jc += kBlockColumns) {
    const int64_t j_end = std::min(jc + kBlockColumns, column_end);
    for (int64_t kc = k_begin; kc < k_end; kc += kDepth) {
      const int64_t depth = std::min(kDepth, k_end - kc);
      const bool fresh = !add && kc == k_begin;
      for (int64_t j = jc; j < j_end; j += kColumns)
        pack_b(packed_b + (j - jc) * depth, j, std::min<int64_t>(kColumns, j_end - j), kc, depth);
      for (int64_t ic = row; ic < row_end; ic += kBlockRows) {
        const int64_t i_end = std::min(ic + kBlockRows, row_end);
        for (int64_t i = ic; i < i_end; i += kRows)
          pack_a(packed_a + (i - ic) * depth, i, std::min<int64_t>(kRows, i_end - i), kc, depth);
        for (int64_t j = jc; j < j_end; j += kColumns)
          for (int64_t i = ic; i < i_end; i += kRows) {
            const float* a = packed_a + (i - ic) * depth;
            const float* b = packed_b + (j - jc) * depth;
            float* tile = c + i * stride + j;
            const int64_t rows = std::min<int64_t>(kRows, i_end - i);
            const int64_t columns = std::min<int64_t>(kColumns, j_end - j);
            if (rows == kRows && columns == kColumns)
              add_tile(depth, a, b, tile, stride, fresh);
            else
              add_edge(depth, a, b, tile, stride, rows, columns, fresh);
          }
      }
    }
  }
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
