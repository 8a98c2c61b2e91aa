// The backward pass of recurrent layers. Step by step, from the last to the first, the gradients of the gates
// follow from those of the states, and by products with R and W those of the state before and of the input.
// The gradients of weights are summed up for many steps at once.
//
// A step's gradients of gates lie in slots: i o f g (LSTM), z r n (GRU), n z r q (gru_linear), the sum (RNN). With
// gru_linear, n z r are on the input's side, and z r q on the state's.
#pragma once

#include <optional>

#include "recurrent_weights.h"
#include "scratch.h"

namespace onnxtrain::ONNXTRAIN_ISA {

class BackwardPass {
 public:
  BackwardPass(const RecurrentLayer& layer, int64_t direction, const RecurrentGradients& io, const Parallel& parallel)
      : at_{layer, direction},
        io_(io),
        parallel_(parallel),
        cell_(layer.cell),
        rows_(layer.batch),
        product_(rows_.product()),
        slots_(cell_ == Cell::gru_linear ? 4 : at_.gates()),
        chunk_(std::min(layer.steps, steps_of_chunk(layer.batch))),
        even_(rows_.packed_size(slots_ * layer.hidden)),
        odd_(rows_.packed_size(slots_ * layer.hidden)),
        dh_(layer.batch * layer.hidden),
        dc_(cell_ == Cell::lstm ? layer.batch * layer.hidden : 0),
        dgates_(slots_, layer.hidden, chunk_ * layer.batch) {
    pack_weights();
    prepare_sums();
    take_finals(io.dy_h, dh_);
    if (cell_ == Cell::lstm) take_finals(io.dy_c, dc_);
  }

  void run() {
    for (int64_t last = at_.layer.steps; last > 0; last -= chunk_) run_chunk(std::max<int64_t>(0, last - chunk_), last);
    write_initial();
    write_weights();
  }

 private:
  // Steps whose gates are multiplied with inputs and states at once.
  static int64_t steps_of_chunk(int64_t batch) { return std::max<int64_t>(1, 512 / std::max<int64_t>(batch, 1)); }

  void pack_weights() {
    const int64_t hidden = at_.hidden(), inputs = at_.layer.inputs, square = hidden * hidden;
    const int64_t depth = (cell_ == Cell::gru ? 2 : at_.gates()) * hidden;
    state_weights_ = RightPanels(depth, hidden);
    state_weights_.pack(0, at_.r(), depth, hidden, false, parallel_);
    if (cell_ == Cell::gru) {
      candidate_weights_ = RightPanels(hidden, hidden);
      candidate_weights_.pack(0, at_.r() + 2 * square, hidden, hidden, false, parallel_);
    }
    if (io_.dx == nullptr) return;
    const bool moved = cell_ == Cell::gru_linear;  // the candidate comes first
    const int64_t above = moved ? hidden : 0, rest = at_.gates() * hidden - above;
    input_weights_ = RightPanels(at_.gates() * hidden, inputs);
    if (moved) input_weights_.pack(0, at_.w() + rest * inputs, hidden, inputs, false, parallel_);
    input_weights_.pack(above, at_.w(), rest, inputs, false, parallel_);
  }

  void prepare_sums() {
    const int64_t hidden = at_.hidden(), inputs = at_.layer.inputs, rows = chunk_ * rows_.batch;
    const bool linear = cell_ == Cell::gru_linear, bias = io_.dbias != nullptr;
    if (io_.dw != nullptr || bias) input_sums_.emplace(0, at_.gates(), inputs, bias, at_.blocks(), rows);
    if (io_.dr != nullptr || (bias && linear))
      state_sums_.emplace(linear ? 1 : 0, cell_ == Cell::gru ? 2 : at_.gates(), hidden, bias && linear, at_.blocks(),
                          rows);
    if (io_.dr != nullptr && cell_ == Cell::gru) kept_sums_.emplace(2, 1, hidden, false, at_.blocks(), rows);
  }

  // The gradients of the states after the last step; an empty sequence has a constant there.
  void take_finals(const float* given, const Buffer& to) const {
    if (given == nullptr) return;
    for (int64_t b = 0; b < rows_.batch; ++b)
      if (at_.valid(0, b)) std::copy_n(given + at_.state_row(b), at_.hidden(), to.data() + b * at_.hidden());
  }

