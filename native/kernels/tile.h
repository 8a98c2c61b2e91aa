// The innermost loop of every product: a tile of C that lives in registers.
#pragma once

#include <array>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Rows of B that follow each other: a panel [depth][kWidth · kLanes].
template <int kWidth>
struct PanelRows {
  const float* at;

  const float* next() {
    const float* row = at;
    at += kWidth * kLanes;
    return row;
  }
};

// Rows of B that lie at offsets.
struct ScatteredRows {
  const float* data;
  const int64_t* offset;

  const float* next() { return data + *offset++; }
};

// C += A · B for a tile of kHeight rows and kWidth vectors, `depth` long; `fresh` sets C instead.
//
// A comes in blocks of kLanes along the depth, a_block apart: its element at row i and depth k of a block
// is a[i · kRowStep + k · kDepthStep].
template <int kHeight, int kWidth, int kRowStep, int kDepthStep, class RowsOfB>
inline void add_product(int64_t depth, const float* a, int64_t a_block, RowsOfB b, float* c, int64_t stride,
                        bool fresh) {
  Vector sum[kHeight][kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; ++j) sum[i][j] = Vector{};
  for (; depth > 0; depth -= kLanes, a += a_block) {
    const float* at = a;
    const float* const end = a + std::min<int64_t>(depth, kLanes) * kDepthStep;
    for (; at != end; at += kDepthStep) {
      const float* const row = b.next();
      Vector right[kWidth];
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; ++j) right[j] = load(row + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kHeight; ++i) {
        const Vector left = broadcast(at[i * kRowStep]);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) sum[i][j] += left * right[j];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; ++j) {
      float* place = c + i * stride + j * kLanes;
      store(place, fresh ? sum[i][j] : load(place) + sum[i][j]);
    }
}

template <int kHeight, int kWidth, int kRowStep, int kDepthStep>
inline void add_tile(int64_t depth, const float* a, int64_t a_block, const float* b, float* c, int64_t stride,
                     bool fresh) {
  add_product<kHeight, kWidth, kRowStep, kDepthStep>(depth, a, a_block, PanelRows<kWidth>{b}, c, stride, fresh);
}

// Rows of a panel whose rows lie side by side: whole vectors.
constexpr int kLinesOfPanel = (kRows + kLanes - 1) / kLanes * kLanes;

using TileFunction = void (*)(int64_t, const float*, int64_t, const float*, float*, int64_t, bool);

template <int kWidth, bool kLines, size_t... kHeight>
constexpr std::array<TileFunction, kRows> tiles_of(std::index_sequence<kHeight...>) {
  return {add_tile<int(kHeight) + 1, kWidth, kLines ? 1 : kLanes, kLines ? kLinesOfPanel : 1>...};
}

// The tile of a height and a width in vectors whose rows of A are blocks [height][kLanes], or, with kLines,
// lie side by side as [depth][kLinesOfPanel].
template <int kWidth, bool kLines = false>
inline TileFunction tile_of(int64_t height) {
  static constexpr std::array<TileFunction, kRows> all = tiles_of<kWidth, kLines>(std::make_index_sequence<kRows>());
  return all[static_cast<size_t>(height - 1)];
}

// Low tiles of scattered rows are twice as wide, or their few sums would wait for each other.
constexpr int kLowRows = kRows * 3 / 7, kWideColumns = 2 * kColumns;
constexpr int64_t scattered_width(int64_t height) { return height <= kLowRows ? kWideColumns : kColumns; }

// Adds to a tile whose rows are as wide as that.
using ScatteredTile = void (*)(int64_t depth, const float* a, const float* b, const int64_t* offsets, float* c);

template <int kHeight>
void add_scattered(int64_t depth, const float* a, const float* b, const int64_t* offsets, float* c) {
  constexpr int kWidth = static_cast<int>(scattered_width(kHeight)) / kLanes;
  add_product<kHeight, kWidth, kLanes, 1>(depth, a, kHeight * kLanes, ScatteredRows{b, offsets}, c, kWidth * kLanes,
                                          false);
}

template <size_t... kHeight>
constexpr std::array<ScatteredTile, kRows> scattered_tiles(std::index_sequence<kHeight...>) {
  return {add_scattered<int(kHeight) + 1>...};
}

inline ScatteredTile scattered_tile_of(int64_t height) {
  static constexpr std::array<ScatteredTile, kRows> all = scattered_tiles(std::make_index_sequence<kRows>());
  return all[static_cast<size_t>(height - 1)];
}

// A length cut into pieces of at most `most`, as even as they can be.
struct EvenCut {
  int64_t size, pieces;

  EvenCut(int64_t length, int64_t most) : size(length), pieces(std::max<int64_t>(1, (length + most - 1) / most)) {}
  int64_t begin(int64_t piece) const { return size / pieces * piece + std::min(piece, size % pieces); }
  int64_t length(int64_t piece) const { return size / pieces + (piece < size % pieces); }
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
