// Convolutions as products: panels are packed from the image, no matrix of columns is written.
#pragma once

#include <cmath>

#include "channels_last.h"
#include "patch_products.h"
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
  return {data,      channels * pixels, pixels, {{size[0], size[1], size[2]}}, {size[0], size[1], size[2]},
          {0, 0, 0}, {1, 1, 1},         true};
}

inline bool all_finite(const float* data, int64_t count) {
  return std::all_of(data, data + count, [](float each) { return std::isfinite(each); });
}

// Whether each output reads the one pixel at its place.
inline bool is_pointwise(const Convolution& conv) {
  for (int axis = 0; axis < kMostAxes; ++axis)
    if (conv.kernel[axis] != 1 || conv.stride[axis] != 1 || conv.pad[axis] != 0 || conv.in[axis] != conv.out[axis])
      return false;
  return true;
}

// Whether fewer multiplications pay for the maps around them.
inline bool suits_winograd(const Convolution& conv) {
  for (int axis = 0; axis < kMostAxes; ++axis)
    if (conv.stride[axis] != 1 || conv.dilation[axis] != 1 || conv.kernel[axis] != (axis == 0 ? 1 : 3)) return false;
  return conv.in[0] == 1 && conv.pad[0] == 0 && conv.out[0] == 1 && conv.in_channels >= kLanes &&
         conv.out_channels >= kLanes;
}

inline winograd::Image input_image(const Convolution& conv) {
  return {conv.in[1], conv.in[2], conv.groups * conv.in_channels * conv.in_size(), conv.pad[1], conv.pad[2]};
}

inline winograd::Image output_image(const Convolution& conv) {
  return {conv.out[1], conv.out[2], conv.groups * conv.out_channels * conv.out_size(), 2 - conv.pad[1],
          2 - conv.pad[2]};
}