  void run_chunk(int64_t first, int64_t last) {
    first_ = first;
    const double work = double(rows_.batch) * double(slots_) * double(at_.hidden()) * double(at_.hidden());
    const int64_t more = io_.dx == nullptr ? 0 : blocks_of(at_.layer.inputs);
    run_steps(rows_, at_.blocks() + more, last - first, cell_ == Cell::gru ? 2 : 1, work, parallel_,
              [&](int64_t index, int stage, int64_t tile, int64_t block) {
                const int64_t position = last - 1 - index;
                if (block < at_.blocks())
                  step(position, stage, tile, block);
                else if (stage == 0 && position + 1 < at_.layer.steps)
                  write_dx(position + 1, tile, block - at_.blocks());
              });
    add_weights(first, last);
    if (io_.dpeepholes != nullptr) add_dpeepholes(first, last);
  }

  void step(int64_t position, int stage, int64_t tile, int64_t block) const {
    switch (cell_) {
      case Cell::lstm:
        return lstm(position, tile, block);
      case Cell::gru:
        return stage == 0 ? gru_candidate(position, tile, block) : gru_gates(position, tile, block);
      case Cell::gru_linear:
        return gru_linear(position, tile, block);
      default:
        return rnn(position, tile, block);
    }
  }

  // ---- steps -------------------------------------------------------------------------------------------------

  // The packed gradients of a step's gates.
  float* packed(int64_t position, int64_t tile, int64_t slot) const {
    const int64_t hidden = at_.hidden();
    return rows_.packed(position % 2 == 0 ? even_ : odd_, tile, slots_ * hidden) + slot * hidden * rows_.height;
  }

  // Fetches what a step will read into the cache, while products are computed.
  void prefetch(int64_t position, int64_t tile, int64_t block) const {
    const int64_t first = block * kColumns, last = std::min(first + kColumns, at_.hidden());
    const int64_t time = at_.time(position), before = at_.time(std::max<int64_t>(position - 1, 0));
    for (int64_t unit = first; unit < last; unit += kSavedUnits)
      for (int64_t b = rows_.first(tile); b < rows_.first(tile) + rows_.count(tile); ++b) {
        for (int64_t part = 0; part < saved_of(cell_); ++part)
          __builtin_prefetch(io_.saved + at_.saved_at(time, b, part, unit));
        if (cell_ != Cell::lstm) __builtin_prefetch(io_.y + at_.y_row(before, b) + unit);
        if (io_.dy != nullptr) __builtin_prefetch(io_.dy + at_.y_row(time, b) + unit);
      }
  }

  // What comes to the state after a step from the gates of the next one.
  void multiply_next(int64_t position, int64_t tile, int64_t block, TileValues& to) const {
    const int64_t depth = (cell_ == Cell::gru ? 2 : at_.gates()) * at_.hidden();
    if (position + 1 < at_.layer.steps)
      product_(depth, packed(position + 1, tile, cell_ == Cell::gru_linear ? 1 : 0), state_weights_.at(block, 0), to);
    else
      to = TileValues{};
  }

  // What a step knows about a sequence. A step beyond the length of a sequence has no gradients of gates.
  struct Row {
    int64_t i, b;  // in the tile, in the batch
    bool valid;
    const float* dy;  // may be null
    int64_t time;
    float *dh, *dc;
    int64_t place;  // in the chunk
  };

  // The row of a step and sequence in the chunk.
  int64_t row_of(int64_t position, int64_t b) const { return (position - first_) * rows_.batch + b; }

  template <class Use>
  void each(int64_t position, int64_t tile, int64_t block, const Use& use) const {
    const int64_t time = at_.time(position), hidden = at_.hidden();
    for (int64_t i = 0; i < rows_.count(tile); ++i) {
      const int64_t b = rows_.first(tile) + i;
      const bool valid = at_.valid(time, b);
      const Row row{i,
                    b,
                    valid,
                    io_.dy == nullptr || !valid ? nullptr : io_.dy + at_.y_row(time, b),
                    time,
                    dh_.data() + b * hidden,
                    cell_ == Cell::lstm ? dc_.data() + b * hidden : nullptr,
                    row_of(position, b)};
      each_vector(block, hidden, [&](const Place& place) { use(row, place); });
    }
  }

