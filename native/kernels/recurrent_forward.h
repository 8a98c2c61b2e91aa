// The forward pass of recurrent layers: step by step the product of input and state with W and R, and the
// arithmetic of the gates on its tiles while they are in the cache.
#pragma once

#include "recurrent_tiles.h"

namespace onnxtrain::ONNXTRAIN_ISA {

class ForwardPass {
 public:
  ForwardPass(const RecurrentLayer& layer, int64_t direction, const RecurrentOutputs& out, const Parallel& parallel)
      : at_{layer, direction},
        out_(out),
        parallel_(parallel),
        rows_(layer.batch),
        product_(rows_.product()),
        depth_(layer.inputs + layer.hidden),
        even_(rows_.packed_size(depth_)),
        odd_(rows_.packed_size(depth_)),
        kept_(layer.cell == Cell::gru ? rows_.packed_size(layer.hidden) : 0),
        c_(layer.cell == Cell::lstm ? layer.batch * layer.hidden : 0),
        bias_(at_.gates() * layer.hidden) {
    pack_weights();
    add_biases();
    if (layer.cell == Cell::lstm && layer.initial_c != nullptr)
      std::copy_n(layer.initial_c + at_.state_row(0), layer.batch * layer.hidden, c_.data());
    for (int64_t tile = 0; tile < rows_.tiles; ++tile) pack_beginning(tile);
  }

  void run() {
    const RecurrentLayer& layer = at_.layer;
    const double work = double(layer.batch) * double(at_.gates() * layer.hidden) * double(depth_);
    run_steps(rows_, at_.blocks(), layer.steps, layer.cell == Cell::gru ? 2 : 1, work, parallel_,
              [&](int64_t position, int stage, int64_t tile, int64_t block) {
                if (stage == 0 && block == 0 && position + 1 < layer.steps) pack_inputs(position + 1, tile);
                step(position, stage, tile, block);
              });
    write_finals();
  }

 private:
  // Each gate's rows of W above those of R: columns are units.
  void pack_weights() {
    const RecurrentLayer& layer = at_.layer;
    const int64_t hidden = layer.hidden, inputs = layer.inputs;
    for (int64_t gate = 0; gate < at_.gates(); ++gate) {
      weights_[gate] = RightPanels(depth_, hidden);
      weights_[gate].pack(0, at_.w() + gate * hidden * inputs, inputs, inputs, true, parallel_);
      weights_[gate].pack(inputs, at_.r() + gate * hidden * hidden, hidden, hidden, true, parallel_);
    }
  }

  // Both halves of the bias, but for the candidate of gru_linear, whose recurrent half the reset gate scales.
  void add_biases() {
    const float* given = at_.bias();
    if (given == nullptr) return;
    const int64_t hidden = at_.hidden(), width = at_.gates() * hidden;
    const bool apart = at_.layer.cell == Cell::gru_linear;
    for (int64_t i = 0; i < width; ++i) bias_.data()[i] = given[i] + (apart && i >= 2 * hidden ? 0 : given[width + i]);
  }

  // What the first step reads.
  void pack_beginning(int64_t tile) const {
    pack_inputs(0, tile);
    for (int64_t i = 0; i < rows_.count(tile) && at_.layer.initial_h != nullptr; ++i)
      pack_row(at_.layer.initial_h + at_.state_row(rows_.first(tile) + i), at_.hidden(), state(0, tile) + i);
  }

  void pack_inputs(int64_t position, int64_t tile) const {
    const int64_t inputs = at_.layer.inputs;
    const float* x = at_.layer.x + (at_.time(position) * rows_.batch + rows_.first(tile)) * inputs;
    for (int64_t i = 0; i < rows_.count(tile); ++i) pack_row(x + i * inputs, inputs, left(position, tile) + i);
  }

  void pack_row(const float* from, int64_t count, float* to) const {
    for (int64_t k = 0; k < count; ++k) to[k * rows_.height] = from[k];
  }

  void step(int64_t position, int stage, int64_t tile, int64_t block) const {
    switch (at_.layer.cell) {
      case Cell::lstm:
        return lstm(position, tile, block);
      case Cell::gru:
        return stage == 0 ? gru_gates(position, tile, block) : gru_candidate(position, tile, block);
      case Cell::gru_linear:
        return gru_linear(position, tile, block);
      default:
        return rnn(position, tile, block);
    }
  }

