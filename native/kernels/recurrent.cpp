// LSTM, GRU and RNN, and LSTMGrad, GRUGrad and RNNGrad, their backward passes.
//
// Attributes: `direction` (0 forward, 1 reverse, 2 both), `input_roles` and `output_roles`, which say what
// each input and output is, so that any may be left out; `linear_before_reset` of GRU and `relu` of RNN.
// Inputs: 0 to 7 are X, W, R, B, sequence_lens, initial_h, initial_c and P as in ONNX; backward, 8 is Y, 9 what
// the forward kernel saved, 10 to 12 are the gradients of Y, Y_h and Y_c.
// Outputs: Y, Y_h, Y_c and 3, what is saved; backward, the gradient of the input of that number.
#include <algorithm>
#include <array>

#include "families.h"
#include "recurrent.h"

namespace onnxtrain {
namespace {

enum Role { kX, kW, kR, kB, kLengths, kInitialH, kInitialC, kP, kY, kSaved, kDy, kDyH, kDyC, kInputRoles };
enum Result { kResultY, kResultH, kResultC, kResultSaved, kForwardResults };

using Inputs = std::array<Tensor, kInputRoles>;
using Outputs = std::array<Tensor, 8>;

const float* floats_or_null(const Tensor& tensor) { return tensor.exists() ? tensor.floats() : nullptr; }
float* floats_or_null(Tensor& tensor) { return tensor.exists() ? tensor.floats() : nullptr; }

// The shapes of a layer's tensors, which follow from x and r.
struct Shapes {
  Shape x, w, r, bias, peepholes, state, y, saved;
};

class Recurrent : public Kernel {
 public:
  Recurrent(const Attributes& of, Cell cell)
      : cell_(cell),
        direction_(of.integer("direction", 0)),
        input_roles_(of.integers("input_roles")),
        output_roles_(of.integers("output_roles")) {
    require(direction_ >= 0 && direction_ <= 2, "the direction is not one of 0, 1 and 2");
    for (const int64_t role : input_roles_) require(role >= 0 && role < kInputRoles, "a role of an input is unknown");
    for (size_t i = 0; i < output_roles_.size(); ++i) {
      require(output_roles_[i] >= 0 && output_roles_[i] < 8, "a role of an output is unknown");
      for (size_t other = 0; other < i; ++other)
        require(output_roles_[other] != output_roles_[i], "two outputs have the same role");
    }
  }

 protected:
  Inputs inputs(const Run& run) const {
    require(run.input_count() >= input_roles_.size(), "an input is missing");
    Inputs found;
    for (size_t i = 0; i < input_roles_.size(); ++i) found[input_roles_[i]] = run.input(i);
    return found;
  }

  Shapes shapes(const Inputs& in) const {
    const Shape &x = in[kX].shape, &r = in[kR].shape;
    require(x.size() == 3 && r.size() == 3, "X and R have three axes");
    const int64_t directions = direction_ == 2 ? 2 : 1, gates = gates_of(cell_), hidden = r[2];
    require(hidden < (int64_t{1} << 31), "the hidden size is out of range");
    return {x,
            {directions, gates * hidden, x[2]},
            {directions, gates * hidden, hidden},
            {directions, 2 * gates * hidden},
            {directions, 3 * hidden},
            {directions, x[1], hidden},
            {x[0], directions, x[1], hidden},
            saved_of(cell_) == 0
                ? Shape{0}  // whatever the sizes are
                : Shape{directions, x[0], (hidden + kSavedUnits - 1) / kSavedUnits, x[1], saved_of(cell_), kSavedUnits}};
  }

  // The layer, if what it is given fits.
  RecurrentLayer layer(const Inputs& in, const Shapes& shapes) const {
    require_shape(in[kW], shapes.w, true, "W has another shape than X and R ask for");
    require_shape(in[kR], shapes.r, true, "the shape of R does not fit the number of gates and directions");
    require_shape(in[kB], shapes.bias, false, "B has another shape than R asks for");
    require_shape(in[kInitialH], shapes.state, false, "initial_h has another shape than X and R ask for");
    require_shape(in[kInitialC], shapes.state, false, "initial_c has another shape than X and R ask for");
    require_shape(in[kP], shapes.peepholes, false, "P has another shape than R asks for");
    elements_of(shapes.y);
    elements_of(shapes.saved);
    return {cell_,
            shapes.x[0],
            shapes.x[1],
            shapes.x[2],
            shapes.r[2],
            shapes.r[0],
            direction_ == 1,
            lengths(in[kLengths], shapes),
            in[kX].floats(),
            in[kW].floats(),
            in[kR].floats(),
            floats_or_null(in[kB]),
            floats_or_null(in[kP]),
            floats_or_null(in[kInitialH]),
            floats_or_null(in[kInitialC])};
  }

  // The outputs that are asked for; `shape_of` gives their shapes by role, and `of_lstm` tells which no other cell has.
  template <class ShapeOf, class OfLstm>
  Outputs outputs(Run& run, size_t roles, const OfLstm& of_lstm, const ShapeOf& shape_of) const {
    Outputs made;
    const size_t count = std::min(run.output_count(), output_roles_.size());
    for (size_t i = 0; i < count; ++i) {
      require(output_roles_[i] < static_cast<int64_t>(roles), "a role of an output is unknown");
      require(cell_ == Cell::lstm || !of_lstm(output_roles_[i]), "only an LSTM has a cell state and peepholes");
      made[output_roles_[i]] = run.output(i, shape_of(output_roles_[i]));
    }
    return made;
  }

