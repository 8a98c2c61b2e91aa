// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "optimizers.h"

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

Vector root_of(Vector of) {
  for (int lane = 0; lane < kLanes; ++lane) of[lane] = std::sqrt(of[lane]);
  return of;
}

Vector sign_of(Vector of) {
  // A comparison of vectors is −1 where it holds.
  return __builtin_convertvector((of < 0.0f) - (of > 0.0f), Vector);
}

Vector prepared(const GradientNumbers& by, Vector p, Vector g) {
  if (by.limit > 0) {
    g = g > by.limit ? broadcast(by.limit) : g;
    g = g < -by.limit ? broadcast(-by.limit) : g;
  }
  return by.decay != 0 ? g * by.scale + p * by.decay : g;
}

// Each formula has the number of its states, and returns the new parameter.
struct Adam {
  static constexpr int kStates = 2;
  const AdamNumbers& by;
  Vector operator()(Vector p, Vector g, Vector* state) const {
    g = prepared(by.gradient, p, g);
    Vector &mean = state[0], &square = state[1];
    mean = mean * by.beta1 + g * by.to_mean;
    const Vector root = g * by.to_root;
    square = square * by.beta2 + root * root;
    const Vector change = mean / (root_of(square) + by.epsilon) * by.rate;
    return by.decay_first ? p * by.keep - change : (p - change) * by.keep;
  }
};

struct Sgd {
  static constexpr int kStates = 0;
  const SgdNumbers& by;
  Vector operator()(Vector p, Vector g, Vector*) const { return p * by.keep - prepared(by.gradient, p, g) * by.rate; }
};

struct SgdMomentum {
  static constexpr int kStates = 1;
  const SgdNumbers& by;
  Vector operator()(Vector p, Vector g, Vector* state) const {
    g = prepared(by.gradient, p, g) * by.to_mean;
    if (by.decay_to_mean != 0) g = g + p * by.decay_to_mean;
    state[0] = state[0] * by.momentum + g;
    return p - (by.nesterov ? g + state[0] * by.momentum : state[0]) * by.rate;
  }
};

template <bool has_momentum, bool is_centered>
struct Rmsprop {
  static constexpr int kStates = 1 + has_momentum + is_centered;
  const RmspropNumbers& by;
  Vector operator()(Vector p, Vector g, Vector* state) const {
    g = prepared(by.gradient, p, g);
    const Vector root = g * by.to_root;
    state[0] = state[0] * by.alpha + root * root;
    Vector spread = state[0];
    if (is_centered) {
      Vector& mean = state[kStates - 1];
      mean = mean * by.alpha + g * by.to_mean;
      spread = spread - mean * mean;
      spread = spread < 0.0f ? Vector{} : spread;  // below zero only by rounding
    }
    Vector change = g / (root_of(spread) + by.epsilon);
    if (has_momentum) change = state[1] = state[1] * by.momentum + change * by.to_quotient;
    return p - change * by.rate;
  }
};

struct Adagrad {
  static constexpr int kStates = 1;
  const AdagradNumbers& by;
  Vector operator()(Vector p, Vector g, Vector* state) const {
    g = prepared(by.gradient, p, g) * by.scale;
    state[0] = state[0] + g * g;
    return p - g / (root_of(state[0] + by.initial) + by.epsilon) * by.rate;
  }
};

struct Lion {
  static constexpr int kStates = 1;
  const LionNumbers& by;
  Vector operator()(Vector p, Vector g, Vector* state) const {
    g = prepared(by.gradient, p, g);
    const Vector mean = state[0] * by.beta2;
    state[0] = mean + g * by.to_mean;
    return p * by.keep - sign_of(mean + g * by.to_sign) * by.rate;
  }
};

// Reads each element before it is written, so that outputs may be the memory of inputs.
template <class Formula>
void update_vector(const Formula& formula, const Piece& of, int64_t at) {
  Vector state[kMostStates];
  for (int k = 0; k < Formula::kStates; ++k) state[k] = load(of.states[k] + at);
  store(of.new_parameter + at, formula(load(of.parameter + at), load(of.gradient + at), state));
  for (int k = 0; k < Formula::kStates; ++k) store(of.new_states[k] + at, state[k]);
}

// The last elements, fewer than a vector has.
template <class Formula>
void update_rest(const Formula& formula, const Piece& of, int64_t at) {
  const int64_t count = of.count - at;
  const auto part = [&](const float* from) {
    float padded[kLanes] = {};
    std::copy(from + at, from + at + count, padded);
    return load(padded);
  };
  const auto put = [&](Vector value, float* to) {
    float padded[kLanes];
    store(padded, value);
    std::copy(padded, padded + count, to + at);
  };
  Vector state[kMostStates];
  for (int k = 0; k < Formula::kStates; ++k) state[k] = part(of.states[k]);
  put(formula(part(of.parameter), part(of.gradient), state), of.new_parameter);
  for (int k = 0; k < Formula::kStates; ++k) put(state[k], of.new_states[k]);
}

template <class Formula, class Numbers>
void update(const Numbers& numbers, const Piece& of) {
  const Numbers own = numbers;  // what is written cannot change it
  const Formula formula{own};
  int64_t at = 0;
  for (; at + kLanes <= of.count; at += kLanes) update_vector(formula, of, at);
  if (at < of.count) update_rest(formula, of, at);
}

// The sum of term(x). Lanes are summed in float over a short row only, and rows in double.
template <class Term>
double sum_of(const float* of, int64_t count, Term term) {
  constexpr int64_t kSums = 4, kRow = 64 * kSums * kLanes;
  double total = 0;
  int64_t at = 0;
  while (at + kSums * kLanes <= count) {
    Vector sums[kSums] = {};
    const int64_t end = std::min(count, at + kRow);
    for (; at + kSums * kLanes <= end; at += kSums * kLanes)
      for (int64_t k = 0; k < kSums; ++k) sums[k] += term(load(of + at + k * kLanes));
    for (int64_t k = 0; k < kSums; ++k)
      for (int lane = 0; lane < kLanes; ++lane) total += static_cast<double>(sums[k][lane]);
  }
  for (; at < count; ++at) total += static_cast<double>(term(broadcast(of[at]))[0]);
  return total;
}

double sum(const float* of, int64_t count) {
  return sum_of(of, count, [](Vector x) { return x; });
}

double sum_of_squares(const float* of, int64_t count) {
  return sum_of(of, count, [](Vector x) { return x * x; });
}

void add(const float* a, const float* b, float* to, int64_t count) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) store(to + at, load(a + at) + load(b + at));
  for (; at < count; ++at) to[at] = a[at] + b[at];
}

}  // namespace

const Optimizers kOptimizers = {
    update<Adam, AdamNumbers>,
    update<Sgd, SgdNumbers>,
    update<SgdMomentum, SgdNumbers>,
    {{update<Rmsprop<false, false>, RmspropNumbers>, update<Rmsprop<false, true>, RmspropNumbers>},
     {update<Rmsprop<true, false>, RmspropNumbers>, update<Rmsprop<true, true>, RmspropNumbers>}},
    update<Adagrad, AdagradNumbers>,
    update<Lion, LionNumbers>,
    sum,
    sum_of_squares,
    add,
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
