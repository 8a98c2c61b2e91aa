// Square kernels without dilation, with stride 1 or 2. A block of rows is computed at once, so that each row
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
template <int kRows>
struct RowPointers {
  const float* third[(kRows + 2) / 3];
  int64_t pitch;

  [[gnu::always_inline]] void set(const float* first, int64_t step) {
    pitch = step;
#pragma GCC unroll 8
    for (int i = 0; i < (kRows + 2) / 3; ++i) {
      third[i] = first + 3 * i * step;
      __asm__("" : "+r"(third[i]));  // or the compiler takes the pointers apart again
    }
  }
  [[gnu::always_inline]] const float* operator[](int row) const { return third[row / 3] + row % 3 * pitch; }
};

// A copy of the source: planes of rows, one for each phase.
struct DenseSource {
  const float* data;
  int64_t pitch, plane;

  DenseSource from(int64_t offset) const { return {data + offset, pitch, plane}; }
};

// Calls use(tap row, tap column, lines) for all taps of kAcross columns: lines[i] is what row i of
// kHigh reads there.
template <int kSize, int kAcross, int kStep, int kWidth, int kHigh, class Use>
[[gnu::always_inline]] inline void over_taps(const DenseSource& source, const Use& use) {
  using Own = Narrow<kWidth>;
  constexpr int kLines = kHigh + (kSize - 1) / kStep;
  RowPointers<kLines> from[kStep * kStep];
#pragma GCC unroll 4
  for (int phase = 0; phase < kStep * kStep; ++phase) from[phase].set(source.data + phase * source.plane, source.pitch);
#pragma GCC unroll 8
  for (int x = 0; x < kAcross; ++x)
#pragma GCC unroll 2
    for (int row_phase = 0; row_phase < kStep; ++row_phase) {
      typename Own::Type line[kLines];
#pragma GCC unroll 16
      for (int i = 0; i < kHigh + (kSize - 1 - row_phase) / kStep; ++i)
        line[i] = Own::read(from[row_phase * kStep + x % kStep][i] + x / kStep);
#pragma GCC unroll 8
      for (int y = row_phase; y < kSize; y += kStep) use(y, x, line + y / kStep);
    }
}

// Writes a vector of kHigh rows of the sum over taps of weight · source.
template <int kSize, int kStep, int kWidth, int kHigh>
[[gnu::always_inline]] inline void dense_block(const DenseSource& source, const float* weights,
                                               typename Narrow<kWidth>::Type bias, float* to, int64_t to_pitch) {
  using Row = typename Narrow<kWidth>::Type;
  // More taps than registers are read for each block; the compiler would keep vectors of them in memory.
  if (kSize > 3) __asm__("" : "+r"(weights));
  Row sum[kHigh];
#pragma GCC unroll 8
  for (int i = 0; i < kHigh; ++i) sum[i] = bias;
  over_taps<kSize, kSize, kStep, kWidth, kHigh>(source, [&](int y, int x, const Row* line) __attribute__((always_inline)) {
    const Row weight = weights[y * kSize + x] - Row{};
#pragma GCC unroll 8
    for (int i = 0; i < kHigh; ++i) sum[i] += weight * line[i];
  });
#pragma GCC unroll 8
  for (int i = 0; i < kHigh; ++i) Narrow<kWidth>::write(to + i * to_pitch, sum[i]);
}

// Writes kHigh rows. The last vector of a row may overlap the one before; a row shorter than a
// vector takes one.
template <int kSize, int kStep, int kWidth, int kHigh>
[[gnu::always_inline]] inline void dense_rows(const DenseSource& source, const float* weights,
                                              typename Narrow<kWidth>::Type bias, float* to, int64_t to_pitch, int64_t columns) {
  int64_t at = 0;
  for (; at + kWidth < columns; at += kWidth)
    dense_block<kSize, kStep, kWidth, kHigh>(source.from(at), weights, bias, to + at, to_pitch);
  at = std::max<int64_t>(0, columns - kWidth);
  dense_block<kSize, kStep, kWidth, kHigh>(source.from(at), weights, bias, to + at, to_pitch);
}

