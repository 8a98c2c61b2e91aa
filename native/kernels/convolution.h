// Convolutions as products: panels are packed from the image, no matrix of columns is written.
#pragma once

#include "winograd.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Where each output of a convolution reads its input.
inline Patches patches_of(const Convolution& conv, const float* image) {
  Patches made{image, conv.groups * conv.in_channels * conv.in_size(), {}, {}, {}, {}};
  for (int axis = 0; axis < kMostAxes; ++axis) {
    made.size[axis] = conv.in[axis];
    made.grid.size[axis] = conv.out[axis];
    made.step[axis] = conv.stride[axis];
  }
  for (int64_t z = 0; z < conv.kernel[0]; ++z)
    for (int64_t y = 0; y < conv.kernel[1]; ++y)
      for (int64_t x = 0; x < conv.kernel[2]; ++x)
        made.taps.push_back({{z * conv.dilation[0] - conv.pad[0], y * conv.dilation[1] - conv.pad[1],
                              x * conv.dilation[2] - conv.pad[2]}});
  return made;
}

// An image that a product writes as it lies, `channels` in all groups.
inline ImageStore dense_store(float* data, int64_t channels, const int64_t* size) {
  const int64_t pixels = size[0] * size[1] * size[2];
  return {data, channels * pixels, pixels, {{size[0], size[1], size[2]}}, {size[0], size[1], size[2]}, {0, 0, 0}, {1, 1, 1}, true};
}

// Whether fewer multiplications pay for the maps around them.
inline bool suits_winograd(const Convolution& conv) {
  for (int axis = 0; axis < kMostAxes; ++axis)
    if (conv.stride[axis] != 1 || conv.dilation[axis] != 1 || conv.kernel[axis] != (axis == 0 ? 1 : 3)) return false;
  return conv.in[0] == 1 && conv.pad[0] == 0 && conv.out[0] == 1 && conv.in_channels >= kLanes && conv.out_channels >= kLanes;
}

inline winograd::Image input_image(const Convolution& conv) {
  return {conv.in[1], conv.in[2], conv.groups * conv.in_channels * conv.in_size(), conv.pad[1], conv.pad[2]};
}

inline winograd::Image output_image(const Convolution& conv) {
  return {conv.out[1], conv.out[2], conv.groups * conv.out_channels * conv.out_size(), 2 - conv.pad[1], 2 - conv.pad[2]};
}

inline void convolve(const Convolution& conv, const float* x, const float* w, const float* bias, float* y,
                     const Parallel& parallel) {
  const int64_t depth = conv.in_channels * conv.taps(), out = conv.out_size();
  for (int64_t group = 0; group < conv.groups; ++group) {
    const Patches patches = patches_of(conv, x + group * conv.in_channels * conv.in_size());
    const MatrixRows weights{w + group * conv.out_channels * depth, depth, 1};
    float* to = y + group * conv.out_channels * out;
    if (suits_winograd(conv)) {
      const winograd::Weights own{w + group * conv.out_channels * depth, conv.in_channels, conv.out_channels, 9, depth, false};
      winograd::convolve(input_image(conv), output_image(conv), own, conv.batch, x + group * conv.in_channels * conv.in_size(),
                         bias == nullptr ? nullptr : bias + group * conv.out_channels, to, parallel);
      continue;
    }
    const ImageStore store = dense_store(to, conv.groups * conv.out_channels, conv.out);
    if (bias != nullptr)
      for (int64_t n = 0; n < conv.batch; ++n)
        for (int64_t c = 0; c < conv.out_channels; ++c)
          std::fill_n(to + n * store.batch_stride + c * out, out, bias[group * conv.out_channels + c]);
    multiply(weights, PatchColumns{patches}, store, conv.out_channels, conv.batch * out, depth, bias != nullptr, parallel);
  }
}

inline void convolve_weight_gradient(const Convolution& conv, const float* x, const float* dy, float* dw,
                                     const Parallel& parallel) {
  const int64_t columns = conv.in_channels * conv.taps(), out = conv.out_size(), depth = conv.batch * out;
  for (int64_t group = 0; group < conv.groups; ++group) {
    const Patches patches = patches_of(conv, x + group * conv.in_channels * conv.in_size());
    if (suits_winograd(conv)) {
      winograd::convolve_weight_gradient(input_image(conv), output_image(conv), conv.batch, conv.in_channels, conv.out_channels,
                                         x + group * conv.in_channels * conv.in_size(), dy + group * conv.out_channels * out,
                                         dw + group * conv.out_channels * columns, parallel);
      continue;
    }
    const ChannelRows gradients{dy + group * conv.out_channels * out, conv.groups * conv.out_channels * out, out};
    const MatrixStore store{dw + group * conv.out_channels * columns, columns};
    multiply(gradients, PatchRows{patches}, store, conv.out_channels, columns, depth, false, parallel);
  }
}

