// Products of numbers that are rounded to bfloat16 on the way, by the instructions that AVX-512 has for
// it. Compiled once for each instruction set; others have none.
//
// The instruction multiplies pairs along the depth and adds both products. So panels hold pairs: of
// the left side [row][pair], of the right side [pair][column].
//
// The product of product.h multiplies bfloat16 too, but packs floats and rounds them in place, and cuts the work into
// more pieces, each of which packs again. On two threads it took 1.8 and 1.9 times as long for the two smallest of
// eleven products of linear layers, 1.06 times for their sum; on one, with long depths cut into parts, as long (1.01),
// and without that 1.2 times. So linear layers have this one.
#include "matmul.h"

#include <algorithm>
#include <new>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>

#include "transpose.h"
#include "vector.h"
#endif

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

#if defined(__AVX512F__)

constexpr int kTall = 14, kWide = 32;  // 28 sums, 2 columns, 1 row of 32 registers
constexpr int64_t kDeep = 256, kPairs = kDeep / 2;
constexpr int64_t kTaskRows = 32 * kTall, kTaskColumns = 8 * kWide;

// Functions that use the instructions; the rest of the library runs on processors without them.
#define ONNXTRAIN_BFLOAT16 __attribute__((target("avx512bf16")))

// Numbers of one line, 2 · kLanes of them, as pairs.
ONNXTRAIN_BFLOAT16 inline Vector pairs_along(const float* from, int64_t count) {
  const Vector first = load_first(from, count), second = load_first(from + kLanes, count - kLanes);
  return (Vector)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Pairs of two lines.
ONNXTRAIN_BFLOAT16 inline Vector pairs_across(Vector first, Vector second) {
  typedef int16_t Halves __attribute__((vector_size(64)));
  constexpr auto n = kLanes;
  const Halves both = (Halves)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (Vector)__builtin_shufflevector(both, both, 0, n, 1, n + 1, 2, n + 2, 3, n + 3, 4, n + 4, 5, n + 5, 6, n + 6,
                                         7, n + 7, 8, n + 8, 9, n + 9, 10, n + 10, 11, n + 11, 12, n + 12, 13, n + 13,
                                         14, n + 14, 15, n + 15);
}

// One side of a product: lines (rows of A, columns of B), and the depth.
struct Side {
  const float* data;
  int64_t line, step;

  const float* at(int64_t index, int64_t k) const { return data + index * line + k * step; }
};

// A square of kLanes lines × kLanes pairs: `by_line` as [line][pair], else as [pair][line].
ONNXTRAIN_BFLOAT16 void square_of(const Side& side, int64_t first, int64_t lines, int64_t k, int64_t depth,
                                  bool by_line, Vector (&square)[kLanes]) {
  if (side.step == 1) {
    for (int i = 0; i < kLanes; ++i) square[i] = i < lines ? pairs_along(side.at(first + i, k), depth) : Vector{};
    if (!by_line) transpose(square);
    return;
  }
  for (int p = 0; p < kLanes; ++p) {
    Vector pair[2] = {};
    for (int half = 0; half < 2; ++half)
      if (2 * p + half < depth) {
        const float* from = side.at(first, k + 2 * p + half);
        if (side.line == 1)
          pair[half] = load_first(from, lines);
        else
          for (int i = 0; i < kLanes; ++i)
            if (i < lines) pair[half][i] = from[i * side.line];
      }
    square[p] = pairs_across(pair[0], pair[1]);
  }
  if (by_line) transpose(square);
}

// Rows as [row][kPairs], from one pair on.
void pack_rows(const Side& side, int64_t first, int64_t rows, int64_t k, int64_t depth, int64_t pair, float* panel) {
  Vector square[kLanes];
  square_of(side, first, rows, k + 2 * pair, depth - 2 * pair, true, square);
  for (int64_t i = 0; i < rows; ++i) store(panel + i * kPairs + pair, square[i]);
}

// Columns as [pair][kWide], with zeros behind the last.
void pack_columns(const Side& side, int64_t first, int64_t columns, int64_t k, int64_t depth, int64_t pair,
                  float* panel) {
  Vector square[kLanes];
  const int64_t count = std::min<int64_t>(kLanes, (depth + 1) / 2 - pair);
  for (int64_t j = 0; j < kWide; j += kLanes) {
    square_of(side, first + j, std::max<int64_t>(0, std::min<int64_t>(columns - j, kLanes)), k + 2 * pair,
              depth - 2 * pair, false, square);
    for (int64_t p = 0; p < count; ++p) store(panel + (pair + p) * kWide + j, square[p]);
  }
}

// Calls pack(panel, pair) for all of them, in the order of the memory that a side is read from.
template <class Pack>
void for_panels(const Side& side, int64_t panels, int64_t pairs, const Pack& pack) {
  if (side.step == 1)
    for (int64_t panel = 0; panel < panels; ++panel)
      for (int64_t pair = 0; pair < pairs; pair += kLanes) pack(panel, pair);
  else
    for (int64_t pair = 0; pair < pairs; pair += kLanes)
      for (int64_t panel = 0; panel < panels; ++panel) pack(panel, pair);
}

// A tile of kRows × kWide, whose rows of A are kPairs apart.
template <int kRows>
ONNXTRAIN_BFLOAT16 void add_tile(int64_t pairs, const float* a, const float* b, float* c, int64_t stride, bool fresh) {
  __m512 sum[kRows][2];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) sum[i][j] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + i * stride + j * 16);
  for (int64_t p = 0; p < pairs; ++p) {
    const __m512bh right[2] = {(__m512bh)_mm512_loadu_ps(b + p * kWide), (__m512bh)_mm512_loadu_ps(b + p * kWide + 16)};
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const __m512bh left = (__m512bh)_mm512_set1_ps(a[i * kPairs + p]);
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) _mm512_storeu_ps(c + i * stride + j * 16, sum[i][j]);
}

