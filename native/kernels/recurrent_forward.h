// The forward pass of recurrent layers: the product of all inputs of some steps with W, then step by step
// the product of the state with R, and the arithmetic of the gates on its tiles while they are in the cache.
#pragma once

#include "recurrent_tiles.h"

namespace onnxtrain::ONNXTRAIN_ISA {

class ForwardPass {
 public:
  ForwardPass(const RecurrentLayer& layer, int64_t direction, const RecurrentOutputs& out, const Parallel& parallel)
      : at_{layer, direction}, out_(out), parallel_(parallel), rows_(layer.batch), product_(rows_.product()),
        width_(at_.gates() * layer.hidden), chunk_(std::min(layer.steps, steps_of_chunk(layer.batch))),
        weights_(weights()), before_(rows_.packed_size(layer.hidden)), after_(rows_.packed_size(layer.hidden)),
        kept_(layer.cell == Cell::gru ? rows_.packed_size(layer.hidden) : 0), inputs_(chunk_ * layer.batch * width_),
        bias_(width_) {
    add_biases();
    pack_initial_state();
  }

  void run() {
    const int64_t steps = at_.layer.steps;
    for (int64_t first = 0; first < steps; first += chunk_) run_chunk(first, std::min(first + chunk_, steps));
    write_finals();
  }

 private:
  // R as panels for each gate: columns are units, depth is the state.
  Buffer weights() const {
    const int64_t hidden = at_.hidden(), panels = at_.blocks() * kColumns * hidden;
    Buffer all(at_.gates() * panels);
    parallel_(at_.gates() * at_.blocks(), [&](int64_t task) {
      const int64_t gate = task / at_.blocks(), first = task % at_.blocks() * kColumns;
      const MatrixColumns pack{at_.r() + gate * hidden * hidden, hidden, 1};
      pack(all.data() + gate * panels + first * hidden, first, std::min<int64_t>(kColumns, hidden - first), kColumns, 0, hidden);
    });
    return all;
  }

  // Both halves of the bias, but for the candidate of gru_linear, whose recurrent half the reset gate scales.
  void add_biases() {
    const float* given = at_.bias();
    if (given == nullptr) return;
    const bool apart = at_.layer.cell == Cell::gru_linear;
    for (int64_t i = 0; i < width_; ++i)
      bias_.data()[i] = given[i] + (apart && i >= 2 * at_.hidden() ? 0 : given[width_ + i]);
  }

  void pack_initial_state() {
    if (at_.layer.initial_h == nullptr) return;
    for (int64_t tile = 0; tile < rows_.tiles; ++tile)
      for (int64_t i = 0; i < rows_.count(tile); ++i) {
        const float* from = at_.layer.initial_h + at_.state_row(rows_.first(tile) + i);
        float* to = rows_.packed(before_, tile, at_.hidden()) + i;
        for (int64_t k = 0; k < at_.hidden(); ++k) to[k * rows_.height] = from[k];
      }
  }

  void run_chunk(int64_t first, int64_t last) {
    const RecurrentLayer& layer = at_.layer;
    low_ = std::min(at_.time(first), at_.time(last - 1));
    const float* x = layer.x + low_ * layer.batch * layer.inputs;
    compute().product({(last - first) * layer.batch, width_, layer.inputs, x, layer.inputs, 1, at_.w(), 1, layer.inputs,
                       inputs_.data(), width_, false}, parallel_);
    const int stages = layer.cell == Cell::gru ? 2 : 1;
    const double work = double(layer.batch) * double(width_) * double(layer.hidden);
    run_steps(rows_, at_.blocks(), last - first, stages, work, parallel_,
              [&](int64_t index, int stage, int64_t tile, int64_t block) { step(first + index, stage, tile, block); });
  }

  void step(int64_t position, int stage, int64_t tile, int64_t block) const {
    switch (at_.layer.cell) {
      case Cell::lstm: return lstm(position, tile, block);
      case Cell::gru: return stage == 0 ? gru_gates(position, tile, block) : gru_candidate(position, tile, block);
      case Cell::gru_linear: return gru_linear(position, tile, block);
      default: return rnn(position, tile, block);
    }
  }

