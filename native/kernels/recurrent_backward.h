// The backward pass of recurrent layers. Step by step, from the last to the first, the gradients of the gates
// follow from those of the states, and by a product with R the state's before. The gradients of W, R, biases
// and inputs are large products over all steps of a chunk.
//
// A step's gradients of gates lie in one row: i o f g (LSTM); z r n, and for gru_linear q, where n belongs to
// the input's side and q to the state's; the sum (RNN).
#pragma once

#include "recurrent_tiles.h"

namespace onnxtrain::ONNXTRAIN_ISA {

class BackwardPass {
 public:
  BackwardPass(const RecurrentLayer& layer, int64_t direction, const RecurrentGradients& io, const Parallel& parallel)
      : at_{layer, direction}, io_(io), parallel_(parallel), cell_(layer.cell), rows_(layer.batch),
        product_(rows_.product()), row_((cell_ == Cell::gru_linear ? 4 : at_.gates()) * layer.hidden),
        depth_((cell_ == Cell::gru ? 2 : at_.gates()) * layer.hidden),
        chunk_(std::min(layer.steps, steps_of_chunk(layer.batch))),
        weights_(packed_right(at_.r(), depth_, layer.hidden, layer.hidden, 1, parallel)),
        candidate_weights_(candidate_weights()), even_(rows_.packed_size(depth_)), odd_(rows_.packed_size(depth_)),
        packed_candidate_(cell_ == Cell::gru ? rows_.packed_size(layer.hidden) : 0),
        dh_(layer.batch * layer.hidden), dc_(cell_ == Cell::lstm ? layer.batch * layer.hidden : 0),
        dgates_(chunk_ * layer.batch * row_), states_(chunk_ * layer.batch * layer.hidden),
        inputs_(layer.lengths == nullptr ? 0 : chunk_ * layer.batch * layer.inputs) {
    take_finals(io.dy_h, dh_);
    if (cell_ == Cell::lstm) take_finals(io.dy_c, dc_);
  }

  void run() {
    for (int64_t last = at_.layer.steps; last > 0; last -= chunk_) run_chunk(std::max<int64_t>(0, last - chunk_), last);
    write_initial();
  }

 private:
  // GRU multiplies r h with the last third of R in a step of its own.
  Buffer candidate_weights() const {
    if (cell_ != Cell::gru) return Buffer();
    const int64_t hidden = at_.hidden();
    return packed_right(at_.r() + 2 * hidden * hidden, hidden, hidden, hidden, 1, parallel_);
  }

  // The gradients of the states after the last step; an empty sequence has a constant there.
  void take_finals(const float* given, const Buffer& to) const {
    if (given == nullptr) return;
    for (int64_t b = 0; b < rows_.batch; ++b)
      if (at_.valid(0, b)) std::copy_n(given + at_.state_row(b), at_.hidden(), to.data() + b * at_.hidden());
  }

  void run_chunk(int64_t first, int64_t last) {
    low_ = std::min(at_.time(first), at_.time(last - 1));
    const double work = double(rows_.batch) * double(row_) * double(at_.hidden());
    run_steps(rows_, at_.blocks(), last - first, cell_ == Cell::gru ? 2 : 1, work, parallel_,
              [&](int64_t index, int stage, int64_t tile, int64_t block) { step(last - 1 - index, stage, tile, block); });
    const int64_t steps = last - first;
    const bool add = last != at_.layer.steps;
    if (io_.dx != nullptr) write_dx(steps);
    if (io_.dw != nullptr) add_dw(steps, add);
    if (io_.dr != nullptr) add_dr(first, steps, add);
    if (io_.dbias != nullptr) add_dbias(steps, add);
    if (io_.dpeepholes != nullptr) add_dpeepholes(first, steps, add);
  }

