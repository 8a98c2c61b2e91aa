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

template <size_t... kLane>
inline Vector halves(Vector lower, Vector upper, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(lower, upper, (int(kLane) + (kLane < kLanes / 2 ? 0 : kLanes))...);
}

// 2 · kPairs pixels of a product for one and a half vectors of channels: two pixels share the vector of the half
// ones. A is as in add_tile; B is a panel [depth][2 · kLanes] that has the half vector twice. The rows of C lie
// 2 · kLanes apart, and what is behind the channels is overwritten.
template <int kPairs>
void multiply_pairs(int64_t depth, const float* a, int64_t a_block, const float* b, float* c) {
  Vector sum[2 * kPairs], shared[kPairs];
#pragma GCC unroll 16
  for (int i = 0; i < kPairs; ++i) sum[2 * i] = sum[2 * i + 1] = shared[i] = Vector{};
  for (; depth > 0; depth -= kLanes, a += a_block)
    for (const float *at = a, *end = a + std::min<int64_t>(depth, kLanes); at != end; ++at, b += 2 * kLanes) {
      const Vector whole = load(b), half = load(b + kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kPairs; ++i) {
        const Vector even = broadcast(at[2 * i * kLanes]), odd = broadcast(at[(2 * i + 1) * kLanes]);
        sum[2 * i] += even * whole;
        sum[2 * i + 1] += odd * whole;
        shared[i] += halves(even, odd, std::make_index_sequence<kLanes>()) * half;
      }
    }
#pragma GCC unroll 16
  for (int i = 0; i < kPairs; ++i) {
    float *even = c + 4 * i * kLanes, *odd = even + 2 * kLanes;
    store(even, sum[2 * i]);
    store(even + kLanes, shared[i]);
    store(odd + kLanes / 2, shared[i]);  // its upper half is in place, the lower one is overwritten
    store(odd, sum[2 * i + 1]);
  }
}

// What one vector of channels of a depthwise convolution reads.
struct ChannelTaps {
  const float* const* rows;  // of pixels, as many as the kernel is high
  int64_t height, width;     // of the kernel
  const float* weights;      // [tap][kLanes]
};

// Adds a row of the kernel to kPixels: each pixel of the image is read once, and met by all taps that reach it.
template <int kPixels, int kStride, int kWidth>
inline void add_taps(const float* from, const float* weights, Vector (&sum)[kPixels]) {
  Vector weight[kWidth];
#pragma GCC unroll 8
  for (int x = 0; x < kWidth; ++x) weight[x] = load(weights + x * kLanes);
#pragma GCC unroll 32
  for (int at = 0; at < (kPixels - 1) * kStride + kWidth; ++at) {
    const Vector pixel = load(from + at * kLanes);
#pragma GCC unroll 8
    for (int x = 0; x < kWidth; ++x)
      if (at >= x && (at - x) % kStride == 0 && (at - x) / kStride < kPixels)
        sum[(at - x) / kStride] += weight[x] * pixel;
  }
}

// kPixels of a row of a depthwise convolution, for one vector of channels. A kWidth of 0 is any width.
template <int kPixels, int kStride, int kWidth>
void convolve_channels(const ChannelTaps& taps, int64_t first, Vector bias, Bounds bounds, float* to) {
  Vector sum[kPixels];
#pragma GCC unroll 16
  for (int i = 0; i < kPixels; ++i) sum[i] = bias;
  const float* weights = taps.weights;
  for (int64_t y = 0; y < taps.height; ++y, weights += taps.width * kLanes) {
    const float* from = taps.rows[y] + first * kLanes;
    if constexpr (kWidth > 0)
      add_taps<kPixels, kStride, kWidth>(from, weights, sum);
    else
      for (int64_t x = 0; x < taps.width; ++x)
        add_taps<kPixels, kStride, 1>(from + x * kLanes, weights + x * kLanes, sum);
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

template <int kStride, int kWidth, size_t... kPixels>
constexpr std::array<ConvolveChannels, kRows> channel_tiles(std::index_sequence<kPixels...>) {
  return {convolve_channels<int(kPixels) + 1, kStride, kWidth>...};
}

using MultiplyPairs = void (*)(int64_t, const float*, int64_t, const float*, float*);

template <size_t... kPairs>
constexpr std::array<MultiplyPairs, kRows / 2> pair_tiles(std::index_sequence<kPairs...>) {
  return {multiply_pairs<int(kPairs) + 1>...};
}

inline MultiplyPairs pair_tile(int64_t pairs) {
  static constexpr std::array<MultiplyPairs, kRows / 2> all = pair_tiles(std::make_index_sequence<kRows / 2>());
  return all[static_cast<size_t>(pairs - 1)];
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

template <int kStride, int kWidth>
inline ConvolveChannels channel_tile(int64_t pixels) {
  static constexpr std::array<ConvolveChannels, kRows> all =
      channel_tiles<kStride, kWidth>(std::make_index_sequence<kRows>());
  return all[static_cast<size_t>(pixels - 1)];
}

// The tile of a number of pixels; of a stride of more than two, there is one of a single pixel.
inline ConvolveChannels channel_tile(int64_t pixels, int64_t stride, int64_t width) {
  if (width == 3) return stride == 2 ? channel_tile<2, 3>(pixels) : channel_tile<1, 3>(pixels);
  if (width == 5) return stride == 2 ? channel_tile<2, 5>(pixels) : channel_tile<1, 5>(pixels);
  return stride == 2 ? channel_tile<2, 0>(pixels) : channel_tile<1, 0>(pixels);
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
