// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "loss.h"

#include <algorithm>

#include "vector_math.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kAtOnce = 4;  // vectors, so that one sum does not wait for itself

// The last elements of a row, which fill a part of a vector.
Vector load_rest(const float* from, int64_t count, float otherwise) {
  Vector made = broadcast(otherwise);
  for (int64_t lane = 0; lane < count; ++lane) made[lane] = from[lane];
  return made;
}

void store_rest(float* to, Vector value, int64_t count) {
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = value[lane];
}

// Combines a function of each vector of a row; `otherwise` fills the last one.
template <class Function, class Combine>
Vector reduce(int64_t count, Vector start, Function function, Combine combine) {
  Vector found[kAtOnce];
  std::fill(found, found + kAtOnce, start);
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= count; i += kAtOnce * kLanes)
    for (int n = 0; n < kAtOnce; ++n) found[n] = combine(found[n], function(i + n * kLanes, int64_t{kLanes}));
  for (; i < count; i += kLanes) found[0] = combine(found[0], function(i, std::min<int64_t>(kLanes, count - i)));
  return combine(combine(found[0], found[1]), combine(found[2], found[3]));
}

// Calls function(first, how many) for each vector of a row.
template <class Function>
void each_vector(int64_t count, Function function) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) function(i, int64_t{kLanes});
  if (i < count) function(i, count - i);
}

Vector take(const float* from, int64_t count, float otherwise) {
  return count == kLanes ? load(from) : load_rest(from, count, otherwise);
}

void put(float* to, Vector value, int64_t count) {
  if (count == kLanes)
    store(to, value);
  else
    store_rest(to, value, count);
}

Vector add(Vector a, Vector b) { return a + b; }

// ---- along a row --------------------------------------------------------------------------------

void row_statistics(const float* x, int64_t classes, float& largest, float& sum) {
  const auto scores = [&](int64_t i, int64_t count) { return take(x + i, count, -kInfinity); };
  largest = largest_lane(reduce(classes, broadcast(-kInfinity), scores, vmax));
  const Vector shift = broadcast(largest);
  const auto exponentials = [&](int64_t i, int64_t count) { return vexp(scores(i, count) - shift); };
  sum = sum_of_lanes(reduce(classes, Vector{}, exponentials, add));
}

void scale_row(const float* x, int64_t classes, float largest, float factor, float offset, float* dx) {
  const Vector shift = broadcast(largest), scale = broadcast(factor), more = broadcast(offset);
  each_vector(classes, [&](int64_t i, int64_t count) {
    put(dx + i, vexp(take(x + i, count, 0.0f) - shift) * scale + more, count);
  });
}

float row_sum(const float* x, int64_t classes, float largest) {
  const Vector shift = broadcast(largest);
  const auto below = [&](int64_t i, int64_t count) { return take(x + i, count, largest) - shift; };
  return sum_of_lanes(reduce(classes, Vector{}, below, add));
}

void softmax_grad(const float* dy, const float* y, float* dx, int64_t classes) {
  const auto product = [&](int64_t i, int64_t count) { return take(dy + i, count, 0.0f) * take(y + i, count, 0.0f); };
  const Vector sum = broadcast(sum_of_lanes(reduce(classes, Vector{}, product, add)));
  each_vector(classes, [&](int64_t i, int64_t count) {
    put(dx + i, take(y + i, count, 0.0f) * (take(dy + i, count, 0.0f) - sum), count);
  });
}

void log_softmax_grad(const float* dy, const float* y, float* dx, int64_t classes) {
  const auto gradients = [&](int64_t i, int64_t count) { return take(dy + i, count, 0.0f); };
  const Vector sum = broadcast(sum_of_lanes(reduce(classes, Vector{}, gradients, add)));
  each_vector(classes, [&](int64_t i, int64_t count) {
    put(dx + i, take(dy + i, count, 0.0f) - vexp(take(y + i, count, 0.0f)) * sum, count);
  });
}

// ---- along columns ------------------------------------------------------------------------------

// Adds term(c) for all classes, some hundred at a time: what is added stays not much smaller than the sum.
template <class Term>
void in_parts(int64_t classes, Vector& total, const Term& term) {
  constexpr int64_t kPart = 256;
  for (int64_t first = 0; first < classes; first += kPart) {
    Vector part{};
    for (int64_t c = first; c < std::min(classes, first + kPart); ++c) part += term(c);
    total += part;
  }
}

void statistics(const Scores& of, const float* x, float* largest, float* sum) {
  if (of.columns == 1 && of.stride == 1) return row_statistics(x, of.classes, *largest, *sum);
  each_vector(of.columns, [&](int64_t i, int64_t count) {
    Vector most = broadcast(-kInfinity), total{};
    for (int64_t c = 0; c < of.classes; ++c) most = vmax(most, take(x + c * of.stride + i, count, 0.0f));
    in_parts(of.classes, total, [&](int64_t c) { return vexp(take(x + c * of.stride + i, count, 0.0f) - most); });
    put(largest + i, most, count);
    put(sum + i, total, count);
  });
}

void sums(const Scores& of, const float* x, const float* largest, float* sum) {
  if (of.columns == 1 && of.stride == 1) {
    *sum = row_sum(x, of.classes, *largest);
    return;
  }
  each_vector(of.columns, [&](int64_t i, int64_t count) {
    const Vector shift = take(largest + i, count, 0.0f);
    Vector total{};
    in_parts(of.classes, total, [&](int64_t c) { return take(x + c * of.stride + i, count, 0.0f) - shift; });
    put(sum + i, total, count);
  });
}

void scaled(const Scores& of, const float* x, const float* largest, const float* factor, const float* offset,
            float* dx) {
  if (of.columns == 1 && of.stride == 1) return scale_row(x, of.classes, *largest, *factor, *offset, dx);
  for (int64_t c = 0; c < of.classes; ++c) {
    const float* from = x + c * of.stride;
    float* to = dx + c * of.stride;
    each_vector(of.columns, [&](int64_t i, int64_t count) {
      const Vector shift = take(largest + i, count, 0.0f), scale = take(factor + i, count, 0.0f);
      put(to + i, vexp(take(from + i, count, 0.0f) - shift) * scale + take(offset + i, count, 0.0f), count);
    });
  }
}

}  // namespace

const Softmax kSoftmax = {statistics, sums, scaled, softmax_grad, log_softmax_grad};

}  // namespace onnxtrain::ONNXTRAIN_ISA