  void step(int64_t position, int stage, int64_t tile, int64_t block) const {
    switch (cell_) {
      case Cell::lstm: return lstm(position, tile, block);
      case Cell::gru: return stage == 0 ? gru_candidate(position, tile, block) : gru_gates(position, tile, block);
      case Cell::gru_linear: return gru_linear(position, tile, block);
      default: return rnn(position, tile, block);
    }
  }

  // ---- steps -------------------------------------------------------------------------------------------------

  // The packed gradients of a step's gates.
  float* packed(int64_t position, int64_t tile) const {
    return rows_.packed(position % 2 == 0 ? even_ : odd_, tile, depth_);
  }

  // What comes to the state after a step from the gates of the next one.
  void multiply_next(int64_t position, int64_t tile, int64_t block, TileValues& to) const {
    if (position + 1 < at_.layer.steps)
      product_(depth_, packed(position + 1, tile), weights_.data() + block * kColumns * depth_, to);
    else
      to = TileValues{};
  }

  // What a step knows about a sequence. A step beyond the length of a sequence has no gradients of gates.
  struct Row {
    int64_t i, b;          // in the tile, in the batch
    bool valid;
    const float* dy;       // may be null
    const float* saved;
    float *dh, *dc, *dgates;
  };

  template <class Use>
  void each(int64_t position, int64_t tile, int64_t block, const Use& use) const {
    const int64_t time = at_.time(position), hidden = at_.hidden();
    for (int64_t i = 0; i < rows_.count(tile); ++i) {
      const int64_t b = rows_.first(tile) + i;
      const bool valid = at_.valid(time, b);
      const Row row{i, b, valid, io_.dy == nullptr || !valid ? nullptr : io_.dy + at_.y_row(time, b),
                    io_.saved == nullptr ? nullptr : io_.saved + at_.saved_row(time, b), dh_.data() + b * hidden,
                    cell_ == Cell::lstm ? dc_.data() + b * hidden : nullptr,
                    dgates_.data() + ((time - low_) * rows_.batch + b) * row_};
      each_vector(block, hidden, [&](const Place& place) { use(row, place); });
    }
  }

  // The gradient of the state after a step.
  Vector arriving(const Row& row, const Place& place, const TileValues& next) const {
    return get(row.dh, place) + get(row.dy, place) + next.get(row.i, place);
  }

  void pack_gate(const TileValues& values, int64_t position, int64_t tile, int64_t block, int64_t gate) const {
    rows_.pack(values, tile, block, at_.hidden(), packed(position, tile) + gate * at_.hidden() * rows_.height);
  }

  // Writes the gradient of a gate, to be multiplied with R in the next step, if `values` is given, and behind
  // all steps.
  void put_gate(const Row& row, const Place& place, int64_t gate, Vector value, TileValues* values) const {
    put(row.dgates + gate * at_.hidden(), place, value);
    if (values != nullptr) values->put(row.i, place, value);
  }

  void lstm(int64_t position, int64_t tile, int64_t block) const {
    TileValues next, values[4];
    multiply_next(position, tile, block, next);
    const int64_t hidden = at_.hidden();
    const float *p_i = at_.peepholes(0), *p_o = at_.peepholes(1), *p_f = at_.peepholes(2);
    each(position, tile, block, [&](const Row& row, const Place& place) {
      const Vector dh = arriving(row, place, next);
      if (!row.valid) {
        for (int g = 0; g < 4; ++g) put_gate(row, place, g, Vector{}, &values[g]);
        return put(row.dh, place, dh);
      }
      const Vector in = get(row.saved, place), shown = get(row.saved + hidden, place);
      const Vector forget = get(row.saved + 2 * hidden, place), candidate = get(row.saved + 3 * hidden, place);
      const Vector c_before = get(at_.c_before(io_.saved, position, row.b), place);
      const Vector bent = vtanh(get(row.saved + 4 * hidden, place));
      const Vector d_shown = dh * bent * (shown - shown * shown);
      const Vector dc = get(row.dc, place) + dh * shown * (1.0f - bent * bent) + get(p_o, place) * d_shown;
      const Vector d_in = dc * candidate * (in - in * in);
      const Vector d_forget = dc * c_before * (forget - forget * forget);
      put_gate(row, place, 0, d_in, &values[0]);
      put_gate(row, place, 1, d_shown, &values[1]);
      put_gate(row, place, 2, d_forget, &values[2]);
      put_gate(row, place, 3, dc * in * (1.0f - candidate * candidate), &values[3]);
      put(row.dc, place, dc * forget + get(p_i, place) * d_in + get(p_f, place) * d_forget);
      put(row.dh, place, Vector{});
    });
    for (int64_t g = 0; g < 4; ++g) pack_gate(values[g], position, tile, block, g);
  }