  // The vectors that the forward pass saved.
  SavedVectors saved(const Row& row, const Place& place) const {
    return {io_.saved + at_.saved_at(row.time, row.b, 0, place.unit)};
  }

  // The gradient of the state after a step.
  Vector arriving(const Row& row, const Place& place, const TileValues& next) const {
    return get(row.dh, place) + get(row.dy, place) + next.get(row.i, place);
  }

  void pack_slot(const TileValues& values, int64_t position, int64_t tile, int64_t block, int64_t slot) const {
    rows_.pack(values, tile, block, at_.hidden(), packed(position, tile, slot));
  }

  // Writes the gradient of a gate: to be packed for products of the next step, and for those of the chunk.
  void put_slot(const Row& row, const Place& place, int64_t slot, Vector value, TileValues& values) const {
    values.put(row.i, place, value);
    store(dgates_.at(slot, place.unit / kColumns, row.place) + place.lane, value);
  }

  void lstm(int64_t position, int64_t tile, int64_t block) const {
    TileValues next, values[4];
    prefetch(position, tile, block);
    multiply_next(position, tile, block, next);
    const float *p_i = at_.peepholes(0), *p_o = at_.peepholes(1), *p_f = at_.peepholes(2);
    each(position, tile, block, [&](const Row& row, const Place& place) {
      const Vector dh = arriving(row, place, next);
      if (!row.valid) {
        for (int g = 0; g < 4; ++g) put_slot(row, place, g, Vector{}, values[g]);
        return put(row.dh, place, dh);
      }
      const SavedVectors of = saved(row, place);
      const Vector in = of[0], shown = of[1], forget = of[2], candidate = of[3], c_before = of[4];
      const Vector bent = vtanh(forget * c_before + in * candidate);
      const Vector d_shown = dh * bent * (shown - shown * shown);
      const Vector dc = get(row.dc, place) + dh * shown * (1.0f - bent * bent) + get(p_o, place) * d_shown;
      const Vector d_in = dc * candidate * (in - in * in);
      const Vector d_forget = dc * c_before * (forget - forget * forget);
      put_slot(row, place, 0, d_in, values[0]);
      put_slot(row, place, 1, d_shown, values[1]);
      put_slot(row, place, 2, d_forget, values[2]);
      put_slot(row, place, 3, dc * in * (1.0f - candidate * candidate), values[3]);
      put(row.dc, place, dc * forget + get(p_i, place) * d_in + get(p_f, place) * d_forget);
      put(row.dh, place, Vector{});
    });
    for (int64_t g = 0; g < 4; ++g) pack_slot(values[g], position, tile, block, g);
  }

  void gru_linear(int64_t position, int64_t tile, int64_t block) const {
    TileValues next, values[4];
    prefetch(position, tile, block);
    multiply_next(position, tile, block, next);
    each(position, tile, block, [&](const Row& row, const Place& place) {
      const Vector dh = arriving(row, place, next);
      if (!row.valid) {
        for (int slot = 0; slot < 4; ++slot) put_slot(row, place, slot, Vector{}, values[slot]);
        return put(row.dh, place, dh);
      }
      const SavedVectors of = saved(row, place);
      const Vector update = of[0], reset = of[1], candidate = of[2], product = of[3];
      const Vector h_before = get(at_.h_before(io_.y, position, row.b), place);
      const Vector d_candidate = dh * (1.0f - update) * (1.0f - candidate * candidate);
      put_slot(row, place, 0, d_candidate, values[0]);
      put_slot(row, place, 1, dh * (h_before - candidate) * (update - update * update), values[1]);
      put_slot(row, place, 2, d_candidate * product * (reset - reset * reset), values[2]);
      put_slot(row, place, 3, d_candidate * reset, values[3]);
      put(row.dh, place, dh * update);
    });
    for (int64_t slot = 0; slot < 4; ++slot) pack_slot(values[slot], position, tile, block, slot);
  }

  void gru_candidate(int64_t position, int64_t tile, int64_t block) const {
    TileValues next, value;
    prefetch(position, tile, block);
    multiply_next(position, tile, block, next);
    each(position, tile, block, [&](const Row& row, const Place& place) {
      const Vector dh = arriving(row, place, next);
      put(row.dh, place, dh);
      if (!row.valid) return put_slot(row, place, 2, Vector{}, value);
      const SavedVectors of = saved(row, place);
      const Vector update = of[0], candidate = of[2];
      put_slot(row, place, 2, dh * (1.0f - update) * (1.0f - candidate * candidate), value);
    });
    pack_slot(value, position, tile, block, 2);
  }

