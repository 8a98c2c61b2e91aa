// Convolutions on a copy of the image with channels last: what a tap of a position reads is a line of
// channels, so that panels of patches are packed by whole vectors. For strides and dilations of any
// kind, where there are channels enough to fill vectors.
#pragma once

#include "product.h"

namespace onnxtrain::ONNXTRAIN_ISA::channels_last {

// Images as [image][pixel][channels], channels rounded up to whole vectors.
struct Pixels {
  const float* data;
  int64_t channels;
  int64_t size[kMostAxes];

  // Where a pixel begins, or null outside of the image.
  const float* at(int64_t image, int64_t z, int64_t y, int64_t x) const {
    if (z < 0 || z >= size[0] || y < 0 || y >= size[1] || x < 0 || x >= size[2]) return nullptr;
    return data + (((image * size[0] + z) * size[1] + y) * size[2] + x) * channels;
  }
};

// Writes images with their channels last.
inline void write_pixels(const float* planes, int64_t batch_stride, int64_t batch, int64_t channels, int64_t pixels, float* to,
                         const Parallel& parallel) {
  const int64_t padded = rounded_up(channels, kLanes);
  const EvenCut cut(pixels, std::max<int64_t>(kLanes, 65536 / padded));
  parallel(batch * cut.pieces, [&](int64_t task) {
    const int64_t image = task / cut.pieces, first = cut.begin(task % cut.pieces), count = cut.length(task % cut.pieces);
    for (int64_t c = 0; c < channels; c += kLanes)
      transpose_lines(planes + image * batch_stride + c * pixels + first, pixels, std::min<int64_t>(kLanes, channels - c), count,
                      to + (image * pixels + first) * padded + c, padded);
  });
}

// The reverse for a line of pixels, `from` with `step` floats each: adds a bias to at most kLanes channels.
inline void write_planes(const float* from, int64_t step, int64_t count, int64_t channels, Vector bias, float* to, int64_t plane) {
  Vector square[kLanes];
  for (int64_t x = 0; x < count; x += kLanes) {
    const int64_t left = std::min<int64_t>(count - x, kLanes);
    if (left == kLanes && channels == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = load(from + (x + i) * step) + bias;
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + i * plane + x, square[i]);
    } else {
      for (int i = 0; i < kLanes; ++i) square[i] = i < left ? load(from + (x + i) * step) + bias : Vector{};
      transpose(square);
      for (int i = 0; i < channels; ++i) store_first(to + i * plane + x, square[i], left);
    }
  }
}

// A tap: where it reads beside its position, and its number among the weights.
struct Tap {
  int64_t offset[kMostAxes], number;
};

// What the positions of a grid read, as rows of the left side: depth runs over taps, then channels.
struct PatchPixels {
  const Pixels& pixels;
  const Grid& grid;
  const int64_t* step;
  const std::vector<Tap>& taps;

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    int64_t image[kRows], z[kRows], y[kRows], x[kRows];
    grid.pieces(first, count, [&](const Grid::Piece& piece) {
      for (int64_t i = 0; i < piece.length; ++i) {
        const int64_t row = piece.begin + i;
        image[row] = piece.image, z[row] = piece.z * step[0], y[row] = piece.y * step[1], x[row] = (piece.x + i) * step[2];
      }
    });
    const float* lines[kRows];
    const int64_t channels = pixels.channels;
    for (int64_t done = 0; done < depth;) {
      const Tap& tap = taps[static_cast<size_t>((k + done) / channels)];
      for (int64_t i = 0; i < count; ++i) lines[i] = pixels.at(image[i], z[i] + tap.offset[0], y[i] + tap.offset[1], x[i] + tap.offset[2]);
      const int64_t begin = (k + done) % channels, length = std::min(channels - begin, depth - done);
      for (int64_t c = begin; c < begin + length; c += kLanes, panel += count * kLanes)
        for (int64_t i = 0; i < count; ++i) store(panel + i * kLanes, lines[i] == nullptr ? Vector{} : load(lines[i] + c));
      done += length;
    }
  }
};

// Weights as columns of the right side, in the same order of the depth; `matrix` is [tap][in][out].
struct WeightColumns {
  const float* matrix;
  int64_t in, out;  // rounded up
  const std::vector<Tap>& taps;