  // The packed state before a step and, at the position behind it, after it.
  float* state(int64_t position, int64_t tile) const {
    return rows_.packed(position % 2 == 0 ? before_ : after_, tile, at_.hidden());
  }

  void multiply(const float* left, int64_t gate, int64_t block, TileValues& to) const {
    const int64_t panel = gate * at_.blocks() + block;
    product_(at_.hidden(), left, weights_.data() + panel * kColumns * at_.hidden(), to);
  }

  // Calls use(i, b, inputs, place) for the vectors of each sequence that has this step. The state of others
  // stays, and their y is zero.
  template <class Use>
  void each(int64_t position, int64_t tile, int64_t block, TileValues& h, const Use& use) const {
    const int64_t time = at_.time(position);
    for (int64_t i = 0; i < rows_.count(tile); ++i) {
      const int64_t b = rows_.first(tile) + i;
      const float* inputs = inputs_.data() + ((time - low_) * rows_.batch + b) * width_;
      if (at_.valid(time, b)) {
        each_vector(block, at_.hidden(), [&](const Place& place) { use(i, b, inputs, place); });
        continue;
      }
      const float* kept = at_.h_before(out_.y, position, b);
      each_vector(block, at_.hidden(), [&](const Place& place) {
        h.put(i, place, get(kept, place));
        put(out_.y + at_.y_row(time, b), place, Vector{});
      });
    }
  }

  // A gate's sum of the products with the input and the state, and of the biases.
  Vector gate(const float* inputs, int64_t index, const TileValues& product, int64_t i, const Place& place) const {
    const int64_t offset = index * at_.hidden();
    return get(inputs + offset, place) + get(bias_.data() + offset, place) + product.get(i, place);
  }

  float* saved(int64_t position, int64_t b) const { return out_.saved + at_.saved_row(at_.time(position), b); }

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
    for (int64_t g = 0; g < 4; ++g) multiply(state(position, tile), g, block, products[g]);
    const int64_t hidden = at_.hidden();
    const float *p_i = at_.peepholes(0), *p_o = at_.peepholes(1), *p_f = at_.peepholes(2);
    each(position, tile, block, h, [&](int64_t i, int64_t b, const float* inputs, const Place& place) {
      const Vector c_before = get(at_.c_before(out_.saved, position, b), place);
      Vector pre[4];
      for (int g = 0; g < 4; ++g) pre[g] = gate(inputs, g, products[g], i, place);
      const Vector in = vsigmoid(pre[0] + get(p_i, place) * c_before);
      const Vector forget = vsigmoid(pre[2] + get(p_f, place) * c_before), candidate = vtanh(pre[3]);
      const Vector c = forget * c_before + in * candidate;
      const Vector shown = vsigmoid(pre[1] + get(p_o, place) * c);
      float* row = saved(position, b);
      put(row, place, in);
      put(row + hidden, place, shown);
      put(row + 2 * hidden, place, forget);
      put(row + 3 * hidden, place, candidate);
      put(row + 4 * hidden, place, c);
      finish(position, b, i, place, shown * vtanh(c), h);
    });
    pack_state(position, tile, block, h);
  }

  void gru_linear(int64_t position, int64_t tile, int64_t block) const {
    TileValues products[3], h;
    for (int64_t g = 0; g < 3; ++g) multiply(state(position, tile), g, block, products[g]);
    const int64_t hidden = at_.hidden();
    const float* recurrent_bias = at_.bias() == nullptr ? nullptr : at_.bias() + width_ + 2 * hidden;
    const TileValues nothing{};
    each(position, tile, block, h, [&](int64_t i, int64_t b, const float* inputs, const Place& place) {
      const Vector h_before = get(at_.h_before(out_.y, position, b), place);
      const Vector update = vsigmoid(gate(inputs, 0, products[0], i, place));
      const Vector reset = vsigmoid(gate(inputs, 1, products[1], i, place));
      const Vector product = products[2].get(i, place) + get(recurrent_bias, place);
      const Vector candidate = vtanh(gate(inputs, 2, nothing, i, place) + reset * product);
      float* row = saved(position, b);
      put(row, place, update);
      put(row + hidden, place, reset);
      put(row + 2 * hidden, place, candidate);
      put(row + 3 * hidden, place, product);
      finish(position, b, i, place, (1.0f - update) * candidate + update * h_before, h);
    });
    pack_state(position, tile, block, h);
  }

