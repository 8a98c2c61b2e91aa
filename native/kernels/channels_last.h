// Convolutions on a copy of the image with channels last: what a tap of a position reads is a line of
// channels, so that panels of patches are packed by whole vectors. For strides and dilations of any
// kind, where there are channels enough to fill vectors.
#pragma once

#include "product.h"

namespace onnxtrain::ONNXTRAIN_ISA::channels_last {

// Images as planes of channels.
struct Planes {
  const float* data;
  int64_t batch, batch_stride, channels;
  int64_t size[kMostAxes];

  int64_t rows() const { return batch * size[0] * size[1]; }  // of all images
  int64_t plane() const { return size[0] * size[1] * size[2]; }
  int64_t padded() const { return rounded_up(channels, kLanes); }
};

// Some rows of such images as [row][column][channels], channels rounded up to whole vectors.
struct Pixels {
  const Planes& of;
  int64_t first_row;
  float* data;

  // Where a pixel begins, or null outside of the image.
  const float* at(int64_t image, int64_t z, int64_t y, int64_t x) const {
    if (z < 0 || z >= of.size[0] || y < 0 || y >= of.size[1] || x < 0 || x >= of.size[2]) return nullptr;
    return data + (((image * of.size[0] + z) * of.size[1] + y - first_row) * of.size[2] + x) * of.padded();
  }