// Whether patches are read where they lie. Beside enough channels, a copy with channels last is better, or Winograd's
// transform, and products in bfloat16. Windows that reach far behind the image, or leave most of it out, would be
// copied with more padding than image.
inline bool suits_patch_products(const Convolution& conv) {
  for (int axis = 0; axis < kMostAxes; ++axis) {
    const int64_t reach = (conv.kernel[axis] - 1) * conv.dilation[axis];
    if (reach > conv.in[axis] + 16 || std::min(conv.stride[axis], reach + 1) > 2 * conv.kernel[axis]) return false;
  }
  const int64_t least = std::min(conv.in_channels, conv.out_channels), taps = conv.taps();
  if (conv.bf16 && has_bf16()) return taps > 1 && least < kLanes;
  return taps > 1 && least <= (taps > 16 ? 2 * kLanes : kLanes);
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

// All taps of a phase of the pixels of the input.
inline std::vector<channels_last::Tap> phase_taps(const Convolution& conv, const int64_t* phase) {
  std::vector<channels_last::Tap> found;
  for (const PhaseTap& z : phase_taps(conv, 0, phase[0]))
    for (const PhaseTap& y : phase_taps(conv, 1, phase[1]))
      for (const PhaseTap& x : phase_taps(conv, 2, phase[2]))
        found.push_back({{z.offset, y.offset, x.offset}, (z.tap * conv.kernel[1] + y.tap) * conv.kernel[2] + x.tap});
  return found;
}

inline std::vector<channels_last::Tap> all_taps(const Patches& patches) {
  std::vector<channels_last::Tap> found;
  for (const Patches::Tap& tap : patches.taps)
    found.push_back({{tap.offset[0], tap.offset[1], tap.offset[2]}, static_cast<int64_t>(found.size())});
  return found;
}

// Pixels of a phase along an axis: from `phase` on, a stride apart.
inline int64_t phase_size(const Convolution& conv, int axis, int64_t phase) {
  return (conv.in[axis] - phase + conv.stride[axis] - 1) / conv.stride[axis];
}

// Calls work(pz, py, px) for each phase, or with px = 0 alone.
template <class Work>
void for_each_phase(const Convolution& conv, int axes, const Work& work) {
  for (int64_t pz = 0; pz < std::min(conv.stride[0], conv.in[0]); ++pz)
    for (int64_t py = 0; py < std::min(conv.stride[1], conv.in[1]); ++py)
      for (int64_t px = 0; px < (axes == 3 ? std::min(conv.stride[2], conv.in[2]) : 1); ++px) work(pz, py, px);
}

// ---- one group of channels ------------------------------------------------------------------------

// A group of a convolution: `of` is the whole, pointers are at the channels of the group.
struct Group {
  const Convolution& of;
  const Parallel& parallel;
  bool rounded = of.bf16 && has_bf16();  // to bfloat16

  int64_t x_stride() const { return of.groups * of.in_channels * of.in_size(); }
  int64_t y_stride() const { return of.groups * of.out_channels * of.out_size(); }
  int64_t columns() const { return of.in_channels * of.taps(); }

  void forward(const float* x, const float* w, const float* bias, float* y) const {
    if (suits_winograd(of)) {
      const winograd::Weights weights{w, of.in_channels, of.out_channels, 9, columns(), false};
      return winograd::convolve(input_image(of), output_image(of), weights, of.batch, x, bias, y, rounded, parallel);
    }
    if (of.taps() > 1) return forward_by_pixels(x, w, bias, y);
    const ImageStore store = dense_store(y, of.groups * of.out_channels, of.out);
    const MatrixRows weights{w, columns(), 1};
    const int64_t out = of.out_size(), positions = of.batch * out;
    if (bias != nullptr)
      for (int64_t n = 0; n < of.batch; ++n)
        for (int64_t c = 0; c < of.out_channels; ++c) std::fill_n(y + n * y_stride() + c * out, out, bias[c]);
    if (is_pointwise(of))
      return multiply(weights, ChannelColumns{x, x_stride(), out}, store, of.out_channels, positions, columns(),
                      bias != nullptr, parallel, rounded);
    const Floats met(of.batch * of.in_channels * out);
    read_met(patches_of(of, x), met.get());
    multiply(weights, ChannelColumns{met.get(), of.in_channels * out, out}, store, of.out_channels, positions,
             columns(), bias != nullptr, parallel, rounded);
  }

  void weight_gradient(const float* x, const float* dy, float* dw) const {
    if (suits_winograd(of))
      return winograd::convolve_weight_gradient(input_image(of), output_image(of), of.batch, of.in_channels,
                                                of.out_channels, x, dy, dw, rounded, parallel);
    const int64_t out = of.out_size(), depth = of.batch * out;
    const ChannelRows gradients{dy, y_stride(), out};
    if (is_pointwise(of))
      return multiply_deep(gradients, ChannelLines{x, x_stride(), out}, dw, of.out_channels, columns(), depth, parallel,
                           rounded);
    const Patches patches = patches_of(of, x);
    if (of.taps() == 1) {
      const Floats met(of.batch * of.in_channels * out);
      read_met(patches, met.get());
      return multiply_deep(gradients, ChannelLines{met.get(), of.in_channels * out, out}, dw, of.out_channels,
                           columns(), depth, parallel, rounded);
    }
    const channels_last::Planes planes{x, of.batch, x_stride(), of.in_channels, {of.in[0], of.in[1], of.in[2]}};
    const int64_t padded = planes.padded(), taps = of.taps();
    const Floats copy(of.batch * of.in_size() * padded), sums(of.out_channels * taps * padded);
    const channels_last::Pixels pixels{planes, 0, copy.get()};
    channels_last::read_all(pixels, parallel);
    const std::vector<channels_last::Tap> own = all_taps(patches);
    multiply_deep(gradients, channels_last::PatchColumnsByPosition{pixels, patches.grid, of.stride, own}, sums.get(),
                  of.out_channels, taps * padded, depth, parallel, rounded);
    channels_last::write_weights(sums.get(), of.out_channels, taps, of.in_channels, dw, parallel);
  }

  void input_gradient(const float* dy, const float* w, float* dx) const {
    if (suits_winograd(of)) {
      const winograd::Weights weights{w, of.out_channels, of.in_channels, columns(), 9, true};
      return winograd::convolve(output_image(of), input_image(of), weights, of.batch, dy, nullptr, dx, rounded,
                                parallel);
    }
    if (is_pointwise(of))
      return multiply(MatrixRows{w, 1, of.in_channels}, ChannelColumns{dy, y_stride(), of.out_size()},
                      dense_store(dx, of.groups * of.in_channels, of.in), of.in_channels, of.batch * of.in_size(),
                      of.out_channels, false, parallel, rounded);
    if (of.taps() == 1) {
      const int64_t out = of.out_size();
      const Floats met(of.batch * of.in_channels * out);
      multiply(MatrixRows{w, 1, of.in_channels}, ChannelColumns{dy, y_stride(), out},
               dense_store(met.get(), of.in_channels, of.out), of.in_channels, of.batch * out, of.out_channels, false,
               parallel, rounded);
      return write_met(met.get(), dx);
    }
    input_gradient_by_pixels(dy, w, dx);
  }

 private:
  void forward_by_pixels(const float* x, const float* w, const float* bias, float* y) const {
    const channels_last::Planes planes{x, of.batch, x_stride(), of.in_channels, {of.in[0], of.in[1], of.in[2]}};
    const channels_last::Phase phase{0, 1, of.out[2], all_taps(patches_of(of, x)), 0};
    const channels_last::WeightPacker packer{w,         of.taps(), of.in_channels, of.taps(), of.out_channels,
                                             columns(), rounded};
    const Floats weights(of.taps() * packer.size_of_tap());
    packer.pack({&phase}, weights.get(), parallel);
    const channels_last::Rows rows{planes,
                                   of.out_channels,
                                   weights.get(),
                                   bias,
                                   y,
                                   y_stride(),
                                   {of.out[0], of.out[1], of.out[2]},
                                   {0, 0},
                                   {1, 1},
                                   {of.out[0], of.out[1]},
                                   {of.stride[0], of.stride[1], of.stride[2]},
                                   {phase},
                                   rounded};
    rows.run(parallel);
  }

  void input_gradient_by_pixels(const float* dy, const float* w, float* dx) const {
    const channels_last::Planes planes{dy, of.batch, y_stride(), of.out_channels, {of.out[0], of.out[1], of.out[2]}};
    const channels_last::WeightPacker packer{w,         of.taps(), of.out_channels, columns(), of.in_channels,
                                             of.taps(), rounded};
    const Floats weights(of.taps() * packer.size_of_tap());
    std::vector<channels_last::Rows> all;  // by phases of the first two axes
    int64_t packed = 0;                    // taps
    for_each_phase(of, 2, [&](int64_t pz, int64_t py, int64_t) {
      all.push_back({planes,
                     of.in_channels,
                     weights.get(),
                     nullptr,
                     dx,
                     x_stride(),
                     {of.in[0], of.in[1], of.in[2]},
                     {pz, py},
                     {of.stride[0], of.stride[1]},
                     {phase_size(of, 0, pz), phase_size(of, 1, py)},
                     {1, 1, 1},
                     {},
                     rounded});
      for (int64_t px = 0; px < std::min(of.stride[2], of.in[2]); ++px) {
        const int64_t phase[kMostAxes] = {pz, py, px};
        all.back().phases.push_back({px, of.stride[2], phase_size(of, 2, px), phase_taps(of, phase), packed});
        packed += static_cast<int64_t>(all.back().phases.back().taps.size());
      }
    });
    std::vector<const channels_last::Phase*> phases;
    for (const channels_last::Rows& rows : all)
      for (const channels_last::Phase& phase : rows.phases) phases.push_back(&phase);
    packer.pack(phases, weights.get(), parallel);
    for (const channels_last::Rows& rows : all) rows.run(parallel);
  }

  // Copies the pixels that the windows of a single tap meet, as planes of the size of the output.
  void read_met(const Patches& patches, float* to) const {
    const std::vector<Grid::Piece> pieces = patches.pieces(0, of.out_size());
    const EvenCut cut(of.batch * of.in_channels, std::max<int64_t>(1, 16384 / of.out_size()));
    parallel(cut.pieces, [&](int64_t task) {
      for (int64_t plane = cut.begin(task), end = plane + cut.length(task); plane < end; ++plane) {
        const float* from = patches.image + plane / of.in_channels * x_stride() + plane % of.in_channels * of.in_size();
        for (const Grid::Piece& piece : pieces)
          patches.copy(piece, from, patches.taps[0], to + plane * of.out_size() + piece.begin);
      }
    });
  }

  // The reverse: all other pixels are zero.
  void write_met(const float* from, float* dx) const {
    const EvenCut cut(of.batch * of.in_channels, std::max<int64_t>(1, 16384 / of.in_size()));
    const Grid grid{{of.out[0], of.out[1], of.out[2]}};
    parallel(cut.pieces, [&](int64_t task) {
      for (int64_t plane = cut.begin(task), end = plane + cut.length(task); plane < end; ++plane) {
        float* to = dx + plane / of.in_channels * x_stride() + plane % of.in_channels * of.in_size();
        std::fill_n(to, of.in_size(), 0.0f);
        grid.pieces(0, of.out_size(), [&](const Grid::Piece& piece) {
          const int64_t z = piece.z * of.stride[0] - of.pad[0], y = piece.y * of.stride[1] - of.pad[1];
          if (z < 0 || z >= of.in[0] || y < 0 || y >= of.in[1]) return;
          float* line = to + (z * of.in[1] + y) * of.in[2];
          const float* own = from + plane * of.out_size() + piece.begin;
          for (int64_t i = 0, x = piece.x * of.stride[2] - of.pad[2]; i < piece.length; ++i, x += of.stride[2])
            if (x >= 0 && x < of.in[2]) line[x] = own[i];
        });
      }
    });
  }
};

// Rows of the left side for the gradient of the input: weights by input channel.
struct PhaseWeights {
  const float* w;
  int64_t in_channels, all;                     // taps of the convolution
  const std::vector<channels_last::Tap>& taps;  // of the phase

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    const int64_t width = static_cast<int64_t>(taps.size());
    for (int64_t done = 0; done < depth; done += kLanes, panel += count * kLanes) {
      const int64_t left = std::min<int64_t>(depth - done, kLanes);
      for (int64_t x = 0; x < left; ++x) {
        const int64_t at = k + done + x;
        const float* from = w + (at / width * in_channels + first) * all + taps[static_cast<size_t>(at % width)].number;
        for (int64_t i = 0; i < count; ++i) panel[i * kLanes + x] = from[i * all];
      }
    }
  }
};