  // The packed input of a step and the state before it.
  float* left(int64_t position, int64_t tile) const {
    return rows_.packed(position % 2 == 0 ? even_ : odd_, tile, depth_);
  }
  float* state(int64_t position, int64_t tile) const { return left(position, tile) + at_.layer.inputs * rows_.height; }

  // The products of inputs and states with a gate's weights, both or one of them.
  void multiply(int64_t position, int64_t tile, int64_t gate, int64_t block, TileValues& to) const {
    product_(depth_, left(position, tile), weights_[gate].at(block, 0), to);
  }
  void multiply_inputs(int64_t position, int64_t tile, int64_t gate, int64_t block, TileValues& to) const {
    product_(at_.layer.inputs, left(position, tile), weights_[gate].at(block, 0), to);
  }
  void multiply_states(const float* states, int64_t gate, int64_t block, TileValues& to) const {
    product_(at_.hidden(), states, weights_[gate].at(block, at_.layer.inputs), to);
  }

  // Calls use(i, b, place) for the vectors of each sequence that has this step. The state of others
  // stays, and their y is zero.
  template <class Use>
  void each(int64_t position, int64_t tile, int64_t block, TileValues& h, const Use& use) const {
    const int64_t time = at_.time(position);
    for (int64_t i = 0; i < rows_.count(tile); ++i) {
      const int64_t b = rows_.first(tile) + i;
      if (at_.valid(time, b)) {
        each_vector(block, at_.hidden(), [&](const Place& place) { use(i, b, place); });
        continue;
      }
      const float* kept = at_.h_before(out_.y, position, b);
      each_vector(block, at_.hidden(), [&](const Place& place) {
        h.put(i, place, get(kept, place));
        put(out_.y + at_.y_row(time, b), place, Vector{});
      });
    }
  }

  // A gate's product and bias.
  Vector gate(int64_t index, const TileValues& product, int64_t i, const Place& place) const {
    return get(bias_.data() + index * at_.hidden(), place) + product.get(i, place);
  }

  // Saves what the backward pass will read, from a part on.
  template <class... Parts>
  void save(int64_t position, int64_t b, int64_t part, const Place& place, Parts... values) const {
    float* to = out_.saved + at_.saved_at(at_.time(position), b, part, place.unit);
    ((put(to - place.unit, place, values), to += kSavedUnits), ...);
  }

  // Writes a state to y, and keeps it for the next step.
  void finish(int64_t position, int64_t b, int64_t i, const Place& place, Vector value, TileValues& h) const {
    put(out_.y + at_.y_row(at_.time(position), b), place, value);
    h.put(i, place, value);
  }

  void pack_state(int64_t position, int64_t tile, int64_t block, const TileValues& h) const {
    rows_.pack(h, tile, block, at_.hidden(), state(position + 1, tile));
  }

  void lstm(int64_t position, int64_t tile, int64_t block) const {
    TileValues products[4], h;
    for (int64_t g = 0; g < 4; ++g) multiply(position, tile, g, block, products[g]);
    const float *p_i = at_.peepholes(0), *p_o = at_.peepholes(1), *p_f = at_.peepholes(2);
    each(position, tile, block, h, [&](int64_t i, int64_t b, const Place& place) {
      float* const state = c_.data() + b * at_.hidden();
      const Vector c_before = get(state, place);
      Vector pre[4];
      for (int g = 0; g < 4; ++g) pre[g] = gate(g, products[g], i, place);
      const Vector in = vsigmoid(pre[0] + get(p_i, place) * c_before);
      const Vector forget = vsigmoid(pre[2] + get(p_f, place) * c_before), candidate = vtanh(pre[3]);
      const Vector c = forget * c_before + in * candidate;
      const Vector shown = vsigmoid(pre[1] + get(p_o, place) * c);
      save(position, b, 0, place, in, shown, forget, candidate, c_before);
      put(state, place, c);
      finish(position, b, i, place, shown * vtanh(c), h);
    });
    pack_state(position, tile, block, h);
  }