// The taps of one axis that reach the pixels of a phase, and the place that each reads in dy.
struct PhaseTap {
  int64_t tap, offset;
};

inline std::vector<PhaseTap> phase_taps(const Convolution& conv, int axis, int64_t phase) {
  std::vector<PhaseTap> found;
  for (int64_t tap = 0; tap < conv.kernel[axis]; ++tap) {
    const int64_t distance = phase + conv.pad[axis] - tap * conv.dilation[axis];
    if (distance % conv.stride[axis] == 0) found.push_back({tap, distance / conv.stride[axis]});
  }
  return found;
}

// Rows of the left side for the gradient of the input: weights by input channel.
struct PhaseWeights {
  const float* w;
  int64_t in_channels, taps;         // of the convolution
  const std::vector<int64_t>& used;  // taps of the phase

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    const int64_t width = static_cast<int64_t>(used.size());
    for (int64_t done = 0; done < depth; done += kLanes, panel += count * kLanes) {
      const int64_t left = std::min<int64_t>(depth - done, kLanes);
      for (int64_t x = 0; x < left; ++x) {
        const int64_t at = k + done + x;
        const float* from = w + (at / width * in_channels + first) * taps + used[static_cast<size_t>(at % width)];
        for (int64_t i = 0; i < count; ++i) panel[i * kLanes + x] = from[i * taps];
      }
    }
  }
};

inline void convolve_input_gradient(const Convolution& conv, const float* dy, const float* w, float* dx,
                                    const Parallel& parallel) {
  const int64_t out = conv.out_size(), in = conv.in_size(), taps = conv.taps();
  if (suits_winograd(conv)) {
    for (int64_t group = 0; group < conv.groups; ++group) {
      const winograd::Weights own{w + group * conv.out_channels * conv.in_channels * 9, conv.out_channels, conv.in_channels,
                                  conv.in_channels * 9, 9, true};
      winograd::convolve(output_image(conv), input_image(conv), own, conv.batch, dy + group * conv.out_channels * out, nullptr,
                         dx + group * conv.in_channels * in, parallel);
    }
    return;
  }
  for (int64_t group = 0; group < conv.groups; ++group)
    for (int64_t pz = 0; pz < std::min(conv.stride[0], conv.in[0]); ++pz)
      for (int64_t py = 0; py < std::min(conv.stride[1], conv.in[1]); ++py)
        for (int64_t px = 0; px < std::min(conv.stride[2], conv.in[2]); ++px) {
          const int64_t phase[kMostAxes] = {pz, py, px};
          Patches patches{dy + group * conv.out_channels * out, conv.groups * conv.out_channels * out, {}, {}, {}, {}};
          std::vector<PhaseTap> own[kMostAxes];
          for (int axis = 0; axis < kMostAxes; ++axis) {
            own[axis] = phase_taps(conv, axis, phase[axis]);
            patches.size[axis] = conv.out[axis];
            patches.grid.size[axis] = (conv.in[axis] - phase[axis] + conv.stride[axis] - 1) / conv.stride[axis];
            patches.step[axis] = 1;
          }
          std::vector<int64_t> used;
          for (const PhaseTap& z : own[0])
            for (const PhaseTap& y : own[1])
              for (const PhaseTap& x : own[2]) {
                used.push_back((z.tap * conv.kernel[1] + y.tap) * conv.kernel[2] + x.tap);
                patches.taps.push_back({{z.offset, y.offset, x.offset}});
              }
          const bool dense = conv.stride[0] == 1 && conv.stride[1] == 1 && conv.stride[2] == 1;
          const ImageStore store{dx + group * conv.in_channels * in, conv.groups * conv.in_channels * in, in, patches.grid,
                                 {conv.in[0], conv.in[1], conv.in[2]}, {pz, py, px},
                                 {conv.stride[0], conv.stride[1], conv.stride[2]}, dense};
          const int64_t columns = conv.batch * patches.grid.positions();
          if (used.empty()) {
            store.clear(conv.in_channels, columns);
            continue;
          }
          const PhaseWeights weights{w + group * conv.out_channels * conv.in_channels * taps, conv.in_channels, taps, used};
          multiply(weights, PatchColumns{patches}, store, conv.in_channels, columns,
                   conv.out_channels * static_cast<int64_t>(used.size()), false, parallel);
        }
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