  void gru_linear(int64_t position, int64_t tile, int64_t block) const {
    TileValues next, values[3];
    multiply_next(position, tile, block, next);
    const int64_t hidden = at_.hidden();
    each(position, tile, block, [&](const Row& row, const Place& place) {
      const Vector dh = arriving(row, place, next);
      if (!row.valid) {
        put_gate(row, place, 3, Vector{}, nullptr);
        for (int g = 0; g < 3; ++g) put_gate(row, place, g, Vector{}, &values[g]);
        return put(row.dh, place, dh);
      }
      const Vector update = get(row.saved, place), reset = get(row.saved + hidden, place);
      const Vector candidate = get(row.saved + 2 * hidden, place), product = get(row.saved + 3 * hidden, place);
      const Vector h_before = get(at_.h_before(io_.y, position, row.b), place);
      const Vector d_candidate = dh * (1.0f - update) * (1.0f - candidate * candidate);
      const Vector d_product = d_candidate * reset;
      put_gate(row, place, 0, dh * (h_before - candidate) * (update - update * update), &values[0]);
      put_gate(row, place, 1, d_candidate * product * (reset - reset * reset), &values[1]);
      put_gate(row, place, 2, d_candidate, nullptr);
      put_gate(row, place, 3, d_product, &values[2]);
      put(row.dh, place, dh * update);
    });
    for (int64_t g = 0; g < 3; ++g) pack_gate(values[g], position, tile, block, g);
  }

  void gru_candidate(int64_t position, int64_t tile, int64_t block) const {
    TileValues next, value;
    multiply_next(position, tile, block, next);
    const int64_t hidden = at_.hidden();
    each(position, tile, block, [&](const Row& row, const Place& place) {
      const Vector dh = arriving(row, place, next);
      put(row.dh, place, dh);
      if (!row.valid) return put_gate(row, place, 2, Vector{}, &value);
      const Vector update = get(row.saved, place), candidate = get(row.saved + 2 * hidden, place);
      put_gate(row, place, 2, dh * (1.0f - update) * (1.0f - candidate * candidate), &value);
    });
    rows_.pack(value, tile, block, hidden, rows_.packed(packed_candidate_, tile, hidden));
  }

  void gru_gates(int64_t position, int64_t tile, int64_t block) const {
    TileValues d_kept, values[2];
    const int64_t hidden = at_.hidden();
    product_(hidden, rows_.packed(packed_candidate_, tile, hidden),
             candidate_weights_.data() + block * kColumns * hidden, d_kept);
    each(position, tile, block, [&](const Row& row, const Place& place) {
      if (!row.valid) {
        for (int g = 0; g < 2; ++g) put_gate(row, place, g, Vector{}, &values[g]);
        return;
      }
      const Vector dh = get(row.dh, place), kept = d_kept.get(row.i, place);
      const Vector update = get(row.saved, place), reset = get(row.saved + hidden, place);
      const Vector candidate = get(row.saved + 2 * hidden, place);
      const Vector h_before = get(at_.h_before(io_.y, position, row.b), place);
      put_gate(row, place, 0, dh * (h_before - candidate) * (update - update * update), &values[0]);
      put_gate(row, place, 1, kept * h_before * (reset - reset * reset), &values[1]);
      put(row.dh, place, dh * update + kept * reset);
    });
    for (int64_t g = 0; g < 2; ++g) pack_gate(values[g], position, tile, block, g);
  }