using Tile = void (*)(int64_t, const float*, const float*, float*, int64_t, bool);

template <int... kRows>
Tile tile_of(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr Tile all[] = {add_tile<kRows + 1>...};
  return all[rows - 1];
}

// The tile of a result that may be narrower than a tile.
void add_panels(int64_t pairs, const float* a, int64_t rows, const float* b, int64_t columns, float* c, int64_t stride,
                bool fresh) {
  const Tile tile = tile_of(rows, std::make_integer_sequence<int, kTall>{});
  if (columns == kWide) return tile(pairs, a, b, c, stride, fresh);
  alignas(64) float whole[kTall * kWide];
  tile(pairs, a, b, whole, kWide, true);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) c[i * stride + j] = (fresh ? 0 : c[i * stride + j]) + whole[i * kWide + j];
}

// The memory of packed panels, which a thread keeps.
float* panels_of_thread() {
  constexpr size_t kBytes = sizeof(float) * (kTaskRows + kTaskColumns) * kPairs;
  struct Own {
    float* data = static_cast<float*>(::operator new(kBytes, std::align_val_t(64)));
    ~Own() { ::operator delete(data, std::align_val_t(64)); }
  };
  thread_local const Own own;
  return own.data;
}

struct Part {
  int64_t row, rows, column, columns;
};

void multiply_part(const Product& of, const Part& part) {
  float* const packed_a = panels_of_thread();
  float* const packed_b = packed_a + kTaskRows * kPairs;
  const Side a{of.a, of.a_row, of.a_depth}, b{of.b, of.b_column, of.b_depth};
  // Rows are shared out evenly, so that no panel is much lower than the others.
  const int64_t panels = (part.rows + kTall - 1) / kTall;
  const auto begin = [&](int64_t panel) { return panel * part.rows / panels; };
  if (of.depth == 0 && !of.add)
    for (int64_t i = 0; i < part.rows; ++i)
      std::fill_n(of.c + (part.row + i) * of.c_row + part.column, part.columns, 0.0f);
  for (int64_t k = 0; k < of.depth; k += kDeep) {
    const int64_t depth = std::min(kDeep, of.depth - k), pairs = (depth + 1) / 2;
    for_panels(b, (part.columns + kWide - 1) / kWide, pairs, [&](int64_t panel, int64_t pair) {
      const int64_t j = panel * kWide;
      pack_columns(b, part.column + j, std::min<int64_t>(kWide, part.columns - j), k, depth, pair,
                   packed_b + j * kPairs);
    });
    for_panels(a, panels, pairs, [&](int64_t panel, int64_t pair) {
      pack_rows(a, part.row + begin(panel), begin(panel + 1) - begin(panel), k, depth, pair,
                packed_a + panel * kTall * kPairs);
    });
    for (int64_t j = 0; j < part.columns; j += kWide)
      for (int64_t panel = 0; panel < panels; ++panel)
        add_panels(pairs, packed_a + panel * kTall * kPairs, begin(panel + 1) - begin(panel), packed_b + j * kPairs,
                   std::min<int64_t>(kWide, part.columns - j),
                   of.c + (part.row + begin(panel)) * of.c_row + part.column + j, of.c_row, k == 0 && !of.add);
  }
}

// Cuts by sizes alone: results do not depend on the number of threads.
void multiply(const Product& of, const Parallel& parallel) {
  const int64_t across = (of.columns + kTaskColumns - 1) / kTaskColumns;
  const int64_t wanted = std::max<int64_t>(1, 16 / std::max<int64_t>(across, 1));
  const int64_t least = std::max<int64_t>(1, of.rows / (8 * kTall));  // pieces of some height
  const int64_t down = std::max((of.rows + kTaskRows - 1) / kTaskRows, std::min(wanted, least));
  parallel(across * down, [&](int64_t task) {
    const int64_t i = task % down, j = task / down;
    const int64_t row = i * of.rows / down, column = j * kTaskColumns;
    multiply_part(of, {row, (i + 1) * of.rows / down - row, column, std::min(kTaskColumns, of.columns - column)});
  });
}

#endif

}  // namespace

#if defined(__AVX512F__)
const RoundedProduct kRoundedProduct = {true, multiply};
#else
const RoundedProduct kRoundedProduct = {false, nullptr};
#endif

}  // namespace onnxtrain::ONNXTRAIN_ISA
