// Functions of vectors: exponential, logarithm, tanh, sigmoid, the normal distribution. Each is right
// to a few units in the last place and keeps NaN. Where the exact result is below 1e-34, it may be
// another number of that size, or zero.
#pragma once

#include <cstdint>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

typedef int32_t Integers __attribute__((vector_size(kLanes * sizeof(int32_t))));

// Keeps the compiler, which may take sums in any order, from doing so across this value.
inline Vector as_rounded(Vector value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  asm("" : "+m"(value));
#endif
  return value;
}

// Bits of numbers are added without regard to what they overflow to, as for NaN.
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Integers bits_of(Vector value) { return (Integers)value; }
inline Vector from_bits(Integers bits) { return (Vector)bits; }
inline Integers added(Integers a, Integers b) { return (Integers)((Words)a + (Words)b); }
inline Integers subtracted(Integers a, Integers b) { return (Integers)((Words)a - (Words)b); }
inline Integers as_exponent(Integers n) { return (Integers)((Words)n << 23); }

// NaN in the first operand passes through vmax and vmin.
inline Vector vmax(Vector a, Vector b) { return a < b ? b : a; }
inline Vector vmin(Vector a, Vector b) { return a > b ? b : a; }
inline Vector vabs(Vector x) { return from_bits(bits_of(x) & 0x7fffffff); }

inline Vector clamped(Vector x, float low, float high) { return vmin(vmax(x, broadcast(low)), broadcast(high)); }

inline float sum_of_lanes(Vector x) {
  for (int half = kLanes / 2; half > 1; half /= 2) {
    for (int lane = 0; lane < half; ++lane) x[lane] += x[lane + half];
  }
  return x[0] + x[1];
}

inline float largest_lane(Vector x) {
  float largest = x[0];
  for (int lane = 1; lane < kLanes; ++lane) largest = x[lane] > largest || x[lane] != x[lane] ? x[lane] : largest;
  return largest;
}

// x = n ln 2 + rest, with |rest| at most about ln 2 / 2. |x| is at most 1e5.
struct ReducedExponent {
  Integers n;
  Vector rest;
};