  // Copies rows [row, row_end).
  void read(int64_t row, int64_t row_end) const {
    const int64_t in_image = of.size[0] * of.size[1], width = of.size[2];
    while (row < row_end) {
      const int64_t count = std::min(row_end - row, in_image - row % in_image) * width;
      const float* from = of.data + row / in_image * of.batch_stride + row % in_image * width;
      for (int64_t c = 0; c < of.channels; c += kLanes)
        transpose_lines(from + c * of.plane(), of.plane(), std::min<int64_t>(kLanes, of.channels - c), count,
                        data + (row - first_row) * width * of.padded() + c, of.padded());
      row += count / width;
    }
  }
};

// Copies all rows.
inline void read_all(const Pixels& pixels, const Parallel& parallel) {
  const EvenCut cut(pixels.of.rows(), std::max<int64_t>(1, 65536 / (pixels.of.size[2] * pixels.of.padded())));
  parallel(cut.pieces, [&](int64_t piece) { pixels.read(cut.begin(piece), cut.begin(piece) + cut.length(piece)); });
}

// The reverse for a line of pixels, `from` with `step` floats each: adds a bias to at most kLanes channels.
inline void write_planes(const float* from, int64_t step, int64_t count, int64_t channels, Vector bias, float* to,
                         int64_t plane) {
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

// A tap: where it reads beside its position, and its number among all taps.
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
    int64_t image[kMostRows], z[kMostRows], y[kMostRows], x[kMostRows];
    grid.pieces(first, count, [&](const Grid::Piece& piece) {
      for (int64_t i = 0; i < piece.length; ++i) {
        const int64_t row = piece.begin + i;
        image[row] = piece.image, z[row] = piece.z * step[0], y[row] = piece.y * step[1],
        x[row] = (piece.x + i) * step[2];
      }
    });
    const float* lines[kMostRows];
    const int64_t channels = pixels.of.padded();
    for (int64_t done = 0; done < depth;) {
      const Tap& tap = taps[static_cast<size_t>((k + done) / channels)];
      for (int64_t i = 0; i < count; ++i)
        lines[i] = pixels.at(image[i], z[i] + tap.offset[0], y[i] + tap.offset[1], x[i] + tap.offset[2]);
      const int64_t begin = (k + done) % channels, length = std::min(channels - begin, depth - done);
      for (int64_t c = begin; c < begin + length; c += kLanes, panel += count * kLanes)
        for (int64_t i = 0; i < count; ++i)
          store(panel + i * kLanes, lines[i] == nullptr ? Vector{} : load(lines[i] + c));
      done += length;
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
      const int64_t channels = pixels.of.padded(), channel = (first + j) % channels;
      const Tap& tap = taps[static_cast<size_t>((first + j) / channels)];
      grid.pieces(k, depth, [&](const Grid::Piece& piece) {
        const int64_t z = piece.z * step[0] + tap.offset[0], y = piece.y * step[1] + tap.offset[1];
        float* to = panel + piece.begin * width + j;
        const float* line = pixels.at(piece.image, z, y, 0);
        int64_t x = piece.x * step[2] + tap.offset[2];
        for (int64_t i = 0; i < piece.length; ++i, x += step[2], to += width)
          store(to,
                line == nullptr || x < 0 || x >= pixels.of.size[2] ? Vector{} : load(line + x * channels + channel));
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
  int64_t first_tap;  // among those of all phases
};

// Rows of an output image: each position is computed from the pixels that its taps meet.
struct Rows {
  const Planes& planes;
  int64_t out_channels;
  const float* weights;  // see `WeightPacker`
  const float* bias;     // may be missing
  float* y;
  int64_t batch_stride;
  int64_t size[kMostAxes];             // of the output image
  int64_t first[2], step[2], rows[2];  // along the first two axes
  int64_t in_step[kMostAxes];
  std::vector<Phase> phases;
  bool rounded;

  int64_t all_rows() const { return planes.batch * rows[0] * rows[1]; }

  void run(const Parallel& parallel) const {
    double work = 0;
    for (const Phase& phase : phases)
      work += double(phase.count) * double(phase.taps.size()) * double(all_rows()) * double(planes.channels) *
              double(out_channels);
    constexpr int64_t kTasks = 16, kLeastWork = int64_t{1} << 21, kMostPixels = int64_t{1} << 16;
    const int64_t tasks = std::max<int64_t>(1, std::min<int64_t>(kTasks, int64_t(work / kLeastWork)));
    // Tasks as square as they can be: each packs its own rows and reads its own columns.
    int64_t across = 1;
    const int64_t positions = all_rows() * size[2];
    while (2 * across <= tasks && positions * across < out_channels * tasks && out_channels >= 4 * kColumns * across)
      across *= 2;
    // The pixels of a task stay in the second cache.
    const int64_t most = std::max<int64_t>(1, kMostPixels / (planes.size[2] * in_step[1] * planes.padded()));
    const EvenCut down(all_rows(), std::min(most, pieces_of(all_rows(), pieces_of(tasks, across))));
    const int64_t wide = rounded_up(pieces_of(out_channels, across), kColumns);
    const int64_t columns = pieces_of(out_channels, wide);
    parallel(down.pieces * columns, [&](int64_t task) {
      const int64_t piece = task / columns, column = task % columns * wide;
      block(down.begin(piece), down.length(piece), column, std::min(wide, out_channels - column));
    });
  }

 private:
  // The rows of the input that rows of the output read: all between the first and the last.
  std::pair<int64_t, int64_t> read_by(int64_t row, int64_t count) const {
    int64_t least = planes.rows(), most = 0;
    for (const Phase& phase : phases)
      for (const Tap& tap : phase.taps)
        for (int64_t r = row; r < row + count; ++r) {
          const int64_t z = r / rows[1] % rows[0] * in_step[0] + tap.offset[0],
                        line = r % rows[1] * in_step[1] + tap.offset[1];
          if (z < 0 || z >= planes.size[0] || line < 0 || line >= planes.size[1]) continue;
          const int64_t found = (r / rows[1] / rows[0] * planes.size[0] + z) * planes.size[1] + line;
          least = std::min(least, found);
          most = std::max(most, found + 1);
        }
    return {std::min(least, most), most};
  }

  void block(int64_t row, int64_t count, int64_t column, int64_t columns) const {
    const int64_t padded = rounded_up(columns, kLanes), wide = rounded_up(out_channels, kLanes);
    const auto [from, to] = read_by(row, count);
    const Floats sums(count * size[2] * padded), copy((to - from) * planes.size[2] * planes.padded());
    const Pixels pixels{planes, from, copy.get()};
    pixels.read(from, to);
    for (const Phase& phase : phases) {
      std::vector<int64_t> places;
      for (int64_t r = 0; r < count; ++r)
        for (int64_t x = 0; x < phase.count; ++x)
          places.push_back((r * size[2] + phase.first + x * phase.step) * padded);
      const Grid grid{{rows[0], rows[1], phase.count}};
      const int64_t begin = row * phase.count, depth = static_cast<int64_t>(phase.taps.size()) * planes.padded();
      if (depth == 0) {
        for (const int64_t place : places) std::fill_n(sums.get() + place, padded, 0.0f);
        continue;
      }
      multiply_block(PatchPixels{pixels, grid, in_step, phase.taps},
                     PackedColumns{weights + phase.first_tap * planes.padded() * wide, wide, depth},
                     RowStore{sums.get(), places, begin, column},
                     {begin, begin + count * phase.count, column, column + padded, 0, depth}, false, rounded);
    }
    for (int64_t c = 0; c < columns; c += kLanes)
      write(row, count, column + c, std::min<int64_t>(kLanes, columns - c), sums.get() + c, padded);
  }

  void write(int64_t row, int64_t count, int64_t channel, int64_t channels, const float* sums,
             int64_t step_between) const {
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

// Packs weights w[in · in_step + out · out_step + tap] as columns of the right side, phase behind phase, depth
// in the order of `PatchPixels`.
struct WeightPacker {
  const float* w;
  int64_t taps, in, in_step, out, out_step;
  bool rounded;

  int64_t size_of_tap() const { return rounded_up(in, kLanes) * rounded_up(out, kLanes); }

  void pack(const std::vector<const Phase*>& phases, float* to, const Parallel& parallel) const {
    parallel(pieces_of(out, kLanes), [&](int64_t block) { pack_block(phases, block * kLanes, to); });
    if (!rounded) return;
    parallel(pieces_of(out, kColumns), [&](int64_t panel) {
      const int64_t first = panel * kColumns, width = std::min<int64_t>(kColumns, rounded_up(out, kLanes) - first);
      for (const Phase* phase : phases) {
        const int64_t depth = static_cast<int64_t>(phase->taps.size()) * rounded_up(in, kLanes);
        round_rows(to + phase->first_tap * size_of_tap() + first * depth, depth, width);
      }
    });
  }

 private:
  void pack_block(const std::vector<const Phase*>& phases, int64_t first, float* to) const {
    const int64_t count = std::min<int64_t>(kLanes, out - first), deep = rounded_up(in, kLanes);
    const int64_t together = in_step == taps ? std::min<int64_t>(in, 64) : 1;  // inputs that lie side by side
    const Floats lines(together * taps * kLanes);
    for (int64_t c = 0; c < deep; c += together) {
      const int64_t held = std::min(together, in - c);
      if (held > 0)
        transpose_lines(w + first * out_step + c * in_step, out_step, count, held * taps, lines.get(), kLanes);
      for (const Phase* phase : phases) put(*phase, first, c, std::min(together, deep - c), held, lines.get(), to);
    }
  }

  // Writes a vector of outputs for inputs [c, c + count), zeros from `held` of them on.
  void put(const Phase& phase, int64_t first, int64_t c, int64_t count, int64_t held, const float* lines,
           float* to) const {
    const int64_t deep = rounded_up(in, kLanes), wide = rounded_up(out, kLanes), panel = first / kColumns * kColumns;
    const int64_t width = std::min<int64_t>(kColumns, wide - panel),
                  depth = static_cast<int64_t>(phase.taps.size()) * deep;
    float* own = to + phase.first_tap * size_of_tap() + panel * depth + first - panel + c * width;
    for (const Tap& tap : phase.taps) {
      for (int64_t i = 0; i < count; ++i)
        store(own + i * width, i < held ? load(lines + (i * taps + tap.number) * kLanes) : Vector{});
      own += deep * width;
    }
  }
};

// Turns [out][tap][in], `in` rounded up, into [out][in][tap].
inline void write_weights(const float* from, int64_t out, int64_t taps, int64_t in, float* dw,
                          const Parallel& parallel) {
  const int64_t padded = rounded_up(in, kLanes);
  const EvenCut cut(out, std::max<int64_t>(1, 16384 / (padded * taps)));
  parallel(cut.pieces, [&](int64_t piece) {
    for (int64_t o = cut.begin(piece), end = o + cut.length(piece); o < end; ++o)
      for (int64_t c = 0; c < in; c += kLanes)
        for (int64_t t = 0; t < taps; t += kLanes) {
          Vector square[kLanes];
          const int64_t held = std::min<int64_t>(kLanes, taps - t), channels = std::min<int64_t>(kLanes, in - c);
          for (int64_t i = 0; i < kLanes; ++i)
            square[i] = i < held ? load(from + (o * taps + t + i) * padded + c) : Vector{};
          transpose(square);
          for (int64_t i = 0; i < channels; ++i) store_first(dw + (o * in + c + i) * taps + t, square[i], held);
        }
  });
}

}  // namespace onnxtrain::ONNXTRAIN_ISA::channels_last