  void operator()(float* panel, int64_t first, int64_t, int64_t width, int64_t k, int64_t depth) const {
    for (int64_t x = 0; x < depth; ++x, panel += width) {
      const float* from = matrix + (taps[static_cast<size_t>((k + x) / in)].number * in + (k + x) % in) * out + first;
      for (int64_t j = 0; j < width; j += kLanes) store(panel + j, load(from + j));
    }
  }
};

// What the positions of a grid read, as columns of the right side: depth runs over positions, columns
// over taps and channels.
struct PatchColumnsByPosition {
  const Pixels& pixels;
  const Grid& grid;
  const int64_t* step;
  const std::vector<Tap>& taps;

  void operator()(float* panel, int64_t first, int64_t count, int64_t width, int64_t k, int64_t depth) const {
    for (int64_t j = 0; j < count; j += kLanes) {
      const Tap& tap = taps[static_cast<size_t>((first + j) / pixels.channels)];
      const int64_t channel = (first + j) % pixels.channels;
      grid.pieces(k, depth, [&](const Grid::Piece& piece) {
        const int64_t z = piece.z * step[0] + tap.offset[0], y = piece.y * step[1] + tap.offset[1];
        float* to = panel + piece.begin * width + j;
        const float* line = pixels.at(piece.image, z, y, 0);
        int64_t x = piece.x * step[2] + tap.offset[2];
        for (int64_t i = 0; i < piece.length; ++i, x += step[2], to += width)
          store(to, line == nullptr || x < 0 || x >= pixels.size[2] ? Vector{} : load(line + x * pixels.channels + channel));
      });
    }
  }
};

// Rows of results that lie anywhere: `places` has the offset of each.
struct RowStore {
  float* data;
  const std::vector<int64_t>& places;
  int64_t row, column;  // the first

  float* run(int64_t, int64_t, int64_t) const { return nullptr; }
  int64_t stride() const { return 0; }
  void put(const float* tile, int64_t i, int64_t rows, int64_t j, int64_t columns, bool fresh) const {
    for (int64_t r = 0; r < rows; ++r)
      put_row(tile + r * kColumns, columns, data + places[static_cast<size_t>(i - row + r)] + j - column, fresh);
  }
};

// Outputs of a row that lie `step` apart from `first` on and meet the same taps.
struct Phase {
  int64_t first, step, count;
  std::vector<Tap> taps;
};

// Rows of an output image: each position is computed from the pixels that its taps meet.
struct Rows {
  const Pixels& pixels;
  int64_t batch, out_channels;
  const float* matrix;  // weights as [tap][in][out], in and out rounded up
  const float* bias;    // may be missing
  float* y;
  int64_t batch_stride;
  int64_t size[kMostAxes];           // of the output image
  int64_t first[2], step[2], rows[2];  // along the first two axes
  int64_t in_step[kMostAxes];
  std::vector<Phase> phases;

  int64_t all_rows() const { return batch * rows[0] * rows[1]; }

  void run(const Parallel& parallel) const {
    double work = 0;
    for (const Phase& phase : phases)
      work += double(phase.count) * double(phase.taps.size()) * double(all_rows()) * double(pixels.channels) * double(out_channels);
    constexpr int64_t kTasks = 16, kLeastWork = int64_t{1} << 21;
    const int64_t tasks = std::max<int64_t>(1, std::min<int64_t>(kTasks, int64_t(work / kLeastWork)));
    // Tasks as square as they can be: each packs its own rows and columns.
    int64_t across = 1;
    const int64_t positions = all_rows() * size[2];
    while (2 * across <= tasks && positions * across < out_channels * tasks && out_channels >= 4 * kColumns * across) across *= 2;
    const EvenCut down(all_rows(), pieces_of(all_rows(), pieces_of(tasks, across)));
    const int64_t wide = rounded_up(pieces_of(out_channels, across), kColumns);
    const int64_t columns = pieces_of(out_channels, wide);
    parallel(down.pieces * columns, [&](int64_t task) {
      const int64_t piece = task / columns, column = task % columns * wide;
      block(down.begin(piece), down.length(piece), column, std::min(wide, out_channels - column));
    });
  }