inline ReducedExponent reduce_exponent(Vector x) {
  // Adding 1.5 · 2^23 rounds to an integer, which then stands in the low bits.
  const Vector shift = broadcast(12582912.0f);
  const Vector shifted = as_rounded(x * 1.44269504f + shift);
  const Vector whole = as_rounded(shifted - shift);
  // ln 2 in two parts, of which the first times n is exact.
  const Vector rest = as_rounded(x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  return {subtracted(bits_of(shifted), bits_of(shift)), rest};
}

// exp(r) - 1 for |r| at most ln 2 / 2.
inline Vector small_expm1(Vector r) {
  Vector p = broadcast(0.0013941108f);
  p = p * r + 0.0083631752f;
  p = p * r + 0.041666374f;
  p = p * r + 0.16666576f;
  p = p * r + 0.5f;
  return p * (r * r) + r;
}

inline Vector power_of_two(Integers n) { return from_bits(as_exponent(added(n, Integers{} + 127))); }

// exp(x) for x from -87 to 88.
inline Vector small_exp(Vector x) {
  const ReducedExponent of = reduce_exponent(x);
  return (small_expm1(of.rest) + 1.0f) * power_of_two(of.n);
}

inline Vector vexp(Vector x) {
  // Beyond these limits the result is 0 or infinite.
  const ReducedExponent of = reduce_exponent(clamped(x, -86.9f, 89.0f));
  // Half the power of two, since 2^128 is no float but half of it times 1.9 may be, doubled.
  const Vector half = as_rounded((small_expm1(of.rest) + 1.0f) * power_of_two(of.n - 1));
  return x < -86.9f ? Vector{} : half + half;
}

// exp(x) - 1, right to its last places near 0 too. x is at most 80.
inline Vector vexpm1(Vector x) {
  const ReducedExponent of = reduce_exponent(vmax(x, broadcast(-80.0f)));
  const Vector power = power_of_two(of.n);
  return small_expm1(of.rest) * power + as_rounded(power - 1.0f);
}

inline Vector vsigmoid(Vector x) {
  return x < -85.0f ? Vector{} : 1.0f / (1.0f + small_exp(clamped(-x, -87.0f, 85.0f)));
}

inline Vector vtanh(Vector x) {
  // With e = exp(2x) - 1: tanh = e / (e + 2). From 9.1 on it is 1.
  const Vector e = vexpm1(2.0f * clamped(x, -9.1f, 9.1f));
  return e / (e + 2.0f);
}

// The logarithm: -infinity of 0, NaN of what is negative.
inline Vector vlog(Vector x) {
  const Vector tiny = x < 1.17549435e-38f ? broadcast(8388608.0f) : broadcast(1.0f);
  const Vector normal = as_rounded(x * tiny);
  // The mantissa is taken from √½ to √2, near 1, where the logarithm is small.
  const Integers parts = subtracted(bits_of(normal), Integers{} + 0x3f3504f3);
  const Vector mantissa = from_bits((parts & 0x7fffff) + 0x3f3504f3);
  Vector exponent = __builtin_convertvector(parts >> 23, Vector);
  exponent = tiny > 1.0f ? exponent - 23.0f : exponent;
  const Vector r = as_rounded(mantissa - 1.0f);
  Vector p = broadcast(-0.08305569f);
  p = p * r + 0.12798962f;
  p = p * r - 0.1294339f;
  p = p * r + 0.1419023f;
  p = p * r - 0.1664349f;
  p = p * r + 0.20001879f;
  p = p * r - 0.2500028f;
  p = p * r + 0.33333325f;
  const Vector square = r * r;
  const Vector small = as_rounded(p * (square * r) - 2.12194440e-4f * exponent - 0.5f * square);
  const Vector log = as_rounded(small + r) + exponent * 0.693359375f;
  const float infinity = __builtin_inff();
  const Vector at_limits = x == 0.0f ? broadcast(-infinity) : x < 0.0f ? broadcast(__builtin_nanf("")) : x;
  return x > 0.0f && x < infinity ? log : at_limits;
}

// log(1 + e) for e from 0 to 1.
inline Vector small_log1p(Vector e) {
  // 2 atanh(t)
  const Vector t = e / (e + 2.0f), s = t * t;
  Vector p = broadcast(0.121504612f);
  p = p * s + 0.107138306f;
  p = p * s + 0.143084422f;
  p = p * s + 0.199994385f;
  p = p * s + 0.333333373f;
  const Vector twice = t + t;
  return p * (s * twice) + twice;
}

// log(1 + exp(x))
inline Vector vsoftplus(Vector x) {
  return vmax(x, Vector{}) + small_log1p(small_exp(vmax(-vabs(x), broadcast(-87.0f))));
}

// The standard normal distribution: its density and the probability of less than x.
struct Normal {
  Vector density, below;
};

inline Normal vnormal(Vector x) {
  const Vector distance = vabs(x);
  const Vector exponent = -0.5f * x * x;
  const Vector bell = exponent < -80.0f ? Vector{} : small_exp(vmax(exponent, broadcast(-80.0f)));
  // The tail beyond the distance is the bell times a smooth function, a polynomial of t.
  const Vector t = 1.0f / (0.3f * distance + 1.0f);
  Vector p = broadcast(0.0383782014f);
  p = p * t - 0.169165686f;
  p = p * t + 0.228659213f;
  p = p * t - 0.0765055194f;
  p = p * t + 0.142534882f;
  p = p * t + 0.0946837887f;
  p = p * t + 0.12192028f;
  p = p * t + 0.119487695f;
  p = p * t + 7.16840532e-6f;
  const Vector tail = bell * p;
  return {0.398942280f * bell, x < 0.0f ? tail : 1.0f - tail};
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
