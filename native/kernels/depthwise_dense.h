// Square kernels without stride or dilation. A block of rows is computed at once, so that each row
// of the source is read once for each column of taps and used for every row of taps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "depthwise_rows.h"
#include "depthwise_tiles.h"
#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Where rows of a pitch begin, three from each pointer: as many as an address can reach without a
// register of its own for every row.
template <int kRows, class Float>
struct RowPointers {
  Float* third[(kRows + 2) / 3];
  int64_t pitch;

  [[gnu::always_inline]] RowPointers(Float* first, int64_t step) : pitch(step) {
#pragma GCC unroll 8
    for (int i = 0; i < (kRows + 2) / 3; ++i) {
      third[i] = first + 3 * i * step;
      __asm__("" : "+r"(third[i]));  // or the compiler takes the pointers apart again
    }
  }
  [[gnu::always_inline]] Float* operator[](int row) const { return third[row / 3] + row % 3 * pitch; }
};

// Writes a vector of kHigh rows of the sum over taps of weight · source.
template <int kSize, int kWidth, int kHigh>
[[gnu::always_inline]] inline void dense_block(const float* source, int64_t pitch, const float* weights,
                                               typename Narrow<kWidth>::Type bias, float* to, int64_t to_pitch) {
  using Own = Narrow<kWidth>;
  const RowPointers<kHigh + kSize - 1, const float> from(source, pitch);
  // More taps than registers are read for each block; the compiler would keep vectors of them in memory.
  if (kSize > 3) __asm__("" : "+r"(weights));
  typename Own::Type sum[kHigh];
#pragma GCC unroll 8
  for (int i = 0; i < kHigh; ++i) sum[i] = bias;
#pragma GCC unroll 8
  for (int x = 0; x < kSize; ++x) {
    typename Own::Type line[kHigh + kSize - 1];
#pragma GCC unroll 16
    for (int i = 0; i < kHigh + kSize - 1; ++i) line[i] = Own::read(from[i] + x);
#pragma GCC unroll 8
    for (int y = 0; y < kSize; ++y) {
      const typename Own::Type weight = weights[y * kSize + x] - typename Own::Type{};
#pragma GCC unroll 8
      for (int i = 0; i < kHigh; ++i) sum[i] += weight * line[i + y];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kHigh; ++i) Own::write(to + i * to_pitch, sum[i]);
}

// Writes kHigh rows. The last vector of a row may overlap the one before; a row shorter than a
// vector takes one.
template <int kSize, int kWidth, int kHigh>
[[gnu::always_inline]] inline void dense_rows(const float* source, int64_t pitch, const float* weights,
                                              typename Narrow<kWidth>::Type bias, float* to, int64_t to_pitch,
                                              int64_t columns) {
  int64_t at = 0;
  for (; at + kWidth < columns; at += kWidth)
    dense_block<kSize, kWidth, kHigh>(source + at, pitch, weights, bias, to + at, to_pitch);
  at = std::max<int64_t>(0, columns - kWidth);
  dense_block<kSize, kWidth, kHigh>(source + at, pitch, weights, bias, to + at, to_pitch);
}

template <int kSize, int kWidth>
inline void dense(const float* source, int64_t pitch, const float* taps, float bias, float* to, int64_t to_pitch,
                  int64_t rows, int64_t columns) {
  constexpr int kBlock = 4;  // rows at once
  using Row = typename Narrow<kWidth>::Type;
  float weights[kSize * kSize];  // a copy, which what is written cannot change
#pragma GCC unroll 32
  for (int tap = 0; tap < kSize * kSize; ++tap) weights[tap] = taps[tap];
  const Row start = bias - Row{};
  for (; rows >= kBlock; rows -= kBlock, source += kBlock * pitch, to += kBlock * to_pitch)
    dense_rows<kSize, kWidth, kBlock>(source, pitch, weights, start, to, to_pitch, columns);
  for (; rows > 0; --rows, source += pitch, to += to_pitch)
    dense_rows<kSize, kWidth, 1>(source, pitch, weights, start, to, to_pitch, columns);
}

// Adds a vector of kHigh rows to the sums of the products of `other` and what taps read.
template <int kSize, int kAcross, int kWidth, int kHigh>
[[gnu::always_inline]] inline void dense_products(const float* source, int64_t pitch, const float* other,
                                                  int64_t other_pitch, typename Narrow<kWidth>::Mask mask,
                                                  typename Narrow<kWidth>::Type* sum) {
  using Own = Narrow<kWidth>;
  using Row = typename Own::Type;
  const RowPointers<kHigh + kSize - 1, const float> from(source, pitch);
  Row factor[kHigh];
#pragma GCC unroll 8
  for (int i = 0; i < kHigh; ++i)
    factor[i] = reinterpret_cast<Row>(reinterpret_cast<typename Own::Mask>(Own::read(other + i * other_pitch)) & mask);
#pragma GCC unroll 8
  for (int x = 0; x < kAcross; ++x) {
    Row line[kHigh + kSize - 1];
#pragma GCC unroll 16
    for (int i = 0; i < kHigh + kSize - 1; ++i) line[i] = Own::read(from[i] + x);
#pragma GCC unroll 8
    for (int i = 0; i < kHigh; ++i)
#pragma GCC unroll 8
      for (int y = 0; y < kSize; ++y) sum[y * kAcross + x] += factor[i] * line[i + y];
  }
}

// The same for kHigh whole rows. The last vector of a row begins before the end of the one before:
// `mask` leaves out what both hold, and what lies behind a row that is shorter than a vector.
template <int kSize, int kAcross, int kWidth, int kHigh>
[[gnu::always_inline]] inline void dense_product_rows(const float* source, int64_t pitch, const float* other,
                                                      int64_t other_pitch, int64_t columns,
                                                      typename Narrow<kWidth>::Mask mask,
                                                      typename Narrow<kWidth>::Type* sum) {
  int64_t at = 0;
  for (; at + kWidth < columns; at += kWidth)
    dense_products<kSize, kAcross, kWidth, kHigh>(source + at, pitch, other + at, other_pitch,
                                                  ~typename Narrow<kWidth>::Mask{}, sum);
  at = std::max<int64_t>(0, columns - kWidth);
  dense_products<kSize, kAcross, kWidth, kHigh>(source + at, pitch, other + at, other_pitch, mask, sum);
}

// Adds to the sums of the columns of taps [kAt, kAt + kAcross).
template <int kSize, int kAt, int kAcross, int kWidth>
inline void dense_tap_columns(const float* source, int64_t pitch, const float* other, int64_t other_pitch, int64_t rows,
                              int64_t columns, typename Narrow<kWidth>::Type* sums) {
  constexpr int kHigh = kLanes == 16 ? 4 : 2;  // as many rows as registers allow beside the sums
  const int again = columns < kWidth ? 0 : static_cast<int>((kWidth - columns % kWidth) % kWidth);
  const auto lanes = Narrow<kWidth>::lanes();
  const auto mask = (lanes >= again) & (lanes < static_cast<int>(again + std::min<int64_t>(columns, kWidth)));
  typename Narrow<kWidth>::Type sum[kSize * kAcross];
#pragma GCC unroll 32
  for (int i = 0; i < kSize * kAcross; ++i) sum[i] = sums[i / kAcross * kSize + kAt + i % kAcross];
  source += kAt;
  for (; rows >= kHigh; rows -= kHigh, source += kHigh * pitch, other += kHigh * other_pitch)
    dense_product_rows<kSize, kAcross, kWidth, kHigh>(source, pitch, other, other_pitch, columns, mask, sum);
  for (; rows > 0; --rows, source += pitch, other += other_pitch)
    dense_product_rows<kSize, kAcross, kWidth, 1>(source, pitch, other, other_pitch, columns, mask, sum);
#pragma GCC unroll 32
  for (int i = 0; i < kSize * kAcross; ++i) sums[i / kAcross * kSize + kAt + i % kAcross] = sum[i];
}

// The same for all taps; `sums` has kSize · kSize vectors.
template <int kSize, int kWidth>
inline void dense_weights(const float* source, int64_t pitch, const float* other, int64_t other_pitch, int64_t rows,
                          int64_t columns, typename Narrow<kWidth>::Type* sums) {
  if constexpr (kSize == 3) {
    dense_tap_columns<3, 0, 3, kWidth>(source, pitch, other, other_pitch, rows, columns, sums);
  } else {
    static_assert(kSize == 5);
    dense_tap_columns<5, 0, 2, kWidth>(source, pitch, other, other_pitch, rows, columns, sums);
    dense_tap_columns<5, 2, 2, kWidth>(source, pitch, other, other_pitch, rows, columns, sums);
    dense_tap_columns<5, 4, 1, kWidth>(source, pitch, other, other_pitch, rows, columns, sums);
  }
}

// Calls work(Narrow) with the narrowest vector that holds a row, or the widest there is.
template <class Work>
inline void by_columns([[maybe_unused]] int64_t columns, const Work& work) {
#if defined(__AVX512F__)
  if (columns > 8) return work(Narrow<16>());
#endif
#if defined(__AVX2__)
  if (columns > 4) return work(Narrow<8>());
#endif
  work(Narrow<4>());
}

// Planes of a source and of a grid, whose positions read the source from (position - pad) on.
struct DensePlanes {
  int64_t taps;  // along each axis: 3 or 5
  int64_t source_rows, source_columns, rows, columns, pad_rows, pad_columns;

  Cut cut() const { return Cut(rows, columns, 1, taps - 1, taps - 1); }
  Tile tile(const Cut& cut, int64_t index) const {
    return Tile(TileAxis(cut.rows_of(index), 1, cut.first_row(index) - pad_rows, source_rows, taps - 1),
                TileAxis(cut.columns_of(index), 1, cut.first_column(index) - pad_columns, source_columns, taps - 1));
  }
};

// One tile of planes.
struct DenseTile {
  Tile tile;
  int64_t first, columns;  // where it begins in a plane of the grid, and how wide that is
  Memory copy_memory, row_memory;
  float *copy, *short_rows;  // rows of the grid that are shorter than a vector, with zeros behind them

  DenseTile(const DensePlanes& planes, const Cut& cut, int64_t index)
      : tile(planes.tile(cut, index)),
        first(cut.first_row(index) * planes.columns + cut.first_column(index)),
        columns(planes.columns),
        copy(copy_memory.zeroed(tile.floats())),
        short_rows(row_memory.zeroed(tile.columns.grid < kLanes ? tile.rows.grid * kLanes : 0)) {}

  // Writes the tile of one plane.
  template <int kSize, int kWidth>
  void convolve(const float* source, const float* weights, float bias, float* to) {
    const int64_t rows = tile.rows.grid, across = tile.columns.grid;
    tile.fill(copy, source);
    to += first;
    if (across >= kWidth) return dense<kSize, kWidth>(copy, tile.pitch, weights, bias, to, columns, rows, across);
    // What a vector writes behind a short row the next row overwrites; the last row has none.
    const int64_t direct = 2 * across >= kWidth && across == columns ? rows - 1 : 0;
    dense<kSize, kWidth>(copy, tile.pitch, weights, bias, to, columns, direct, across);
    dense<kSize, kWidth>(copy + direct * tile.pitch, tile.pitch, weights, bias, short_rows, kWidth, rows - direct,
                         across);
    copy_rows(to + direct * columns, columns, short_rows, kWidth, rows - direct, across);
  }

  // Adds to the sums of all taps what the tile of one plane gives. Memory behind `other` may be read
  // up to its end.
  template <int kSize, int kWidth>
  void multiply(const float* source, const float* other, const float* end, typename Narrow<kWidth>::Type* sums) {
    const int64_t rows = tile.rows.grid, across = tile.columns.grid;
    tile.fill(copy, source);
    other += first;
    if (other + (rows - 1) * columns + std::max<int64_t>(across, kWidth) <= end)
      return dense_weights<kSize, kWidth>(copy, tile.pitch, other, columns, rows, across, sums);
    copy_rows(short_rows, kWidth, other, columns, rows, across);
    dense_weights<kSize, kWidth>(copy, tile.pitch, short_rows, kWidth, rows, across, sums);
  }
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