// ---- all groups with few channels -----------------------------------------------------------------

struct FewChannels {
  const Convolution& of;
  const Parallel& parallel;

  int64_t y_stride() const { return of.groups * of.out_channels * of.out_size(); }
  int64_t columns() const { return of.in_channels * of.taps(); }

  void forward(const float* x, const float* w, const float* bias, float* y) const {
    const Patches patches = patches_of(of, x);
    PatchProduct(patches, of.batch, of.groups, of.in_channels, of.out_channels, parallel)
        .multiply([&](int64_t g) { return MatrixRows{w + g * of.out_channels * columns(), columns(), 1}; },
                  dense_store(y, of.groups * of.out_channels, of.out), bias);
  }

  void weight_gradient(const float* x, const float* dy, float* dw) const {
    const Patches patches = patches_of(of, x);
    PatchProduct(patches, of.batch, of.groups, of.in_channels, of.out_channels, parallel).sum(dy, y_stride(), dw);
  }

  void input_gradient(const float* dy, const float* w, float* dx) const {
    for_each_phase(of, 3, [&](int64_t pz, int64_t py, int64_t px) { input_gradient_of({pz, py, px}, dy, w, dx); });
  }

 private:
  struct Phase {
    int64_t at[kMostAxes];
  };

  void input_gradient_of(const Phase& phase, const float* dy, const float* w, float* dx) const {
    const std::vector<channels_last::Tap> taps = phase_taps(of, phase.at);
    Patches patches{dy, y_stride(), {of.out[0], of.out[1], of.out[2]}, {}, {1, 1, 1}, {}};
    for (const channels_last::Tap& tap : taps) patches.taps.push_back({{tap.offset[0], tap.offset[1], tap.offset[2]}});
    for (int axis = 0; axis < kMostAxes; ++axis) patches.grid.size[axis] = phase_size(of, axis, phase.at[axis]);
    ImageStore store = dense_store(dx, of.groups * of.in_channels, of.in);
    store.grid = patches.grid;
    std::copy_n(phase.at, kMostAxes, store.first);
    std::copy_n(of.stride, kMostAxes, store.step);
    store.dense = false;
    if (taps.empty()) return clear(store, of.groups * of.in_channels, of.batch * patches.grid.positions());
    const auto rows_of = [&](int64_t g) {
      return PhaseWeights{w + g * of.out_channels * columns(), of.in_channels, of.taps(), taps};
    };
    PatchProduct(patches, of.batch, of.groups, of.out_channels, of.in_channels, parallel)
        .multiply(rows_of, store, nullptr);
  }
};