  void gru_gates(int64_t position, int64_t tile, int64_t block) const {
    TileValues d_kept, values[2];
    const int64_t hidden = at_.hidden();
    product_(hidden, packed(position, tile, 2), candidate_weights_.at(block, 0), d_kept);
    each(position, tile, block, [&](const Row& row, const Place& place) {
      if (!row.valid) {
        for (int g = 0; g < 2; ++g) put_slot(row, place, g, Vector{}, values[g]);
        return;
      }
      const Vector dh = get(row.dh, place), kept = d_kept.get(row.i, place);
      const SavedVectors of = saved(row, place);
      const Vector update = of[0], reset = of[1], candidate = of[2];
      const Vector h_before = get(at_.h_before(io_.y, position, row.b), place);
      put_slot(row, place, 0, dh * (h_before - candidate) * (update - update * update), values[0]);
      put_slot(row, place, 1, kept * h_before * (reset - reset * reset), values[1]);
      put(row.dh, place, dh * update + kept * reset);
    });
    for (int64_t g = 0; g < 2; ++g) pack_slot(values[g], position, tile, block, g);
  }

  void rnn(int64_t position, int64_t tile, int64_t block) const {
    TileValues next, value;
    multiply_next(position, tile, block, next);
    each(position, tile, block, [&](const Row& row, const Place& place) {
      const Vector dh = arriving(row, place, next);
      if (!row.valid) {
        put_slot(row, place, 0, Vector{}, value);
        return put(row.dh, place, dh);
      }
      const Vector h = get(io_.y + at_.y_row(at_.time(position), row.b), place);
      const Vector slope = cell_ == Cell::rnn_tanh ? 1.0f - h * h : h > 0.0f ? broadcast(1.0f) : Vector{};
      put_slot(row, place, 0, dh * slope, value);
      put(row.dh, place, Vector{});
    });
    pack_slot(value, position, tile, block, 0);
  }

  // The gradient of the input of a step, whose gates are done.
  void write_dx(int64_t position, int64_t tile, int64_t block) const {
    const int64_t inputs = at_.layer.inputs, time = at_.time(position);
    TileValues values;
    product_(at_.gates() * at_.hidden(), packed(position, tile, 0), input_weights_.at(block, 0), values);
    for (int64_t i = 0; i < rows_.count(tile); ++i) {
      float* row = io_.dx + (time * rows_.batch + rows_.first(tile) + i) * inputs;
      each_vector(block, inputs, [&](const Place& place) {
        const Vector value = values.get(i, place);
        put(row, place, at_.index > 0 ? get(row, place) + value : value);
      });
    }
  }

  // What comes from the gates of the first step: the gradients of its input and of the initial states.
  void write_initial() const {
    if (io_.d_initial_c != nullptr)
      std::copy_n(dc_.data(), rows_.batch * at_.hidden(), io_.d_initial_c + at_.state_row(0));
    parallel_(rows_.tiles, [&](int64_t tile) {
      const int64_t input_blocks = io_.dx == nullptr ? 0 : blocks_of(at_.layer.inputs);
      for (int64_t block = 0; block < input_blocks; ++block) write_dx(0, tile, block);
      for (int64_t block = 0; io_.d_initial_h != nullptr && block < at_.blocks(); ++block) write_dh(tile, block);
    });
  }

  void write_dh(int64_t tile, int64_t block) const {
    TileValues next;
    multiply_next(-1, tile, block, next);
    for (int64_t i = 0; i < rows_.count(tile); ++i) {
      const int64_t b = rows_.first(tile) + i;
      each_vector(block, at_.hidden(), [&](const Place& place) {
        put(io_.d_initial_h + at_.state_row(b), place, get(dh_.data() + b * at_.hidden(), place) + next.get(i, place));
      });
    }
  }

  // ---- all steps of a chunk ----------------------------------------------------------------------------------