 private:
  void block(int64_t row, int64_t count, int64_t column, int64_t columns) const {
    const int64_t padded = rounded_up(columns, kLanes);
    const Floats sums(count * size[2] * padded);
    for (const Phase& phase : phases) {
      std::vector<int64_t> places;
      for (int64_t r = 0; r < count; ++r)
        for (int64_t x = 0; x < phase.count; ++x) places.push_back((r * size[2] + phase.first + x * phase.step) * padded);
      const Grid grid{{rows[0], rows[1], phase.count}};
      const int64_t begin = row * phase.count, depth = static_cast<int64_t>(phase.taps.size()) * pixels.channels;
      if (depth == 0) {
        for (const int64_t place : places) std::fill_n(sums.get() + place, padded, 0.0f);
        continue;
      }
      multiply_block(PatchPixels{pixels, grid, in_step, phase.taps},
                     WeightColumns{matrix, pixels.channels, rounded_up(out_channels, kLanes), phase.taps},
                     RowStore{sums.get(), places, begin, column},
                     {begin, begin + count * phase.count, column, column + padded, 0, depth}, false);
    }
    for (int64_t c = 0; c < columns; c += kLanes) write(row, count, column + c, std::min<int64_t>(kLanes, columns - c), sums.get() + c, padded);
  }

  void write(int64_t row, int64_t count, int64_t channel, int64_t channels, const float* sums, int64_t step_between) const {
    const Vector added = bias != nullptr ? load_first(bias + channel, channels) : Vector{};
    const int64_t plane = size[0] * size[1] * size[2];
    const bool dense = step[0] == 1 && step[1] == 1;
    for (int64_t r = 0; r < count;) {
      const int64_t at = row + r, image = at / (rows[0] * rows[1]), in_image = at % (rows[0] * rows[1]);
      const int64_t together = dense ? std::min(count - r, rows[0] * rows[1] - in_image) : 1;
      const int64_t z = first[0] + in_image / rows[1] * step[0], line = first[1] + in_image % rows[1] * step[1];
      write_planes(sums + r * size[2] * step_between, step_between, together * size[2], channels, added,
                   y + image * batch_stride + channel * plane + (z * size[1] + line) * size[2], plane);
      r += together;
    }
  }
};

// Writes weights w[row · row_step + column · column_step + tap] as [tap][row][column], both rounded up.
inline void write_matrix(const float* w, int64_t taps, int64_t rows, int64_t row_step, int64_t columns, int64_t column_step, float* to,
                         const Parallel& parallel) {
  const int64_t high = rounded_up(rows, kLanes), wide = rounded_up(columns, kLanes);
  parallel(wide / kLanes, [&](int64_t block) {
    const int64_t first = block * kLanes, count = std::min<int64_t>(kLanes, columns - first);
    const int64_t together = row_step == taps ? std::min<int64_t>(rows, 64) : 1;  // rows that lie side by side
    const Floats lines(together * taps * kLanes);
    for (int64_t r = 0; r < rows; r += together) {
      const int64_t held = std::min(together, rows - r);
      transpose_lines(w + first * column_step + r * row_step, column_step, count, held * taps, lines.get(), kLanes);
      for (int64_t i = 0; i < held; ++i)
        for (int64_t t = 0; t < taps; ++t) store(to + (t * high + r + i) * wide + first, load(lines.get() + (i * taps + t) * kLanes));
    }
    for (int64_t r = rows; r < high; ++r)
      for (int64_t t = 0; t < taps; ++t) store(to + (t * high + r) * wide + first, Vector{});
  });
}

// Turns [out][tap][in], `in` rounded up, into [out][in][tap].
inline void write_weights(const float* from, int64_t out, int64_t taps, int64_t in, float* dw, const Parallel& parallel) {
  const int64_t padded = rounded_up(in, kLanes);
  const EvenCut cut(out, std::max<int64_t>(1, 16384 / (padded * taps)));
  parallel(cut.pieces, [&](int64_t piece) {
    for (int64_t o = cut.begin(piece), end = o + cut.length(piece); o < end; ++o)
      for (int64_t c = 0; c < in; c += kLanes)
        for (int64_t t = 0; t < taps; t += kLanes) {
          Vector square[kLanes];
          const int64_t held = std::min<int64_t>(kLanes, taps - t), channels = std::min<int64_t>(kLanes, in - c);
          for (int64_t i = 0; i < kLanes; ++i) square[i] = i < held ? load(from + (o * taps + t + i) * padded + c) : Vector{};
          transpose(square);
          for (int64_t i = 0; i < channels; ++i) store_first(dw + (o * in + c + i) * taps + t, square[i], held);
        }
  });
}

}  // namespace onnxtrain::ONNXTRAIN_ISA::channels_last