// ---- all groups -----------------------------------------------------------------------------------

inline void convolve(const Convolution& conv, const float* x, const float* w, const float* bias, float* y,
                     const Parallel& parallel) {
  if (conv.batch == 0 || conv.out_channels == 0 || conv.out_size() == 0) return;
  if (conv.in_channels == 0 || conv.in_size() == 0) {
    for (int64_t plane = 0; plane < conv.batch * conv.groups * conv.out_channels; ++plane)
      std::fill_n(y + plane * conv.out_size(), conv.out_size(),
                  bias == nullptr ? 0.0f : bias[plane % (conv.groups * conv.out_channels)]);
    return;
  }
  if (suits_patch_products(conv)) return FewChannels{conv, parallel}.forward(x, w, bias, y);
  const Group one{conv, parallel};
  for (int64_t g = 0; g < conv.groups; ++g)
    one.forward(x + g * conv.in_channels * conv.in_size(), w + g * conv.out_channels * one.columns(),
                bias == nullptr ? nullptr : bias + g * conv.out_channels, y + g * conv.out_channels * conv.out_size());
}

inline void convolve_weight_gradient(const Convolution& conv, const float* x, const float* dy, float* dw,
                                     const Parallel& parallel) {
  if (conv.in_channels == 0 || conv.out_channels == 0) return;
  const Group one{conv, parallel};
  if (conv.batch == 0 || conv.in_size() == 0 || conv.out_size() == 0) {
    std::fill_n(dw, conv.groups * conv.out_channels * one.columns(), 0.0f);
    return;
  }
  if (suits_patch_products(conv)) {
    FewChannels{conv, parallel}.weight_gradient(x, dy, dw);
    // Zeros between the rows of a band meet pixels that a tap does not read: they may be NaN or infinite.
    if (all_finite(dw, conv.groups * conv.out_channels * one.columns())) return;
  }
  for (int64_t g = 0; g < conv.groups; ++g)
    one.weight_gradient(x + g * conv.in_channels * conv.in_size(), dy + g * conv.out_channels * conv.out_size(),
                        dw + g * conv.out_channels * one.columns());
}

inline void convolve_input_gradient(const Convolution& conv, const float* dy, const float* w, float* dx,
                                    const Parallel& parallel) {
  if (conv.batch == 0 || conv.in_channels == 0 || conv.in_size() == 0) return;
  const Group one{conv, parallel};
  if (conv.out_size() == 0 || conv.out_channels == 0) {
    std::fill_n(dx, conv.batch * one.x_stride(), 0.0f);
    return;
  }
  if (suits_patch_products(conv)) return FewChannels{conv, parallel}.input_gradient(dy, w, dx);
  for (int64_t g = 0; g < conv.groups; ++g)
    one.input_gradient(dy + g * conv.out_channels * conv.out_size(), w + g * conv.out_channels * one.columns(),
                       dx + g * conv.in_channels * conv.in_size());
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
