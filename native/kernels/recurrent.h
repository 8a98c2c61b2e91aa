// Recurrent layers: what a layer is given, what it returns, and the computations, which are compiled
// once for each instruction set.
//
// Gates lie in ONNX's order: i o f g (LSTM), z r n (GRU). T is the number of steps, B the batch, D the
// directions, H the hidden size, I the input size.
#pragma once

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace onnxtrain {

// GRU's candidate is tanh(x·Wᵀ + (r h)·Rᵀ + b); with gru_linear, which is linear_before_reset,
// tanh(x·Wᵀ + r (h·Rᵀ + Rb) + Wb).
enum class Cell { lstm, gru, gru_linear, rnn_tanh, rnn_relu };

// Matrices of H rows each that W and R hold.
inline int64_t gates_of(Cell cell) { return cell == Cell::lstm ? 4 : cell >= Cell::rnn_tanh ? 1 : 3; }

// Vectors of H that a step saves for the backward pass: i o f g and c, the state before the step; z r n, and
// q = h·Rᵀ + Rb of gru_linear. RNN needs no more than its output.
inline int64_t saved_of(Cell cell) {
  return cell == Cell::lstm ? 5 : cell == Cell::gru_linear ? 4 : cell == Cell::gru ? 3 : 0;
}

// What is saved lies in blocks of as many units, in the order in which the backward pass reads it. The last
// block is filled up.
constexpr int64_t kSavedUnits = 16;

// Pointers may be null: what is left out counts as zero, and each sequence has T steps.
struct RecurrentLayer {
  Cell cell;
  int64_t steps, batch, inputs, hidden, directions;
  bool reverse;                        // the first direction runs from the last step to the first
  const int32_t* lengths;              // (B), each from 0 to T
  const float* x;                      // (T, B, I)
  const float *w, *r;                  // (D, gates·H, I), (D, gates·H, H)
  const float* bias;                   // (D, 2·gates·H): Wb, Rb
  const float* peepholes;              // (D, 3·H): i o f
  const float *initial_h, *initial_c;  // (D, B, H)
};

struct RecurrentOutputs {
  float* y;          // (T, D, B, H)
  float* saved;      // (D, T, H/16, B, saved, 16); steps beyond the lengths, and units beyond H, are not written
  float *y_h, *y_c;  // (D, B, H), or null
};

// Gradients that are null are not computed.
struct RecurrentGradients {
  const float *y, *saved;         // what the forward pass wrote
  const float *dy, *dy_h, *dy_c;  // may be null
  float *dx, *dw, *dr, *dbias, *d_initial_h, *d_initial_c, *dpeepholes;
};

struct Recurrence {
  void (*forward)(const RecurrentLayer&, const RecurrentOutputs&, const Parallel&);
  void (*backward)(const RecurrentLayer&, const RecurrentGradients&, const Parallel&);
};

ONNXTRAIN_TABLE(Recurrence, kRecurrence, recurrence)

}  // namespace onnxtrain
