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
#include <new>

#include "compute.h"
#include "packers.h"
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

// The same for a tile that is not whole, or whose columns do not lie side by side.
template <class Store>
void add_edge(int64_t depth, const float* a, const float* b, const Store& store, int64_t row, int64_t rows,
              int64_t column, int64_t columns, bool fresh) {
  alignas(64) float tile[kRows * kColumns];
  add_tile(depth, a, b, tile, kColumns, true);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      float& place = store.at(row + i, column + j);
      place = fresh ? tile[i * kColumns + j] : place + tile[i * kColumns + j];
    }
}

// Part of a product: rows × columns × depth.
struct Block {
  int64_t row, row_end, column, column_end, k, k_end;
};

// The memory of packed panels, one for each thread.
inline float* panels() {
  struct Memory {
    float* data = static_cast<float*>(::operator new(sizeof(float) * (kBlockRows + kBlockColumns) * kDepth, std::align_val_t(64)));
    ~Memory() { ::operator delete(data, std::align_val_t(64)); }
  };
  thread_local Memory own;
  return own.data;
}

// Computes a block of C.
//
// `pack_a(panel, row, rows, k, depth)` writes rows of A as panel[k][kRows], zeros behind the last;
// `pack_b(panel, column, columns, k, depth)` columns of B as panel[k][kColumns].
template <class PackA, class PackB, class Store>
void multiply_block(const PackA& pack_a, const PackB& pack_b, const Store& store, const Block& block, bool add) {
  float* const packed_a = panels();
  float* const packed_b = packed_a + kBlockRows * kDepth;
  for (int64_t jc = block.column; jc < block.column_end; jc += kBlockColumns) {
    const int64_t j_end = std::min(jc + kBlockColumns, block.column_end);
    for (int64_t kc = block.k; kc < block.k_end; kc += kDepth) {
      const int64_t depth = std::min(kDepth, block.k_end - kc);
      const bool fresh = !add && kc == block.k;
      for (int64_t j = jc; j < j_end; j += kColumns)
        pack_b(packed_b + (j - jc) * depth, j, std::min<int64_t>(kColumns, j_end - j), kc, depth);
      for (int64_t ic = block.row; ic < block.row_end; ic += kBlockRows) {
        const int64_t i_end = std::min(ic + kBlockRows, block.row_end);
        for (int64_t i = ic; i < i_end; i += kRows)
          pack_a(packed_a + (i - ic) * depth, i, std::min<int64_t>(kRows, i_end - i), kc, depth);
        for (int64_t j = jc; j < j_end; j += kColumns)
          for (int64_t i = ic; i < i_end; i += kRows) {
            const float* a = packed_a + (i - ic) * depth;
            const float* b = packed_b + (j - jc) * depth;
            const int64_t rows = std::min<int64_t>(kRows, i_end - i);
            const int64_t columns = std::min<int64_t>(kColumns, j_end - j);
            float* tile = rows == kRows && columns == kColumns ? store.run(i, j, columns) : nullptr;
            if (tile != nullptr)
              add_tile(depth, a, b, tile, store.stride(), fresh);
            else
              add_edge(depth, a, b, store, i, rows, j, columns, fresh);
          }
      }
    }
  }
}

inline int64_t pieces_of(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

inline int64_t rounded_up(int64_t size, int64_t unit) { return pieces_of(size, unit) * unit; }

// Computes a whole product in parallel. The cut depends on sizes alone, so that results do not
// depend on the number of threads.
template <class PackA, class PackB, class Store>
void multiply(const PackA& pack_a, const PackB& pack_b, const Store& store, int64_t rows, int64_t columns,
              int64_t depth, bool add, const Parallel& parallel) {
  if (rows == 0 || columns == 0) return;
  constexpr int64_t kTasks = 32, kLeastWork = int64_t{1} << 21;
  const double work = double(rows) * double(columns) * double(std::max<int64_t>(depth, 1));
  const int64_t tasks = std::max<int64_t>(1, std::min<int64_t>(kTasks, int64_t(work / kLeastWork)));
  // Cut the side that is longer, so that as little as possible is packed twice.
  const int64_t column_cuts = std::min(pieces_of(columns, kColumns), rows > 4 * columns ? int64_t{1} : tasks);
  const int64_t row_cuts = std::min(pieces_of(rows, kRows), pieces_of(tasks, column_cuts));
  const int64_t wide = rounded_up(pieces_of(columns, column_cuts), kColumns);
  const int64_t high = rounded_up(pieces_of(rows, row_cuts), kRows);
  const int64_t across = pieces_of(columns, wide), down = pieces_of(rows, high);
  parallel(across * down, [&](int64_t task) {
    const int64_t row = task % down * high, column = task / down * wide;
    multiply_block(pack_a, pack_b, store,
                   {row, std::min(row + high, rows), column, std::min(column + wide, columns), 0, depth}, add);
  });
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