template <int kSize, int kStep, int kWidth>
inline void dense(DenseSource source, const float* taps, float bias, float* to, int64_t to_pitch, int64_t rows, int64_t columns) {
  constexpr int kBlock = 4;  // rows at once
  using Row = typename Narrow<kWidth>::Type;
  float weights[kSize * kSize];  // a copy, which what is written cannot change
#pragma GCC unroll 32
  for (int tap = 0; tap < kSize * kSize; ++tap) weights[tap] = taps[tap];
  const Row start = bias - Row{};
  for (; rows >= kBlock; rows -= kBlock, source.data += kBlock * source.pitch, to += kBlock * to_pitch)
    dense_rows<kSize, kStep, kWidth, kBlock>(source, weights, start, to, to_pitch, columns);
  for (; rows > 0; --rows, source.data += source.pitch, to += to_pitch)
    dense_rows<kSize, kStep, kWidth, 1>(source, weights, start, to, to_pitch, columns);
}

// Adds a vector of kHigh rows to the sums of the products of `other` and what taps read.
template <int kSize, int kAcross, int kStep, int kWidth, int kHigh>
[[gnu::always_inline]] inline void dense_products(const DenseSource& source, const float* other, int64_t other_pitch,
                                                  typename Narrow<kWidth>::Mask mask, typename Narrow<kWidth>::Type* sum) {
  using Own = Narrow<kWidth>;
  using Row = typename Own::Type;
  Row factor[kHigh];
#pragma GCC unroll 8
  for (int i = 0; i < kHigh; ++i)
    factor[i] = reinterpret_cast<Row>(reinterpret_cast<typename Own::Mask>(Own::read(other + i * other_pitch)) & mask);
  over_taps<kSize, kAcross, kStep, kWidth, kHigh>(source, [&](int y, int x, const Row* line) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < kHigh; ++i) sum[y * kAcross + x] += factor[i] * line[i];
  });
}

// The same for kHigh whole rows. The last vector of a row begins before the end of the one before:
// `mask` leaves out what both hold, and what lies behind a row that is shorter than a vector.
template <int kSize, int kAcross, int kStep, int kWidth, int kHigh>
[[gnu::always_inline]] inline void dense_product_rows(const DenseSource& source, const float* other, int64_t other_pitch,
                                                      int64_t columns, typename Narrow<kWidth>::Mask mask,
                                                      typename Narrow<kWidth>::Type* sum) {
  int64_t at = 0;
  for (; at + kWidth < columns; at += kWidth)
    dense_products<kSize, kAcross, kStep, kWidth, kHigh>(source.from(at), other + at, other_pitch,
                                                         ~typename Narrow<kWidth>::Mask{}, sum);
  at = std::max<int64_t>(0, columns - kWidth);
  dense_products<kSize, kAcross, kStep, kWidth, kHigh>(source.from(at), other + at, other_pitch, mask, sum);
}

// Adds to the sums of the columns of taps [kAt, kAt + kAcross), of which kAt is a whole number of steps.
template <int kSize, int kStep, int kAt, int kAcross, int kWidth>
inline void dense_tap_columns(DenseSource source, const float* other, int64_t other_pitch, int64_t rows, int64_t columns,
                              typename Narrow<kWidth>::Type* sums) {
  constexpr int kHigh = kLanes == 16 ? 4 : 2;  // as many rows as registers allow beside the sums
  const int again = columns < kWidth ? 0 : static_cast<int>((kWidth - columns % kWidth) % kWidth);
  const auto lanes = Narrow<kWidth>::lanes();
  const auto mask = (lanes >= again) & (lanes < static_cast<int>(again + std::min<int64_t>(columns, kWidth)));
  typename Narrow<kWidth>::Type sum[kSize * kAcross];
#pragma GCC unroll 32
  for (int i = 0; i < kSize * kAcross; ++i) sum[i] = sums[i / kAcross * kSize + kAt + i % kAcross];
  static_assert(kAt % kStep == 0);
  source = source.from(kAt / kStep);
  for (; rows >= kHigh; rows -= kHigh, source.data += kHigh * source.pitch, other += kHigh * other_pitch)
    dense_product_rows<kSize, kAcross, kStep, kWidth, kHigh>(source, other, other_pitch, columns, mask, sum);
  for (; rows > 0; --rows, source.data += source.pitch, other += other_pitch)
    dense_product_rows<kSize, kAcross, kStep, kWidth, 1>(source, other, other_pitch, columns, mask, sum);
#pragma GCC unroll 32
  for (int i = 0; i < kSize * kAcross; ++i) sums[i / kAcross * kSize + kAt + i % kAcross] = sum[i];
}

