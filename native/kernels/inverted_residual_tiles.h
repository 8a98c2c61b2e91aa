// The innermost loops of a block: tiles of pixels × channels whose vectors run along the channels.
#pragma once

#include "inverted_residual.h"
#include "sums.h"
#include "tile.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Where a pixel of a convolution reads: its element k is image[offsets[k]], one further for the next pixel.
struct PixelReads {
  const float* image;
  const int64_t* offsets;
  int64_t depth;
};

// kHeight pixels of a convolution. Weights are a panel [depth][kWidth · kLanes], and each vector of
// channels is written to an image of its own, `image` apart.
template <int kHeight, int kWidth>
void convolve_pixels(const PixelReads& reads, int64_t first, const float* weights, const float* bias, Bounds bounds,
                     float* to, int64_t image) {
  Vector sum[kHeight][kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWidth; ++j) sum[i][j] = load(bias + j * kLanes);
  const float* const from = reads.image + first;
  for (int64_t k = 0; k < reads.depth; ++k, weights += kWidth * kLanes) {
    const float* at = from + reads.offsets[k];
    Vector right[kWidth];
#pragma GCC unroll 4
    for (int j = 0; j < kWidth; ++j) right[j] = load(weights + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kHeight; ++i) {
      const Vector left = broadcast(at[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kWidth; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWidth; ++j) store(to + j * image + i * kLanes, clip(sum[i][j], bounds.low, bounds.high));
}

// What one vector of channels of a depthwise convolution reads.
struct ChannelTaps {
  const float* const* rows;  // of pixels, as many as the kernel is high
  int64_t height, width;     // of the kernel
  const float* weights;      // [tap][kLanes]
};

// kPixels of a row of a depthwise convolution, for one vector of channels.
template <int kPixels, int kStride>
void convolve_channels(const ChannelTaps& taps, int64_t first, Vector bias, Bounds bounds, float* to) {
  Vector sum[kPixels];
#pragma GCC unroll 16
  for (int i = 0; i < kPixels; ++i) sum[i] = bias;
  const float* weights = taps.weights;
  for (int64_t y = 0; y < taps.height; ++y) {
    const float* from = taps.rows[y] + first * kLanes;
    for (int64_t x = 0; x < taps.width; ++x, from += kLanes, weights += kLanes) {
      const Vector weight = load(weights);
#pragma GCC unroll 16
      for (int i = 0; i < kPixels; ++i) sum[i] += weight * load(from + i * kStride * kLanes);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kPixels; ++i) store(to + i * kLanes, clip(sum[i], bounds.low, bounds.high));
}

using ConvolvePixels = void (*)(const PixelReads&, int64_t, const float*, const float*, Bounds, float*, int64_t);
using ConvolveChannels = void (*)(const ChannelTaps&, int64_t, Vector, Bounds, float*);

template <int kWidth, size_t... kHeight>
constexpr std::array<ConvolvePixels, kRows> pixel_tiles(std::index_sequence<kHeight...>) {
  return {convolve_pixels<int(kHeight) + 1, kWidth>...};
}

template <int kStride, size_t... kPixels>
constexpr std::array<ConvolveChannels, kRows> channel_tiles(std::index_sequence<kPixels...>) {
  return {convolve_channels<int(kPixels) + 1, kStride>...};
}

// The tile of a number of pixels, and of a width in vectors.
template <int kWidth>
inline ConvolvePixels pixel_tile(int64_t height) {
  static constexpr std::array<ConvolvePixels, kRows> all = pixel_tiles<kWidth>(std::make_index_sequence<kRows>());
  return all[static_cast<size_t>(height - 1)];
}

inline ConvolvePixels pixel_tile(int64_t height, int64_t width) {
  if (width == kVectors) return pixel_tile<kVectors>(height);
  if constexpr (kVectors > 2)
    if (width == 2) return pixel_tile<2>(height);
  return pixel_tile<1>(height);
}

// The tile of a number of pixels of a stride of one or two.
template <int kStride>
inline ConvolveChannels channel_tile(int64_t pixels) {
  static constexpr std::array<ConvolveChannels, kRows> all =
      channel_tiles<kStride>(std::make_index_sequence<kRows>());
  return all[static_cast<size_t>(pixels - 1)];
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