  void rnn(int64_t position, int64_t tile, int64_t block) const {
    TileValues next, value;
    multiply_next(position, tile, block, next);
    each(position, tile, block, [&](const Row& row, const Place& place) {
      const Vector dh = arriving(row, place, next);
      if (!row.valid) {
        put_gate(row, place, 0, Vector{}, &value);
        return put(row.dh, place, dh);
      }
      const Vector h = get(io_.y + at_.y_row(at_.time(position), row.b), place);
      const Vector slope = cell_ == Cell::rnn_tanh ? 1.0f - h * h : h > 0.0f ? broadcast(1.0f) : Vector{};
      put_gate(row, place, 0, dh * slope, &value);
      put(row.dh, place, Vector{});
    });
    pack_gate(value, position, tile, block, 0);
  }

  // The gradients of the initial states.
  void write_initial() const {
    const int64_t hidden = at_.hidden();
    if (io_.d_initial_c != nullptr)
      std::copy_n(dc_.data(), rows_.batch * hidden, io_.d_initial_c + at_.state_row(0));
    if (io_.d_initial_h == nullptr) return;
    for (int64_t block = 0; block < at_.blocks(); ++block)
      for (int64_t tile = 0; tile < rows_.tiles; ++tile) {
        TileValues next;
        multiply_next(-1, tile, block, next);
        for (int64_t i = 0; i < rows_.count(tile); ++i) {
          const int64_t b = rows_.first(tile) + i;
          each_vector(block, hidden, [&](const Place& place) {
            put(io_.d_initial_h + at_.state_row(b), place, get(dh_.data() + b * hidden, place) + next.get(i, place));
          });
        }
      }
  }

  // ---- all steps of a chunk ------------------------------------------------------------------------------------

  // result (+)= dgates[:, first gate …]ᵀ · right
  void multiply_gates(int64_t steps, int64_t gate, int64_t gates, const float* right, int64_t width, float* result,
                      bool add) const {
    compute().product({gates * at_.hidden(), width, steps * rows_.batch, dgates_.data() + gate * at_.hidden(), 1, row_,
                       right, width, 1, result, width, add}, parallel_);
  }

  void write_dx(int64_t steps) const {
    const RecurrentLayer& layer = at_.layer;
    compute().product({steps * layer.batch, layer.inputs, at_.gates() * layer.hidden, dgates_.data(), row_, 1, at_.w(),
                       layer.inputs, 1, io_.dx + low_ * layer.batch * layer.inputs, layer.inputs, at_.index > 0},
                      parallel_);
  }

  void add_dw(int64_t steps, bool add) const {
    const RecurrentLayer& layer = at_.layer;
    const float* x = layer.x + low_ * layer.batch * layer.inputs;
    if (layer.lengths != nullptr) x = clean_inputs(x, steps);
    multiply_gates(steps, 0, at_.gates(), x, layer.inputs, io_.dw + (at_.w() - layer.w), add);
  }

  // Beyond its length a sequence may hold anything, even NaN, which zero does not cancel.
  const float* clean_inputs(const float* x, int64_t steps) const {
    const int64_t width = at_.layer.inputs;
    float* to = inputs_.data();
    for (int64_t time = low_; time < low_ + steps; ++time)
      for (int64_t b = 0; b < rows_.batch; ++b, x += width, to += width)
        if (at_.valid(time, b))
          std::copy_n(x, width, to);
        else
          std::fill_n(to, width, 0.0f);
    return inputs_.data();
  }

  void add_dr(int64_t first, int64_t steps, bool add) const {
    const int64_t hidden = at_.hidden();
    float* dr = io_.dr + (at_.r() - at_.layer.r);
    copy_states(first, steps, false);
    if (gates_of(cell_) != 3) return multiply_gates(steps, 0, gates_of(cell_), states_.data(), hidden, dr, add);
    multiply_gates(steps, 0, 2, states_.data(), hidden, dr, add);
    if (cell_ == Cell::gru) copy_states(first, steps, true);
    multiply_gates(steps, cell_ == Cell::gru ? 2 : 3, 1, states_.data(), hidden, dr + 2 * hidden * hidden, add);
  }