// The same for all taps; `sums` has kSize · kSize vectors.
template <int kSize, int kStep, int kWidth>
inline void dense_weights(const DenseSource& source, const float* other, int64_t other_pitch, int64_t rows, int64_t columns,
                          typename Narrow<kWidth>::Type* sums) {
  if constexpr (kSize == 3) {
    dense_tap_columns<3, kStep, 0, 3, kWidth>(source, other, other_pitch, rows, columns, sums);
  } else {
    static_assert(kSize == 5);
    dense_tap_columns<5, kStep, 0, 2, kWidth>(source, other, other_pitch, rows, columns, sums);
    dense_tap_columns<5, kStep, 2, 2, kWidth>(source, other, other_pitch, rows, columns, sums);
    dense_tap_columns<5, kStep, 4, 1, kWidth>(source, other, other_pitch, rows, columns, sums);
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

// Planes of a source and of a grid, whose positions read the source from (position · step - pad) on.
struct DensePlanes {
  int64_t taps, step;  // along each axis: 3 or 5, and 1 or 2
  int64_t source_rows, source_columns, rows, columns, pad_rows, pad_columns;

  Cut cut() const { return Cut(rows, columns, step * step, (taps - 1) / step, (taps - 1) / step); }
  Tile tile(const Cut& cut, int64_t index) const {
    return Tile(TileAxis(cut.rows_of(index), step, cut.first_row(index) * step - pad_rows, source_rows, taps - 1),
                TileAxis(cut.columns_of(index), step, cut.first_column(index) * step - pad_columns, source_columns, taps - 1));
  }
};

// One tile of planes.
struct DenseTile {
  Tile tile;
  int64_t first, columns;  // where it begins in a plane of the grid, and how wide that is
  Memory copy_memory, row_memory;
  float *copy, *short_rows;  // rows of the grid that are shorter than a vector, with zeros behind them

  DenseTile(const DensePlanes& planes, const Cut& cut, int64_t index)
      : tile(planes.tile(cut, index)), first(cut.first_row(index) * planes.columns + cut.first_column(index)),
        columns(planes.columns), copy(copy_memory.zeroed(tile.floats())),
        short_rows(row_memory.zeroed(tile.columns.grid < kLanes ? tile.rows.grid * kLanes : 0)) {}

  // Writes the tile of one plane.
  template <int kSize, int kStep, int kWidth>
  void convolve(const float* source, const float* weights, float bias, float* to) {
    const int64_t rows = tile.rows.grid, across = tile.columns.grid;
    const DenseSource copied{copy, tile.pitch, tile.plane};
    tile.fill(copy, source);
    to += first;
    if (across >= kWidth) return dense<kSize, kStep, kWidth>(copied, weights, bias, to, columns, rows, across);
    // What a vector writes behind a short row the next row overwrites; the last row has none.
    const int64_t direct = 2 * across >= kWidth && across == columns ? rows - 1 : 0;
    dense<kSize, kStep, kWidth>(copied, weights, bias, to, columns, direct, across);
    dense<kSize, kStep, kWidth>(copied.from(direct * tile.pitch), weights, bias, short_rows, kWidth, rows - direct, across);
    copy_rows(to + direct * columns, columns, short_rows, kWidth, rows - direct, across);
  }

  // Adds to the sums of all taps what the tile of one plane gives. Memory behind `other` may be read
  // up to its end.
  template <int kSize, int kStep, int kWidth>
  void multiply(const float* source, const float* other, const float* end, typename Narrow<kWidth>::Type* sums) {
    const int64_t rows = tile.rows.grid, across = tile.columns.grid;
    const DenseSource copied{copy, tile.pitch, tile.plane};
    tile.fill(copy, source);
    other += first;
    if (end - other >= (rows - 1) * columns + std::max<int64_t>(across, kWidth))
      return dense_weights<kSize, kStep, kWidth>(copied, other, columns, rows, across, sums);
    copy_rows(short_rows, kWidth, other, columns, rows, across);
    dense_weights<kSize, kStep, kWidth>(copied, short_rows, kWidth, rows, across, sums);
  }
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
