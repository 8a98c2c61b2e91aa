// Products of bfloat16 with sums of float32, where the processor has instructions for them: panels are
// packed as floats and rounded in place, two along the depth in the place of one.
#pragma once

#include "tile.h"

namespace onnxtrain::ONNXTRAIN_ISA {

#if defined(__AVX512F__)
#define ONNXTRAIN_BF16 __attribute__((target("avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,fma")))

typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline bool has_bf16() {
  static const bool found = __builtin_cpu_supports("avx512bf16");
  return found;
}

// Rounds `count` floats, a multiple of kLanes: neighbours share a place.
ONNXTRAIN_BF16 inline void round_neighbours(float* panel, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel + i / 2),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(panel + i)));
}

// Rounds rows of floats into another matrix: each shares its places with the next. What lies behind
// `width` is not touched.
ONNXTRAIN_BF16 inline void round_pairs(const float* from, int64_t stride, int64_t rows, int64_t width, float* to) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t j = 0; j < width; j += kLanes) {
      const __mmask16 inside = width - j >= kLanes ? 0xffff : (1u << (width - j)) - 1;
      const __m512 upper = _mm512_maskz_loadu_ps(inside, from + r * stride + j);
      const __m512 lower =
          r + 1 < rows ? _mm512_maskz_loadu_ps(inside, from + (r + 1) * stride + j) : _mm512_setzero_ps();
      const Words low = __builtin_convertvector((Halves)_mm512_cvtneps_pbh(upper), Words);
      const Words high = __builtin_convertvector((Halves)_mm512_cvtneps_pbh(lower), Words);
      _mm512_mask_storeu_ps(to + r / 2 * width + j, inside, (__m512)(low | high << 16));
    }
}

// The same in place.
inline void round_rows(float* panel, int64_t rows, int64_t width) { round_pairs(panel, width, rows, width, panel); }

// Rounds a vector: neighbours share a place.
ONNXTRAIN_BF16 inline void round_pairs_of(Vector given, float* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)given));
}

// As `add_tile`, with steps in pairs of bfloat16.
template <int kHeight, int kWidth, int kRowStep, int kDepthStep>
ONNXTRAIN_BF16 inline void add_rounded_tile(int64_t depth, const float* a, int64_t a_block, const float* b, float* c,
                                            int64_t stride, bool fresh) {
  constexpr int64_t kBlock = kLanes / 2;
  __m512 sum[kHeight][kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWidth; ++j) sum[i][j] = _mm512_setzero_ps();
  for (int64_t pairs = (depth + 1) / 2; pairs > 0; pairs -= kBlock, a += a_block) {
    const float* at = a;
    const float* const end = a + std::min<int64_t>(pairs, kBlock) * kDepthStep;
    for (; at != end; at += kDepthStep, b += kWidth * kLanes) {
      __m512bh right[kWidth];
#pragma GCC unroll 4
      for (int j = 0; j < kWidth; ++j) right[j] = (__m512bh)_mm512_loadu_ps(b + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kHeight; ++i) {
        const __m512bh left = (__m512bh)_mm512_set1_ps(at[i * kRowStep]);
#pragma GCC unroll 4
        for (int j = 0; j < kWidth; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], left, right[j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWidth; ++j) {
      float* place = c + i * stride + j * kLanes;
      _mm512_storeu_ps(place, fresh ? sum[i][j] : _mm512_add_ps(_mm512_loadu_ps(place), sum[i][j]));
    }
}

template <int kWidth, size_t... kHeight>
constexpr std::array<TileFunction, kRows> rounded_tiles_of(std::index_sequence<kHeight...>) {
  return {add_rounded_tile<int(kHeight) + 1, kWidth, kLanes / 2, 1>...};
}

template <int kWidth>
inline TileFunction rounded_tile_of(int64_t height) {
  static constexpr std::array<TileFunction, kRows> all = rounded_tiles_of<kWidth>(std::make_index_sequence<kRows>());
  return all[static_cast<size_t>(height - 1)];
}
#else
// Other instruction sets compute with floats.
constexpr bool has_bf16() { return false; }
inline void round_neighbours(float*, int64_t) {}
inline void round_rows(float*, int64_t, int64_t) {}
inline void round_pairs_of(Vector, float*) {}
inline void round_pairs(const float*, int64_t, int64_t, int64_t, float*) {}
template <int kHeight, int kWidth, int kRowStep, int kDepthStep>
void add_rounded_tile(int64_t, const float*, int64_t, const float*, float*, int64_t, bool) {}
template <int kWidth>
TileFunction rounded_tile_of(int64_t height) {
  return tile_of<kWidth>(height);
}
#endif

}  // namespace onnxtrain::ONNXTRAIN_ISA