  void add_weights(int64_t first, int64_t last) const {
    if (!input_sums_ && !state_sums_) return;
    parallel_(last - first, [&](int64_t index) {
      for (int64_t b = 0; b < rows_.batch; ++b) take_row(first + index, b);
    });
    const int64_t rows = (last - first) * rows_.batch;
    for (const auto* sums : {&input_sums_, &state_sums_, &kept_sums_})
      if (*sums) (*sums)->add(dgates_, rows, parallel_);
  }

  // What a step's gates were computed from. Beyond its length a sequence may hold anything, even NaN, which the
  // gates' gradient of zero would not cancel.
  void take_row(int64_t position, int64_t b) const {
    const RecurrentLayer& layer = at_.layer;
    const int64_t time = at_.time(position), row = row_of(position, b);
    const bool valid = at_.valid(time, b);
    const float* h = valid ? at_.h_before(io_.y, position, b) : nullptr;
    const float* x = valid ? layer.x + (time * layer.batch + b) * layer.inputs : nullptr;
    if (input_sums_) input_sums_->put(row, x);
    if (state_sums_) state_sums_->put(row, h);
    if (!kept_sums_) return;
    if (h == nullptr) return kept_sums_->put(row, nullptr);
    const Floats kept(layer.hidden);
    for (int64_t unit = 0; unit < layer.hidden; ++unit)
      kept.get()[unit] = h[unit] * io_.saved[at_.saved_at(time, b, 1, unit)];
    kept_sums_->put(row, kept.get());
  }

  void write_weights() const {
    const int64_t hidden = at_.hidden();
    const bool linear = cell_ == Cell::gru_linear;
    for (int64_t gate = 0; gate < at_.gates(); ++gate) {
      const int64_t input_slot = linear ? (gate + 1) % 3 : gate, state_slot = linear ? gate + 1 : gate;
      const int64_t matrix = at_.index * at_.gates() + gate;
      if (io_.dw != nullptr)
        input_sums_->write(input_slot, hidden, io_.dw + matrix * hidden * at_.layer.inputs, parallel_);
      if (io_.dr != nullptr) {
        const WeightSums& sums = cell_ == Cell::gru && gate == 2 ? *kept_sums_ : *state_sums_;
        sums.write(state_slot, hidden, io_.dr + matrix * hidden * hidden, parallel_);
      }
      if (io_.dbias == nullptr) continue;
      float* bias = io_.dbias + at_.index * 2 * at_.gates() * hidden + gate * hidden;
      input_sums_->write_bias(input_slot, hidden, bias);
      if (linear)
        state_sums_->write_bias(state_slot, hidden, bias + 3 * hidden);
      else
        std::copy_n(bias, hidden, bias + at_.gates() * hidden);
    }
  }

  void add_dpeepholes(int64_t first, int64_t last) const {
    const int64_t hidden = at_.hidden();
    const bool add = last != at_.layer.steps;
    float* to = io_.dpeepholes + at_.index * 3 * hidden;
    parallel_(at_.blocks(), [&](int64_t block) {
      each_vector(block, hidden, [&](const Place& place) {
        Vector sums[3];
        for (int g = 0; g < 3; ++g) sums[g] = add ? get(to + g * hidden, place) : Vector{};
        for (int64_t position = first; position < last; ++position)
          for (int64_t b = 0; b < rows_.batch; ++b) {
            const int64_t time = at_.time(position), row = row_of(position, b);
            if (!at_.valid(time, b)) continue;
            const SavedVectors of{io_.saved + at_.saved_at(time, b, 0, place.unit)};
            const Vector before = of[4], after = of[2] * before + of[0] * of[3];
            sums[0] += load(dgates_.at(0, block, row) + place.lane) * before;
            sums[1] += load(dgates_.at(1, block, row) + place.lane) * after;
            sums[2] += load(dgates_.at(2, block, row) + place.lane) * before;
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
  const int64_t slots_, chunk_;  // of a step's gradients of gates; steps
  RightPanels state_weights_, candidate_weights_, input_weights_;
  const Buffer even_, odd_;  // packed gradients of gates, of two steps
  const Buffer dh_, dc_;     // gradients of the states, without what comes from the next step's gates
  const GatePanels dgates_;
  std::optional<WeightSums> input_sums_, state_sums_, kept_sums_;
  int64_t first_ = 0;  // the first position of the chunk
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
