// Gradients of a recurrent layer's weights: sums over all steps of products of the gates' gradients with what
// the weights were multiplied with.
#pragma once

#include "recurrent_tiles.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Gradients of gates of the steps of a chunk, as panels [step, sequence][kColumns] for each slot (a gate) and
// block of units: the right side of products, as it is.
class GatePanels {
 public:
  GatePanels(int64_t slots, int64_t hidden, int64_t rows)
      : blocks_(blocks_of(hidden)), rows_(rows), panels_(slots * blocks_ * kColumns * rows) {}
  float* at(int64_t slot, int64_t block, int64_t row) const {
    return panels_.data() + ((slot * blocks_ + block) * rows_ + row) * kColumns;
  }
  int64_t blocks() const { return blocks_; }

 private:
  const int64_t blocks_, rows_;
  const Buffer panels_;
};

// The gradient of the weights that some slots are computed with: leftᵀ · gates, summed up chunk by chunk. Left is
// the layer's input or state, with a 1 behind it where the gradient of a bias is wanted as well.
class WeightSums {
 public:
  WeightSums(int64_t first_slot, int64_t slots, int64_t width, bool with_one, int64_t blocks, int64_t rows)
      : first_slot_(first_slot),
        slots_(slots),
        width_(width),
        with_one_(with_one),
        blocks_(blocks),
        rows_(rows),
        tiles_(std::max<int64_t>(1, ceil_divide(width + with_one, kRows))),
        height_(std::max<int64_t>(1, ceil_divide(width + with_one, tiles_))),
        left_(tiles_ * height_ * rows),
        sums_(slots * blocks * tiles_ * height_ * kColumns),
        product_(tile_product_of(height_, std::make_integer_sequence<int, kRows>())) {}

  // Takes one row of left; one that is null counts as zeros.
  void put(int64_t row, const float* from) const {
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      float* to = left_.data() + (tile * rows_ + row) * height_;
      const int64_t first = tile * height_;
      if (from == nullptr)
        std::fill_n(to, height_, 0.0f);
      else
        copy_floats(from + first, std::min(height_, width_ - first), to);
    }
    if (with_one_) left_.data()[(width_ / height_ * rows_ + row) * height_ + width_ % height_] = 1;
  }

  // Adds the products of the first rows.
  void add(const GatePanels& gates, int64_t rows, const Parallel& parallel) const {
    constexpr int64_t kDepth = 512;  // a panel of this depth stays in the second cache
    parallel(slots_ * blocks_, [&](int64_t task) {
      const float* right = gates.at(first_slot_ + task / blocks_, task % blocks_, 0);
      TileValues values;
      for (int64_t k = 0; k < rows; k += kDepth)
        for (int64_t tile = 0; tile < tiles_; ++tile) {
          const float* left = left_.data() + (tile * rows_ + k) * height_;
          product_(std::min(kDepth, rows - k), left, right + k * kColumns, values);
          float* sum = sums_.data() + (task * tiles_ + tile) * height_ * kColumns;
          for (int64_t i = 0; i < height_ * kColumns; ++i) sum[i] += values.data[i];
        }
    });
  }

  // Writes the gradient of a gate's weights, of shape (hidden, width).
  void write(int64_t slot, int64_t hidden, float* to, const Parallel& parallel) const {
    parallel(blocks_, [&](int64_t block) {
      for (int64_t unit = block * kColumns; unit < std::min(hidden, (block + 1) * kColumns); ++unit)
        for (int64_t i = 0; i < width_; ++i) to[unit * width_ + i] = sum(slot, i, unit);
    });
  }

  // Writes the gradient of a gate's bias.
  void write_bias(int64_t slot, int64_t hidden, float* to) const {
    for (int64_t unit = 0; unit < hidden; ++unit) to[unit] = sum(slot, width_, unit);
  }

 private:
  float sum(int64_t slot, int64_t i, int64_t unit) const {
    const int64_t panel = (slot - first_slot_) * blocks_ + unit / kColumns;
    return sums_.data()[(panel * tiles_ * height_ + i) * kColumns + unit % kColumns];
  }

  const int64_t first_slot_, slots_, width_;
  const bool with_one_;
  const int64_t blocks_, rows_, tiles_, height_;
  const Buffer left_, sums_;
  const TileProduct product_;
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
