// A block of a network that does not train:
//
//   InvertedResidual(x, w, b?, …, residual?)   y
//
// of an expansion (with `expands`: a Conv of one group), a depthwise Conv and a 1×1 Conv of one group. Each has its
// weights among the inputs, and its bias where `biases` has a one at its place. Where `norms` has a one, scale, bias,
// mean and variance of a BatchNormalization behind it follow, with `epsilon_i`. `expansion_strides` and
// `expansion_pads` belong to the first, `strides` and `pads` to the second. Behind the Conv of number i, the numbers
// are kept between `low_i` and `high_i`. With `has_residual`, the last input is added to the output.
#include <cmath>
#include <limits>
#include <optional>

#include "conv_window.h"
#include "families.h"
#include "inverted_residual.h"
#include "scratch.h"

namespace onnxtrain {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kLayers = 3;

// The inputs of a block one by one.
class Inputs {
 public:
  explicit Inputs(const Run& run) : run_(run) {}
  Tensor next() {
    require(used_ < run_.input_count(), "an input of a block is missing");
    return run_.input(used_++);
  }
  const float* per_channel(int64_t channels) {
    const Tensor given = next();
    require(given.shape.size() == 1 && given.elements == channels,
            "a bias or statistic has another size than the channels");
    return given.floats();
  }

 private:
  const Run& run_;
  size_t used_ = 0;
};

// One convolution of a block, as its attributes describe it.
struct Layer {
  Bounds bounds{-kInfinity, kInfinity};
  float epsilon = 0;
  bool has_bias = false, has_norm = false;

  // Reads the bias and what normalizes, and folds the latter into copies of both.
  void read(Inputs& inputs, const Tensor& w, std::optional<Floats>& copies, const float*& weights,
            const float*& bias) const {
    const int64_t channels = w.shape[0], depth = channels == 0 ? 0 : w.elements / channels;
    weights = w.floats();
    bias = has_bias ? inputs.per_channel(channels) : nullptr;
    if (!has_norm) return;
    const float *scale = inputs.per_channel(channels), *shift = inputs.per_channel(channels),
                *mean = inputs.per_channel(channels), *variance = inputs.per_channel(channels);
    copies.emplace(w.elements + channels);
    float *to = copies->get(), *sums = to + w.elements;
    for (int64_t c = 0; c < channels; ++c) {
      const float factor = scale[c] / std::sqrt(variance[c] + epsilon);
      for (int64_t i = c * depth; i < (c + 1) * depth; ++i) to[i] = weights[i] * factor;
      sums[c] = ((bias == nullptr ? 0.0f : bias[c]) - mean[c]) * factor + shift[c];
    }
    weights = to, bias = sums;
  }
};

struct InvertedResidual : Kernel {
  bool expands, has_residual, fits;
  std::vector<int64_t> expansion_strides, expansion_pads, strides, pads;
  Layer layers[kLayers];

  explicit InvertedResidual(const Attributes& of)
      : expands(of.integer("expands", 0) != 0),
        has_residual(of.integer("has_residual", 0) != 0),
        expansion_strides(of.integers("expansion_strides")),
        expansion_pads(of.integers("expansion_pads")),
        strides(of.integers("strides")),
        pads(of.integers("pads")) {
    const std::vector<int64_t> biases = of.integers("biases"), norms = of.integers("norms");
    fits = biases.size() == kLayers && norms.size() == kLayers;
    for (size_t i = 0; fits && i < kLayers; ++i) {
      const auto named = [&](const char* name) { return std::string(name) + "_" + std::to_string(i); };
      layers[i] = {{of.number(named("low").c_str(), -kInfinity), of.number(named("high").c_str(), kInfinity)},
                   of.number(named("epsilon").c_str(), 1e-5f),
                   biases[i] != 0,
                   norms[i] != 0};
    }
  }

  void run(Run& run) const override {
    require(fits, "a block says of each of three convolutions whether it has a bias and a normalization");
    Inputs inputs(run);
    const Tensor x = inputs.next();
    require(x.shape.size() == 4, "a block needs images: batch, channels, rows and columns");
    BlockShape block{expands, {}, {}, 0, {layers[0].bounds, layers[1].bounds, layers[2].bounds}};
    BlockData data{};
    data.x = x.floats();
    std::optional<Floats> copies[kLayers];
    Shape wide = x.shape;
    if (expands) {
      const Tensor w = inputs.next();
      block.expansion = Window(expansion_strides, {}, expansion_pads, 1, false).padded(x.shape, w.shape);
      require_little_padding(expansion_pads, w.shape);
      wide = {x.shape[0], w.shape[0], block.expansion.out[1], block.expansion.out[2]};
      elements_of(wide);
      layers[0].read(inputs, w, copies[0], data.weights[0], data.biases[0]);
    }
    const Tensor w = inputs.next();
    require(w.shape.size() == 4 && w.shape[0] == wide[1] && w.shape[0] > 0,
            "the depthwise convolution has other channels than its image, or none");
    block.depthwise = Window(strides, {}, pads, wide[1], false).padded(wide, w.shape);
    require_little_padding(pads, w.shape);
    layers[1].read(inputs, w, copies[1], data.weights[1], data.biases[1]);
    const Tensor last = inputs.next();
    require(last.shape.size() == 4 && last.shape[1] == wide[1] && last.shape[2] == 1 && last.shape[3] == 1,
            "the last convolution of a block has 1×1 weights for the channels of the depthwise one");
    layers[2].read(inputs, last, copies[2], data.weights[2], data.biases[2]);
    block.out_channels = last.shape[0];
    const Shape shape{x.shape[0], last.shape[0], block.depthwise.out[1], block.depthwise.out[2]};
    if (has_residual) {
      const Tensor residual = inputs.next();
      require(residual.shape == shape, "the residual has another shape than the output");
      data.residual = residual.floats();
    }
    Tensor y = run.output(0, shape);
    data.y = y.floats();
    if (y.elements > 0) inverted_residuals().forward(block, data, run.in_parallel());
  }

 private:
  // Rows are copied with their padding: it must not be what takes the memory.
  static void require_little_padding(const std::vector<int64_t>& pads, const Shape& w) {
    for (size_t i = 0; i < pads.size(); ++i)
      require(pads[i] < w[2 + i % 2], "a block has less padding than its kernels are wide");
  }
};

}  // namespace

std::vector<KernelKind> inverted_residual_kernels() {
  return {kind_of<InvertedResidual>("InvertedResidual", {kFloat})};
}

}  // namespace onnxtrain
