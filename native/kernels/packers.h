// Packers, which say where a product reads its panels from, and stores, which say where it writes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "compute.h"
#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Lines of a matrix as a panel [depth][kWidth]: rows of the left side, or columns of the right.
template <int kWidth>
struct MatrixPacker {
  const float* data;
  int64_t line, step;  // from line to line, and along the depth

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    const float* from = data + first * line + k * step;
    if (count == kWidth && line == 1) {
      for (int64_t x = 0; x < depth; ++x, from += step, panel += kWidth)
        for (int i = 0; i < kWidth; ++i) panel[i] = from[i];
      return;
    }
    if (count < kWidth) std::fill(panel, panel + depth * kWidth, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const float* own = from + i * line;
      for (int64_t x = 0; x < depth; ++x) panel[x * kWidth + i] = own[x * step];
    }
  }
};

// The places of an image that each position of a grid reads, one for each channel and tap:
// position · step + offset of the tap, or zero outside of the image.
struct Patches {
  struct Tap {
    int64_t offset[kMostAxes];
  };
  const float* image;
  int64_t batch_stride;     // from image to image
  int64_t size[kMostAxes];  // of the image
  int64_t grid[kMostAxes];  // of the positions
  int64_t step[kMostAxes];
  std::vector<Tap> taps;

  int64_t positions() const { return grid[0] * grid[1] * grid[2]; }
  int64_t pixels() const { return size[0] * size[1] * size[2]; }

  // Calls use(begin, line, first, last) for each row of the grid in [first, first + count): `line`
  // is the row of the image at `tap` for its positions [begin, …) of the panel, or null.
  template <class Use>
  void rows(int64_t first, int64_t count, int64_t channel, const Tap& tap, const Use& use) const {
    int64_t done = 0;
    while (done < count) {
      const int64_t flat = first + done, in_image = flat % positions();
      const int64_t x = in_image % grid[2], y = in_image / grid[2] % grid[1], z = in_image / grid[2] / grid[1];
      const int64_t length = std::min(count - done, grid[2] - x);
      const int64_t source_z = z * step[0] + tap.offset[0], source_y = y * step[1] + tap.offset[1];
      const bool inside = source_z >= 0 && source_z < size[0] && source_y >= 0 && source_y < size[1];
      const float* line = nullptr;
      if (inside)
        line = image + flat / positions() * batch_stride + channel * pixels() + (source_z * size[1] + source_y) * size[2];
      use(done, line, x * step[2] + tap.offset[2], length);
      done += length;
    }
  }
};

// Patches as columns of the right side: depth runs over channels and taps.
struct PatchColumns {
  const Patches& patches;

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    const int64_t taps = static_cast<int64_t>(patches.taps.size()), step = patches.step[2], width = patches.size[2];
    for (int64_t at = k; at < k + depth; ++at, panel += kColumns) {
      for (int64_t j = count; j < kColumns; ++j) panel[j] = 0;
      patches.rows(first, count, at / taps, patches.taps[at % taps],
                   [&](int64_t begin, const float* line, int64_t x, int64_t length) {
                     float* to = panel + begin;
                     if (line == nullptr) {
                       for (int64_t j = 0; j < length; ++j) to[j] = 0;
                     } else if (step == 1 && x >= 0 && x + length <= width) {
                       for (int64_t j = 0; j < length; ++j) to[j] = line[x + j];
                     } else {
                       for (int64_t j = 0; j < length; ++j, x += step) to[j] = x >= 0 && x < width ? line[x] : 0;
                     }
                   });
    }
  }
};

// Patches as columns of the right side where depth runs over positions: for gradients of weights.
struct PatchRows {
  const Patches& patches;

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    const int64_t taps = static_cast<int64_t>(patches.taps.size()), step = patches.step[2], width = patches.size[2];
    if (count < kColumns) std::fill(panel, panel + depth * kColumns, 0.0f);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = first + j;
      patches.rows(k, depth, at / taps, patches.taps[at % taps],
                   [&](int64_t begin, const float* line, int64_t x, int64_t length) {
                     float* to = panel + begin * kColumns + j;
                     for (int64_t i = 0; i < length; ++i, x += step, to += kColumns)
                       *to = line != nullptr && x >= 0 && x < width ? line[x] : 0;
                   });
    }
  }
};

// Lines of channels along the positions of all images: rows of the left side, depth over positions.
struct ChannelRows {
  const float* data;
  int64_t batch_stride, positions;

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    if (count < kRows) std::fill(panel, panel + depth * kRows, 0.0f);
    for (int64_t done = 0; done < depth;) {
      const int64_t image = (k + done) / positions, in_image = (k + done) % positions;
      const int64_t length = std::min(depth - done, positions - in_image);
      const float* from = data + image * batch_stride + first * positions + in_image;
      for (int64_t i = 0; i < count; ++i)
        for (int64_t x = 0; x < length; ++x) panel[(done + x) * kRows + i] = from[i * positions + x];
      done += length;
    }
  }
};

// A matrix as the place of results.
struct MatrixStore {
  float* data;
  int64_t row;
  float* run(int64_t i, int64_t j, int64_t) const { return data + i * row + j; }  // a run is always whole
  float& at(int64_t i, int64_t j) const { return data[i * row + j]; }
  int64_t stride() const { return row; }
};

// Channels × positions of all images. Positions may be those of a phase: every `step`-th pixel.
struct ImageStore {
  float* data;
  int64_t batch_stride, channel_stride, positions;
  const int64_t* grid;   // of the positions
  const int64_t* size;   // of the image
  int64_t first[kMostAxes], step[kMostAxes];
  bool dense;            // all pixels in order

  float* run(int64_t i, int64_t j, int64_t count) const {
    if (!dense || j % positions + count > positions) return nullptr;
    return data + j / positions * batch_stride + i * channel_stride + j % positions;
  }
  float& at(int64_t i, int64_t j) const {
    const int64_t p = j % positions;
    int64_t pixel = p;
    if (!dense) {
      const int64_t x = p % grid[2], y = p / grid[2] % grid[1], z = p / grid[2] / grid[1];
      pixel = ((first[0] + z * step[0]) * size[1] + first[1] + y * step[1]) * size[2] + first[2] + x * step[2];
    }
    return data[j / positions * batch_stride + i * channel_stride + pixel];
  }
  int64_t stride() const { return channel_stride; }
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
