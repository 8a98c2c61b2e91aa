// Vectors of floats as the compiler knows them, as wide as the instruction set of this compilation,
// and the size of the tile of a product that fits its registers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace onnxtrain::ONNXTRAIN_ISA {

// kRows is the most rows of a tile, kVectors the vectors of each row.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 14, kVectors = 2;  // 28 sums, 2 columns, 1 row of 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6, kVectors = 2;  // 12 sums, 2 columns, 1 row of 16 registers
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRows = 8, kVectors = 3;  // 24 sums, 3 columns, 2 rows of 32 registers
#else
constexpr int kLanes = 4, kRows = 6, kVectors = 2;  // 12 sums, 2 columns, 1 row of 16 registers
#endif
constexpr int kColumns = kVectors * kLanes;

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
// The same in memory, where it may lie anywhere.
typedef float InMemory __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const InMemory*>(from); }

inline void store(float* to, Vector value) { *reinterpret_cast<InMemory*>(to) = value; }

inline Vector broadcast(float value) { return value - Vector{}; }

// The same for bits that need not be those of a number.
inline Vector broadcast_bits(const float* from) {
  typedef int32_t Bits __attribute__((vector_size(sizeof(Vector))));
  int32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Vector)(bits - Bits{});
}

// The first `count` lanes from memory, zeros behind them; nothing beyond is read. And the reverse.
#if defined(__AVX512F__)
inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : count <= 0 ? 0 : (1u << count) - 1);
}

inline Vector load_first(const float* from, int64_t count) {
  return (Vector)_mm512_maskz_loadu_ps(first_lanes(count), from);
}

inline void store_first(float* to, Vector value, int64_t count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), (__m512)value);
}
#elif defined(__AVX2__)
inline __m256i first_lanes(int64_t count) {
  static const int32_t ones_then_zeros[2 * kLanes] = {-1, -1, -1, -1, -1, -1, -1, -1};
  const int64_t held = std::max<int64_t>(0, std::min<int64_t>(count, kLanes));
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones_then_zeros + kLanes - held));
}

inline Vector load_first(const float* from, int64_t count) {
  return (Vector)_mm256_maskload_ps(from, first_lanes(count));
}

inline void store_first(float* to, Vector value, int64_t count) {
  _mm256_maskstore_ps(to, first_lanes(count), (__m256)value);
}
#else
inline Vector load_first(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Vector made{};
  if (count > 0) std::memcpy(&made, from, sizeof(float) * static_cast<size_t>(count));
  return made;
}

inline void store_first(float* to, Vector value, int64_t count) {
  if (count >= kLanes)
    store(to, value);
  else if (count > 0)
    std::memcpy(to, &value, sizeof(float) * static_cast<size_t>(count));
}
#endif

template <size_t... kLane>
inline Vector even_lanes(Vector a, Vector b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(a, b, (2 * int(kLane))...);
}

// Copies `count` floats.
inline void copy_floats(const float* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store_first(to + i, load_first(from + i, count - i), count - i);
}

// Copies every second of `length` floats.
inline void copy_even(const float* from, int64_t length, float* to) {
  for (int64_t i = 0; i < length; i += 2 * kLanes, to += kLanes) {
    const Vector made = even_lanes(load_first(from + i, length - i), load_first(from + i + kLanes, length - i - kLanes),
                                   std::make_index_sequence<kLanes>());
    store_first(to, made, (length - i + 1) / 2);
  }
}

// One step of a transposition: blocks of kBlock × kBlock lanes change places across the diagonal.
template <int kBlock, size_t... kLane>
inline void exchange(Vector& upper, Vector& lower, std::index_sequence<kLane...>) {
  const Vector a = upper, b = lower;
  upper = __builtin_shufflevector(a, b, ((kLane & kBlock) ? kLanes + int(kLane) - kBlock : int(kLane))...);
  lower = __builtin_shufflevector(a, b, ((kLane & kBlock) ? kLanes + int(kLane) : int(kLane) + kBlock)...);
}

template <int kBlock>
inline void exchange_all(Vector (&square)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if ((i & kBlock) == 0) exchange<kBlock>(square[i], square[i + kBlock], std::make_index_sequence<kLanes>());
}

// Transposes a square of kLanes vectors.
inline void transpose(Vector (&square)[kLanes]) {
  exchange_all<1>(square);
  exchange_all<2>(square);
  if constexpr (kLanes > 4) exchange_all<4 % kLanes>(square);
  if constexpr (kLanes > 8) exchange_all<8 % kLanes>(square);
}

// Writes lines that lie `line` apart as to[k][step], k < length: `count` lines of at most kLanes,
// zeros behind them. Each row is written as a whole vector, so that `to` needs room for one.
inline void transpose_lines(const float* from, int64_t line, int64_t count, int64_t length, float* to, int64_t step) {
  Vector square[kLanes];
  for (int64_t k = 0; k < length; k += kLanes) {
    const int64_t left = std::min<int64_t>(length - k, kLanes);
    if (left == kLanes && count == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load(from + i * line + k);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load_first(from + i * line + k, i < count ? left : 0);
    }
    transpose(square);
    float* row = to + k * step;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if (i < left) store(row + i * step, square[i]);
  }
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
