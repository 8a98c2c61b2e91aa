// Products of bfloat16 with sums of float32, where the processor has instructions for them: two along the
// depth are in the place of one. Panels are packed so, or as floats that are rounded in place.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "amx.h"
#include "tile.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// What instruction sets differ in; a vector of pairs is held as one of floats.
#if defined(__AVX512F__)
#define ONNXTRAIN_BF16 __attribute__((target("avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,fma")))

// Two vectors that follow each other in memory as pairs of neighbours.
ONNXTRAIN_BF16 inline Vector pairs_along(Vector first, Vector second) {
  return (Vector)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Rounds a vector: neighbours share a place.
ONNXTRAIN_BF16 inline void round_pairs_of(Vector given, float* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)given));
}

// Adds the product of both pairs of each lane.
ONNXTRAIN_BF16 inline Vector add_pairs(Vector sum, Vector left, Vector right) {
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}
#elif defined(__aarch64__) && defined(__linux__) && \
    ((defined(__clang__) && __clang_major__ >= 16) || (!defined(__clang__) && __GNUC__ >= 10))
#define ONNXTRAIN_BF16 __attribute__((target("arch=armv8.2-a+bf16")))

ONNXTRAIN_BF16 inline Vector pairs_along(Vector first, Vector second) {
  return (Vector)vreinterpretq_f32_bf16(
      vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)first), (float32x4_t)second));
}

ONNXTRAIN_BF16 inline void round_pairs_of(Vector given, float* to) {
  const bfloat16x4_t rounded = vcvt_bf16_f32((float32x4_t)given);
  std::memcpy(to, &rounded, sizeof rounded);
}

ONNXTRAIN_BF16 inline Vector add_pairs(Vector sum, Vector left, Vector right) {
  return (Vector)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_f32((float32x4_t)left),
                             vreinterpretq_bf16_f32((float32x4_t)right));
}
#endif

#if defined(ONNXTRAIN_BF16)
#define ONNXTRAIN_HAS_BF16
inline bool has_bf16() { return multiplies_bf16(); }

// Two vectors as pairs: each lane of the first has that of the second beside it.
template <size_t... kHalf>
inline Vector halves_in_turns(Vector both, std::index_sequence<kHalf...>) {
  typedef int16_t Halves __attribute__((vector_size(kLanes * sizeof(float))));
  const Halves halves = (Halves)both;
  return (Vector)__builtin_shufflevector(halves, halves, (int(kHalf) / 2 + int(kHalf) % 2 * kLanes)...);
}

ONNXTRAIN_BF16 inline Vector pairs_across(Vector first, Vector second) {
  return halves_in_turns(pairs_along(first, second), std::make_index_sequence<2 * kLanes>());
}

// Rounds a panel of the left side, [block][row][kLanes], in place: two blocks become one.
ONNXTRAIN_BF16 inline void round_blocks(float* panel, int64_t blocks, int64_t rows) {
  const float* from = panel;
  for (int64_t b = 0; b < blocks; b += 2, from += 2 * rows * kLanes, panel += rows * kLanes)
    for (int64_t i = 0; i < rows; ++i) {
      const Vector next = b + 1 < blocks ? load(from + (rows + i) * kLanes) : Vector{};
      store(panel + i * kLanes, pairs_along(load(from + i * kLanes), next));
    }
}

// Rounds at most kLanes rows that lie side by side, `step` apart along the depth, and writes kLanes pairs of each,
// with zeros behind the depth. All is read before it is written.
ONNXTRAIN_BF16 inline void transpose_pairs(const float* from, int64_t step, int64_t rows, int64_t depth, float* to,
                                           int64_t to_row) {
  Vector square[kLanes];
  for (int64_t x = 0; x < kLanes; ++x, from += 2 * step) {
    const Vector next = 2 * x + 1 < depth ? load_first(from + step, rows) : Vector{};
    square[x] = 2 * x < depth ? pairs_across(load_first(from, rows), next) : Vector{};
  }
  transpose(square);
  for (int i = 0; i < rows; ++i) store(to + i * to_row, square[i]);
}

// Rounds rows of kLanes floats, one for each step of the depth, in place, and makes them rows of a left side:
// [block][lane][kLanes].
inline void round_lines(float* panel, int64_t depth) {
  const float* from = panel;
  for (; depth > 0; depth -= 2 * kLanes, from += 2 * kLanes * kLanes, panel += kLanes * kLanes)
    transpose_pairs(from, kLanes, kLanes, depth, panel, kLanes);
}