  // The states before the steps, or, as GRU multiplies them for its candidate, r times those.
  void copy_states(int64_t first, int64_t steps, bool reset) const {
    const int64_t hidden = at_.hidden();
    parallel_(steps, [&](int64_t index) {
      const int64_t position = first + index, time = at_.time(position);
      for (int64_t b = 0; b < rows_.batch; ++b) {
        const float* from = at_.valid(time, b) ? at_.h_before(io_.y, position, b) : nullptr;
        float* to = states_.data() + ((time - low_) * rows_.batch + b) * hidden;
        if (from == nullptr) {
          std::fill_n(to, hidden, 0.0f);
          continue;
        }
        std::copy_n(from, hidden, to);
        if (!reset) continue;
        const float* gate = io_.saved + at_.saved_row(time, b) + hidden;
        for (int64_t k = 0; k < hidden; ++k) to[k] *= gate[k];
      }
    });
  }

  void add_dbias(int64_t steps, bool add) const {
    const int64_t width = at_.gates() * at_.hidden(), hidden = at_.hidden(), rows = steps * rows_.batch;
    float* to = io_.dbias + at_.index * 2 * width;
    // The columns of the input's half, and those of the state's.
    for (const int64_t half : {0, 1})
      parallel_(at_.gates() * at_.blocks(), [&](int64_t task) {
        const int64_t gate = task / at_.blocks();
        const bool apart = half == 1 && cell_ == Cell::gru_linear && gate == 2;
        const float* from = dgates_.data() + (apart ? 3 : gate) * hidden;
        each_vector(task % at_.blocks(), hidden, [&](const Place& place) {
          Vector sum = add ? get(to + half * width + gate * hidden, place) : Vector{};
          for (int64_t i = 0; i < rows; ++i) sum += get(from + i * row_, place);
          put(to + half * width + gate * hidden, place, sum);
        });
      });
  }

  void add_dpeepholes(int64_t first, int64_t steps, bool add) const {
    const int64_t hidden = at_.hidden();
    float* to = io_.dpeepholes + at_.index * 3 * hidden;
    parallel_(at_.blocks(), [&](int64_t block) {
      each_vector(block, hidden, [&](const Place& place) {
        Vector sums[3];
        for (int g = 0; g < 3; ++g) sums[g] = add ? get(to + g * hidden, place) : Vector{};
        for (int64_t position = first; position < first + steps; ++position)
          for (int64_t b = 0; b < rows_.batch; ++b) {
            const int64_t time = at_.time(position);
            if (!at_.valid(time, b)) continue;
            const float* row = dgates_.data() + ((time - low_) * rows_.batch + b) * row_;
            const Vector before = get(at_.c_before(io_.saved, position, b), place);
            sums[0] += get(row, place) * before;
            sums[1] += get(row + hidden, place) * get(io_.saved + at_.saved_row(time, b) + 4 * hidden, place);
            sums[2] += get(row + 2 * hidden, place) * before;
          }
        for (int g = 0; g < 3; ++g) put(to + g * hidden, place, sums[g]);
      });
    });
  }

  const Direction at_;
  const RecurrentGradients& io_;
  const Parallel& parallel_;
  const Cell cell_;
  const RowTiles rows_;
  const TileProduct product_;
  const int64_t row_, depth_, chunk_;  // of a row of dgates; what is multiplied with R in each step; steps
  const Buffer weights_, candidate_weights_, even_, odd_, packed_candidate_;
  const Buffer dh_, dc_;               // gradients of the states, without what comes from the next step's gates
  const Buffer dgates_, states_, inputs_;
  int64_t low_ = 0;                    // the first time of the chunk
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
