// Sums over many floats, in the vectors of this compilation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// How a loop body reads and writes: a vector at a time, or one element. A body is a function template
// of both, so that it is written once.
struct ByVector {
  using Value = Vector;
  static constexpr int64_t kStep = kLanes;
  static Vector get(const float* from) { return load(from); }
  static void put(float* to, Vector value) { store(to, value); }
};

struct ByElement {
  using Value = float;
  static constexpr int64_t kStep = 1;
  static float get(const float* from) { return *from; }
  static void put(float* to, float value) { *to = value; }
};

// Calls body(way, index) for all of 0 … count - 1, most of them a vector at a time.
template <class Body>
inline void for_each(int64_t count, Body body) {
  int64_t index = 0;
  for (; index + kLanes <= count; index += kLanes) body(ByVector{}, index);
  for (; index < count; ++index) body(ByElement{}, index);
}

inline float total_of(Vector lanes) {
  typedef float Quad __attribute__((vector_size(4 * sizeof(float))));
  Quad parts[kLanes / 4];
  std::memcpy(parts, &lanes, sizeof(lanes));
  for (int part = 1; part < kLanes / 4; ++part) parts[0] += parts[part];
  return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

// max(low, min(high, value)); what is not a number stays so.
inline float clip(float value, float low, float high) {
  const float above = value < low ? low : value;
  return above > high ? high : above;
}

inline Vector clip(Vector value, float low, float high) {
  const Vector least = broadcast(low), most = broadcast(high);
  const Vector above = value < least ? least : value;
  return above > most ? most : above;
}

// The value where `of` lies between two bounds, and 0 elsewhere.
inline float pass_between(float of, float low, float high, float value) { return of > low && of < high ? value : 0.0f; }

inline Vector pass_between(Vector of, float low, float high, Vector value) {
  const Vector least = broadcast(low), most = broadcast(high);
  const Vector below = of < most ? value : Vector{};
  return of > least ? below : Vector{};
}

// Several sums over the same elements. Each lane of several vectors adds up some hundreds of elements
// at most; their totals are added in double precision.
template <int kSums>
class Sums {
 public:
  // Adds body(way, index, terms) for all of 0 … count - 1: it writes one term for each sum.
  template <class Body>
  void add(int64_t count, Body body) {
    for (int64_t begin = 0; begin < count; begin += kMost) {
      const int64_t size = std::min(kMost, count - begin);
      if (taken_ + size > kMost) settle();
      taken_ += size;
      add_piece(begin, begin + size, body);
    }
  }

  double total(int which) {
    settle();
    return totals_[which];
  }

 private:
  static constexpr int64_t kMost = 8192, kAtOnce = 4;

  template <class Body>
  void add_piece(int64_t index, int64_t end, Body body) {
    Vector sums[kAtOnce][kSums] = {};
    for (; index + kAtOnce * kLanes <= end; index += kAtOnce * kLanes)
      for (int64_t each = 0; each < kAtOnce; ++each) add_terms(ByVector{}, index + each * kLanes, body, sums[each]);
    for (; index + kLanes <= end; index += kLanes) add_terms(ByVector{}, index, body, sums[0]);
    float rest[kSums] = {};
    for (; index < end; ++index) add_terms(ByElement{}, index, body, rest);
    for (int which = 0; which < kSums; ++which) {
      lanes_[which] += (sums[0][which] + sums[1][which]) + (sums[2][which] + sums[3][which]);
      rest_[which] += rest[which];
    }
  }

  template <class Way, class Body>
  static void add_terms(Way way, int64_t index, Body& body, typename Way::Value* sums) {
    typename Way::Value terms[kSums];
    body(way, index, terms);
    for (int which = 0; which < kSums; ++which) sums[which] += terms[which];
  }

  void settle() {
    if (taken_ == 0) return;
    for (int which = 0; which < kSums; ++which) {
      totals_[which] += static_cast<double>(total_of(lanes_[which])) + rest_[which];
      lanes_[which] = Vector{};
      rest_[which] = 0;
    }
    taken_ = 0;
  }

  Vector lanes_[kSums] = {};
  float rest_[kSums] = {};
  double totals_[kSums] = {};
  int64_t taken_ = 0;
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