// Rounds rows of floats into another matrix: each shares its places with the next. What lies behind
// `width` is not touched.
ONNXTRAIN_BF16 inline void round_pairs(const float* from, int64_t stride, int64_t rows, int64_t width, float* to) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t j = 0; j < width; j += kLanes) {
      const int64_t inside = width - j;
      const Vector upper = load_first(from + r * stride + j, inside);
      const Vector lower = r + 1 < rows ? load_first(from + (r + 1) * stride + j, inside) : Vector{};
      store_first(to + r / 2 * width + j, pairs_across(upper, lower), inside);
    }
}

// The same in place.
inline void round_rows(float* panel, int64_t rows, int64_t width) { round_pairs(panel, width, rows, width, panel); }

// As `add_tile`, with steps in pairs of bfloat16.
template <int kHeight, int kWidth, int kRowStep, int kDepthStep>
ONNXTRAIN_BF16 inline void add_rounded_tile(int64_t depth, const float* a, int64_t a_block, const float* b, float* c,
                                            int64_t stride, bool fresh) {
  Vector sum[kHeight][kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWidth; ++j) sum[i][j] = Vector{};
  for (int64_t pairs = (depth + 1) / 2; pairs > 0; pairs -= kLanes, a += a_block) {
    const float* at = a;
    const float* const end = a + std::min<int64_t>(pairs, kLanes) * kDepthStep;
    for (; at != end; at += kDepthStep, b += kWidth * kLanes) {
      Vector right[kWidth];
#pragma GCC unroll 4
      for (int j = 0; j < kWidth; ++j) right[j] = load(b + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kHeight; ++i) {
        const Vector left = broadcast_bits(at + i * kRowStep);
#pragma GCC unroll 4
        for (int j = 0; j < kWidth; ++j) sum[i][j] = add_pairs(sum[i][j], left, right[j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWidth; ++j) {
      float* place = c + i * stride + j * kLanes;
      store(place, fresh ? sum[i][j] : load(place) + sum[i][j]);
    }
}

template <int kWidth, bool kLines, size_t... kHeight>
constexpr std::array<TileFunction, kRows> rounded_tiles_of(std::index_sequence<kHeight...>) {
  return {add_rounded_tile<int(kHeight) + 1, kWidth, kLines ? 1 : kLanes, kLines ? kLinesOfPanel : 1>...};
}

template <int kWidth, bool kLines = false>
inline TileFunction rounded_tile_of(int64_t height) {
  static constexpr std::array<TileFunction, kRows> all =
      rounded_tiles_of<kWidth, kLines>(std::make_index_sequence<kRows>());
  return all[static_cast<size_t>(height - 1)];
}
#else
// Other instruction sets compute with floats.
#define ONNXTRAIN_BF16
constexpr bool has_bf16() { return false; }
inline void round_blocks(float*, int64_t, int64_t) {}
inline void transpose_pairs(const float*, int64_t, int64_t, int64_t, float*, int64_t) {}
inline void round_lines(float*, int64_t) {}
inline void round_rows(float*, int64_t, int64_t) {}
inline void round_pairs_of(Vector, float*) {}
inline Vector pairs_across(Vector first, Vector) { return first; }
inline Vector pairs_along(Vector first, Vector) { return first; }
inline void round_pairs(const float*, int64_t, int64_t, int64_t, float*) {}
template <int kHeight, int kWidth, int kRowStep, int kDepthStep>
void add_rounded_tile(int64_t, const float*, int64_t, const float*, float*, int64_t, bool) {}
template <int kWidth, bool kLines = false>
TileFunction rounded_tile_of(int64_t height) {
  return tile_of<kWidth, kLines>(height);
}
#endif

// Most rows of a panel of the left side.
#if defined(__AVX512F__)
constexpr int64_t kMostRows = kTileRows;
#else
constexpr int64_t kMostRows = kRows;
#endif

// Rows cut into panels: as even as they can be, or whole tiles of the matrix unit and a rest.
struct PanelCut {
  int64_t size, pieces;

  PanelCut(int64_t rows, bool in_tiles)
      : size(rows), pieces(in_tiles ? (rows + kTileRows - 1) / kTileRows : EvenCut(rows, kRows).pieces), in_tiles_(in_tiles) {}
  int64_t begin(int64_t piece) const { return in_tiles_ ? piece * kTileRows : even().begin(piece); }
  int64_t length(int64_t piece) const {
    return in_tiles_ ? std::min(kTileRows, size - piece * kTileRows) : even().length(piece);
  }

 private:
  EvenCut even() const { return EvenCut(size, kRows); }

  bool in_tiles_;
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