  void gru_linear(int64_t position, int64_t tile, int64_t block) const {
    TileValues products[2], of_inputs, of_states, h;
    for (int64_t g = 0; g < 2; ++g) multiply(position, tile, g, block, products[g]);
    multiply_inputs(position, tile, 2, block, of_inputs);
    multiply_states(state(position, tile), 2, block, of_states);
    const int64_t hidden = at_.hidden();
    const float* recurrent_bias = at_.bias() == nullptr ? nullptr : at_.bias() + 5 * hidden;
    each(position, tile, block, h, [&](int64_t i, int64_t b, const Place& place) {
      const Vector h_before = get(at_.h_before(out_.y, position, b), place);
      const Vector update = vsigmoid(gate(0, products[0], i, place));
      const Vector reset = vsigmoid(gate(1, products[1], i, place));
      const Vector product = of_states.get(i, place) + get(recurrent_bias, place);
      const Vector candidate = vtanh(gate(2, of_inputs, i, place) + reset * product);
      save(position, b, 0, place, update, reset, candidate, product);
      finish(position, b, i, place, (1.0f - update) * candidate + update * h_before, h);
    });
    pack_state(position, tile, block, h);
  }

  void gru_gates(int64_t position, int64_t tile, int64_t block) const {
    TileValues products[2], kept;
    for (int64_t g = 0; g < 2; ++g) multiply(position, tile, g, block, products[g]);
    each(position, tile, block, kept, [&](int64_t i, int64_t b, const Place& place) {
      const Vector reset = vsigmoid(gate(1, products[1], i, place));
      save(position, b, 0, place, vsigmoid(gate(0, products[0], i, place)), reset);
      kept.put(i, place, reset * get(at_.h_before(out_.y, position, b), place));
    });
    rows_.pack(kept, tile, block, at_.hidden(), rows_.packed(kept_, tile, at_.hidden()));
  }

  void gru_candidate(int64_t position, int64_t tile, int64_t block) const {
    TileValues of_inputs, of_states, h;
    multiply_inputs(position, tile, 2, block, of_inputs);
    multiply_states(rows_.packed(kept_, tile, at_.hidden()), 2, block, of_states);
    each(position, tile, block, h, [&](int64_t i, int64_t b, const Place& place) {
      const Vector candidate = vtanh(gate(2, of_inputs, i, place) + of_states.get(i, place));
      const Vector update = load(out_.saved + at_.saved_at(at_.time(position), b, 0, place.unit));
      save(position, b, 2, place, candidate);
      const Vector h_before = get(at_.h_before(out_.y, position, b), place);
      finish(position, b, i, place, (1.0f - update) * candidate + update * h_before, h);
    });
    pack_state(position, tile, block, h);
  }

  void rnn(int64_t position, int64_t tile, int64_t block) const {
    TileValues product, h;
    multiply(position, tile, 0, block, product);
    const bool relu = at_.layer.cell == Cell::rnn_relu;
    each(position, tile, block, h, [&](int64_t i, int64_t b, const Place& place) {
      const Vector sum = gate(0, product, i, place);
      finish(position, b, i, place, relu ? vmax(sum, Vector{}) : vtanh(sum), h);
    });
    pack_state(position, tile, block, h);
  }

  // The states after the last step of each sequence; onnxruntime gives zero for one that is empty.
  void write_finals() const {
    for (int64_t b = 0; b < rows_.batch; ++b) {
      const int64_t length = at_.layer.lengths == nullptr ? at_.layer.steps : at_.layer.lengths[b];
      const int64_t last = at_.reverse() ? 0 : length - 1;
      for (int64_t unit = 0; unit < at_.hidden(); ++unit) {
        const int64_t place = at_.state_row(b) + unit;
        if (out_.y_h != nullptr) out_.y_h[place] = length == 0 ? 0 : out_.y[at_.y_row(last, b) + unit];
        if (out_.y_c != nullptr) out_.y_c[place] = length == 0 ? 0 : c_.data()[b * at_.hidden() + unit];
      }
    }
  }

  const Direction at_;
  const RecurrentOutputs& out_;
  const Parallel& parallel_;
  const RowTiles rows_;
  const TileProduct product_;
  const int64_t depth_;  // I + H
  RightPanels weights_[4];
  const Buffer even_, odd_, kept_, c_;
  const Buffer bias_;
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