  void gru_gates(int64_t position, int64_t tile, int64_t block) const {
    TileValues products[2], kept;
    for (int64_t g = 0; g < 2; ++g) multiply(state(position, tile), g, block, products[g]);
    each(position, tile, block, kept, [&](int64_t i, int64_t b, const float* inputs, const Place& place) {
      const Vector reset = vsigmoid(gate(inputs, 1, products[1], i, place));
      float* row = saved(position, b);
      put(row, place, vsigmoid(gate(inputs, 0, products[0], i, place)));
      put(row + at_.hidden(), place, reset);
      kept.put(i, place, reset * get(at_.h_before(out_.y, position, b), place));
    });
    rows_.pack(kept, tile, block, at_.hidden(), rows_.packed(kept_, tile, at_.hidden()));
  }

  void gru_candidate(int64_t position, int64_t tile, int64_t block) const {
    TileValues product, h;
    multiply(rows_.packed(kept_, tile, at_.hidden()), 2, block, product);
    each(position, tile, block, h, [&](int64_t i, int64_t b, const float* inputs, const Place& place) {
      const Vector candidate = vtanh(gate(inputs, 2, product, i, place));
      float* row = saved(position, b);
      const Vector update = get(row, place);
      put(row + 2 * at_.hidden(), place, candidate);
      const Vector h_before = get(at_.h_before(out_.y, position, b), place);
      finish(position, b, i, place, (1.0f - update) * candidate + update * h_before, h);
    });
    pack_state(position, tile, block, h);
  }

  void rnn(int64_t position, int64_t tile, int64_t block) const {
    TileValues product, h;
    multiply(state(position, tile), 0, block, product);
    const bool relu = at_.layer.cell == Cell::rnn_relu;
    each(position, tile, block, h, [&](int64_t i, int64_t b, const float* inputs, const Place& place) {
      const Vector sum = gate(inputs, 0, product, i, place);
      finish(position, b, i, place, relu ? vmax(sum, Vector{}) : vtanh(sum), h);
    });
    pack_state(position, tile, block, h);
  }

  // The states after the last step of each sequence; onnxruntime gives zero for one that is empty.
  void write_finals() const {
    const int64_t hidden = at_.hidden();
    for (int64_t b = 0; b < rows_.batch; ++b) {
      const int64_t length = at_.layer.lengths == nullptr ? at_.layer.steps : at_.layer.lengths[b];
      const int64_t last = at_.reverse() ? 0 : length - 1;
      const float* h = length == 0 ? nullptr : out_.y + at_.y_row(last, b);
      const float* c = length == 0 || out_.y_c == nullptr ? nullptr : out_.saved + at_.saved_row(last, b) + 4 * hidden;
      if (out_.y_h != nullptr) copy_row(h, out_.y_h + at_.state_row(b));
      if (out_.y_c != nullptr) copy_row(c, out_.y_c + at_.state_row(b));
    }
  }

  void copy_row(const float* from, float* to) const {
    if (from == nullptr)
      std::fill_n(to, at_.hidden(), 0.0f);
    else
      std::copy_n(from, at_.hidden(), to);
  }

  const Direction at_;
  const RecurrentOutputs& out_;
  const Parallel& parallel_;
  const RowTiles rows_;
  const TileProduct product_;
  const int64_t width_, chunk_;  // gates · H; steps
  const Buffer weights_, before_, after_, kept_;
  const Buffer inputs_;          // of the chunk's steps, multiplied with W
  const Buffer bias_;
  int64_t low_ = 0;              // the first time of the chunk
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
