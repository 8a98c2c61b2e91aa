// Tiles of the gradient of an input. Its elements are taken apart by their place modulo the stride:
// all of one phase are reached by the same taps, each of which reads dy with an offset.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "depthwise_tiles.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// The taps of one axis by the phase of dx that they reach, and where each reads dy.
struct Reach {
  struct Tap {
    int64_t tap, offset;
  };
  std::vector<std::vector<Tap>> phases;
  int64_t least = 0, most = 0;  // of all offsets

  Reach(const Convolution& conv, int axis) : phases(static_cast<size_t>(std::min(conv.stride[axis], conv.in[axis]))) {
    bool first = true;
    for (size_t phase = 0; phase < phases.size(); ++phase)
      for (int64_t tap = 0; tap < conv.kernel[axis]; ++tap) {
        const int64_t distance = static_cast<int64_t>(phase) + conv.pad[axis] - tap * conv.dilation[axis];
        if (distance % conv.stride[axis] != 0) continue;
        const int64_t offset = distance / conv.stride[axis];
        phases[phase].push_back({tap, offset});
        least = first ? offset : std::min(least, offset);
        most = first ? offset : std::max(most, offset);
        first = false;
      }
  }
  int64_t count() const { return static_cast<int64_t>(phases.size()); }
};

inline Cut cut_of_input(const Convolution& conv, const Reach& down, const Reach& across) {
  return Cut(pieces(conv.in[kY], conv.stride[kY]), pieces(conv.in[kX], conv.stride[kX]), down.count() * across.count(),
             across.most - across.least, down.most - down.least);
}

// The taps that reach one phase of dx.
struct PhaseOfInput {
  std::vector<int64_t> places, taps;
  std::vector<float> weights;
};

// One tile of dx, made ready for any plane: its grid is that of one phase.
struct InputTile {
  int64_t row, column;  // the first of dx
  Tile tile;
  std::vector<PhaseOfInput> phases;
  Memory copy_memory, result_memory;
  float *copy, *results;

  InputTile(const Convolution& conv, const Reach& down, const Reach& across, const Cut& cut, int64_t index)
      : row(cut.first_row(index) * conv.stride[kY]),
        column(cut.first_column(index) * conv.stride[kX]),
        tile(TileAxis(cut.rows_of(index), 1, cut.first_row(index) + down.least, conv.out[kY], down.most - down.least),
             TileAxis(cut.columns_of(index), 1, cut.first_column(index) + across.least, conv.out[kX],
                      across.most - across.least)),
        copy(copy_memory.zeroed(tile.floats())) {
    for (const auto& rows : down.phases)
      for (const auto& columns : across.phases) {
        PhaseOfInput made;
        for (const Reach::Tap& y : rows)
          for (const Reach::Tap& x : columns) {
            made.places.push_back(tile.place(y.offset - down.least, x.offset - across.least));
            made.taps.push_back(y.tap * conv.kernel[kX] + x.tap);
          }
        made.weights.resize(made.taps.size());
        phases.push_back(std::move(made));
      }
    results = result_memory.zeroed(static_cast<int64_t>(phases.size()) * tile.result_floats());
  }

  float* result(int64_t phase) const { return results + phase * tile.result_floats(); }

  // Adds what the copy gives through the weights of one plane of taps.
  void add(const float* weights, bool fresh) {
    for (size_t index = 0; index < phases.size(); ++index) {
      PhaseOfInput& phase = phases[index];
      for (size_t tap = 0; tap < phase.taps.size(); ++tap) phase.weights[tap] = weights[phase.taps[tap]];
      correlate(copy, phase.places.data(), phase.weights.data(), static_cast<int64_t>(phase.taps.size()),
                result(static_cast<int64_t>(index)), tile.result_length(), fresh);
    }
  }

  // Writes the phases into each other.
  void write(const Convolution& conv, int64_t phases_across, float* dx) const {
    const int64_t width = conv.in[kX], step = conv.stride[kX],
                  phases_down = static_cast<int64_t>(phases.size()) / phases_across;
    const int64_t count = std::min(tile.columns.grid * step, width - column);
    for (int64_t y = 0; y < phases_down; ++y) {
      const int64_t first = row + y, rows = std::min(tile.rows.grid, pieces(conv.in[kY] - first, conv.stride[kY]));
      float* to = dx + first * width + column;
      const int64_t to_step = width * conv.stride[kY];
      if (step == 1) {
        copy_rows(to, to_step, result(y), tile.pitch, rows, count);
      } else if (step == 2 && phases_across == 2) {
        join_rows(to, to_step, result(2 * y), result(2 * y + 1), tile.pitch, rows, count);
      } else {
        for (int64_t x = 0; x < phases_across; ++x)
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; x + j * step < count; ++j)
              to[i * to_step + x + j * step] = result(y * phases_across + x)[i * tile.pitch + j];
      }
    }
  }
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