  // Zero where there is nothing to compute.
  static bool is_empty(const RecurrentLayer& layer, Outputs& out) {
    if (layer.steps > 0 && layer.batch > 0 && layer.hidden > 0) return false;
    for (Tensor& each : out)
      if (each.exists()) std::fill_n(each.floats(), each.elements, 0.0f);
    return true;
  }

  static void require_shape(const Tensor& tensor, const Shape& shape, bool always, const char* otherwise) {
    require(tensor.exists() ? tensor.shape == shape : !always, otherwise);
  }

 private:
  static const int32_t* lengths(const Tensor& given, const Shapes& shapes) {
    if (!given.exists()) return nullptr;
    require(given.type == kInt32 && given.shape == Shape{shapes.x[1]},
            "sequence_lens is a vector of int32, one for each sequence");
    const auto* values = static_cast<const int32_t*>(given.data);
    for (int64_t i = 0; i < given.elements; ++i)
      require(values[i] >= 0 && values[i] <= shapes.x[0], "a length is negative or greater than the number of steps");
    return values;
  }

  const Cell cell_;
  const int64_t direction_;
  const std::vector<int64_t> input_roles_, output_roles_;
};

struct Forward : Recurrent {
  using Recurrent::Recurrent;
  void run(Run& run) const override {
    const Inputs in = inputs(run);
    const Shapes shapes = this->shapes(in);
    const RecurrentLayer layer = this->layer(in, shapes);
    Outputs out = outputs(run, kForwardResults, [](int64_t role) { return role == kResultC; }, [&](int64_t role) {
      return role == kResultY ? shapes.y : role == kResultSaved ? shapes.saved : shapes.state;
    });
    if (is_empty(layer, out)) return;
    if (out[kResultSaved].exists() && (layer.lengths != nullptr || layer.hidden % kSavedUnits != 0))
      std::fill_n(out[kResultSaved].floats(), out[kResultSaved].elements, 0.0f);
    std::vector<float> y, saved;
    float* const y_c = layer.cell == Cell::lstm ? floats_or_null(out[kResultC]) : nullptr;
    recurrence().forward(layer,
                         {room(out[kResultY], shapes.y, y), room(out[kResultSaved], shapes.saved, saved),
                          floats_or_null(out[kResultH]), y_c},
                         run.in_parallel());
  }

 private:
  // Memory of an output, or of one that nobody asked for.
  static float* room(Tensor& output, const Shape& shape, std::vector<float>& otherwise) {
    if (output.exists()) return output.floats();
    otherwise.resize(static_cast<size_t>(elements_of(shape)));
    return otherwise.data();
  }
};

struct Backward : Recurrent {
  using Recurrent::Recurrent;
  void run(Run& run) const override {
    const Inputs in = inputs(run);
    const Shapes shapes = this->shapes(in);
    const RecurrentLayer layer = this->layer(in, shapes);
    require_shape(in[kY], shapes.y, true, "Y has another shape than X and R ask for");
    require_shape(in[kDy], shapes.y, false, "the gradient of Y has another shape than Y");
    require_shape(in[kDyH], shapes.state, false, "the gradient of Y_h has another shape than Y_h");
    require_shape(in[kDyC], shapes.state, false, "the gradient of Y_c has another shape than Y_c");
    require_shape(in[kSaved], shapes.saved, saved_of(layer.cell) > 0,
                  "what the forward pass saved has another shape than X and R ask for");
    Outputs out = outputs(run, kP + 1, [](int64_t role) { return role == kInitialC || role == kP; }, [&](int64_t role) -> Shape {
      switch (role) {
        case kX:
          return shapes.x;
        case kW:
          return shapes.w;
        case kR:
          return shapes.r;
        case kB:
          return shapes.bias;
        case kP:
          return shapes.peepholes;
        default:
          require(role != kLengths, "lengths have no gradient");
          return shapes.state;
      }
    });
    if (is_empty(layer, out)) return;
    const bool lstm = layer.cell == Cell::lstm;
    recurrence().backward(
        layer,
        {in[kY].floats(), floats_or_null(in[kSaved]), floats_or_null(in[kDy]), floats_or_null(in[kDyH]),
         lstm ? floats_or_null(in[kDyC]) : nullptr, floats_or_null(out[kX]), floats_or_null(out[kW]),
         floats_or_null(out[kR]), floats_or_null(out[kB]), floats_or_null(out[kInitialH]),
         lstm ? floats_or_null(out[kInitialC]) : nullptr, lstm ? floats_or_null(out[kP]) : nullptr},
        run.in_parallel());
  }
};

Cell lstm_cell(const Attributes&) { return Cell::lstm; }
Cell gru_cell(const Attributes& of) { return of.integer("linear_before_reset", 0) != 0 ? Cell::gru_linear : Cell::gru; }
Cell rnn_cell(const Attributes& of) { return of.integer("relu", 0) != 0 ? Cell::rnn_relu : Cell::rnn_tanh; }

template <class Pass, Cell (*kCell)(const Attributes&)>
struct Of : Pass {
  explicit Of(const Attributes& of) : Pass(of, kCell(of)) {}
};

}  // namespace

std::vector<KernelKind> recurrent_kernels() {
  return {kind_of<Of<Forward, lstm_cell>>("LSTM", {kFloat}), kind_of<Of<Backward, lstm_cell>>("LSTMGrad", {kFloat}),
          kind_of<Of<Forward, gru_cell>>("GRU", {kFloat}),   kind_of<Of<Backward, gru_cell>>("GRUGrad", {kFloat}),
          kind_of<Of<Forward, rnn_cell>>("RNN", {kFloat}),   kind_of<Of<Backward, rnn_cell>>("RNNGrad", {kFloat})};
}

}  // namespace onnxtrain
