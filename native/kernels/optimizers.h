// The arithmetic of optimizers: one pass over a parameter, its gradient and its states.
//
// Numbers are those of the formulas in the documentation of each optimizer, rounded once to float:
// the factor that clips gradients is already a part of those that gradients are multiplied by.
#pragma once

#include <cstdint>

#include "isa.h"

namespace onnxtrain {

constexpr int kMostStates = 3;

// A piece of a parameter. What is written may be the memory of what is read.
struct Piece {
  int64_t count;
  const float *parameter, *gradient, *states[kMostStates];
  float *new_parameter, *new_states[kMostStates];
};

// What happens to a gradient first: it is limited, and a part of the parameter is added.
struct GradientNumbers {
  float limit;         // each element stays within ±limit; 0 means that there is none
  float scale, decay;  // g · scale + decay · p, where decay is not 0
};

struct AdamNumbers {
  GradientNumbers gradient;
  float beta1, to_mean, beta2, to_root, rate, epsilon;
  float keep;        // decoupled weight decay: 1 − rate · decay
  bool decay_first;  // keep · p − change, or keep · (p − change)
};

struct SgdNumbers {
  GradientNumbers gradient;
  float rate, keep, momentum, to_mean, decay_to_mean;
  bool nesterov;
};

struct RmspropNumbers {
  GradientNumbers gradient;
  float alpha, to_mean, to_root, to_quotient, epsilon, momentum, rate;
};

struct AdagradNumbers {
  GradientNumbers gradient;
  float scale, initial, epsilon, rate;
};

struct LionNumbers {
  GradientNumbers gradient;
  float beta2, to_sign, to_mean, rate, keep;
};

struct Optimizers {
  void (*adam)(const AdamNumbers&, const Piece&);
  void (*sgd)(const SgdNumbers&, const Piece&);
  void (*sgd_momentum)(const SgdNumbers&, const Piece&);
  // By whether there is a momentum, and by whether it is centered.
  void (*rmsprop[2][2])(const RmspropNumbers&, const Piece&);
  void (*adagrad)(const AdagradNumbers&, const Piece&);
  void (*lion)(const LionNumbers&, const Piece&);
  // Sums of all elements, and of all squares.
  double (*sum)(const float* of, int64_t count);
  double (*sum_of_squares)(const float* of, int64_t count);
  // to = a + b, where `to` may be one of them.
  void (*add)(const float* a, const float* b, float* to, int64_t count);
};

ONNXTRAIN_TABLE(Optimizers, kOptimizers, optimizers)

}  // namespace onnxtrain
