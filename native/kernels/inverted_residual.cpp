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
#include <memory>
#include <mutex>
#include <new>
#include <optional>

#include "conv_window.h"
#include "families.h"
#include "inverted_residual.h"
#include "scratch.h"

namespace onnxtrain {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kLayers = 3;
constexpr std::align_val_t kCacheLine{64};

struct FreesAligned {
  void operator()(float* memory) const { ::operator delete(memory, kCacheLine); }
};

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

  size_t input_count() const { return 1 + has_bias + 4 * has_norm; }
};

// What a layer is given.
struct LayerInputs {
  const float *weights = nullptr, *bias = nullptr;
  const float *scale = nullptr, *shift = nullptr, *mean = nullptr, *variance = nullptr;  // of what normalizes
  int64_t channels = 0, elements = 0;

  LayerInputs() = default;
  LayerInputs(const Layer& layer, Inputs& inputs, const Tensor& w)
      : weights(w.floats()), channels(w.shape[0]), elements(w.elements) {
    if (layer.has_bias) bias = inputs.per_channel(channels);
    if (!layer.has_norm) return;
    for (const float** each : {&scale, &shift, &mean, &variance}) *each = inputs.per_channel(channels);
  }

  // Copies weights and bias with what normalizes folded in.
  void fold(float epsilon, float* to_weights, float* to_bias) const {
    const int64_t depth = channels == 0 ? 0 : elements / channels;
    for (int64_t c = 0; c < channels; ++c) {
      const float factor = scale[c] / std::sqrt(variance[c] + epsilon);
      for (int64_t i = c * depth; i < (c + 1) * depth; ++i) to_weights[i] = weights[i] * factor;
      to_bias[c] = ((bias == nullptr ? 0.0f : bias[c]) - mean[c]) * factor + shift[c];
    }
  }
};

struct InvertedResidual : Kernel {
  bool expands, has_residual, fits;
  bool are_constant = true;  // weights, biases and what normalizes
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
    size_t inputs = 0;
    for (size_t i = expands ? 0 : 1; i < kLayers; ++i) inputs += layers[i].input_count();
    for (size_t i = 1; i <= inputs; ++i) are_constant = are_constant && of.is_constant(i);
  }

  void run(Run& run) const override {
    require(fits, "a block says of each of three convolutions whether it has a bias and a normalization");
    Inputs inputs(run);
    const Tensor x = inputs.next();
    require(x.shape.size() == 4, "a block needs images: batch, channels, rows and columns");
    BlockShape block{expands, {}, {}, 0, {layers[0].bounds, layers[1].bounds, layers[2].bounds}};
    LayerInputs given[kLayers];
    Shape wide = x.shape;
    if (expands) {
      const Tensor w = inputs.next();
      block.expansion = Window(expansion_strides, {}, expansion_pads, 1, false).padded(x.shape, w.shape);
      require_little_padding(expansion_pads, w.shape);
      wide = {x.shape[0], w.shape[0], block.expansion.out[1], block.expansion.out[2]};
      elements_of(wide);
      given[0] = LayerInputs(layers[0], inputs, w);
    }
    const Tensor w = inputs.next();
    require(w.shape.size() == 4 && w.shape[0] == wide[1] && w.shape[0] > 0,
            "the depthwise convolution has other channels than its image, or none");
    block.depthwise = Window(strides, {}, pads, wide[1], false).padded(wide, w.shape);
    require_little_padding(pads, w.shape);
    given[1] = LayerInputs(layers[1], inputs, w);
    const Tensor last = inputs.next();
    require(last.shape.size() == 4 && last.shape[1] == wide[1] && last.shape[2] == 1 && last.shape[3] == 1,
            "the last convolution of a block has 1×1 weights for the channels of the depthwise one");
    given[2] = LayerInputs(layers[2], inputs, last);
    block.out_channels = last.shape[0];
    BlockData data{x.floats(), nullptr, nullptr, nullptr};
    const Shape shape{x.shape[0], last.shape[0], block.depthwise.out[1], block.depthwise.out[2]};
    if (has_residual) {
      const Tensor residual = inputs.next();
      require(residual.shape == shape, "the residual has another shape than the output");
      data.residual = residual.floats();
    }
    Tensor y = run.output(0, shape);
    data.y = y.floats();
    if (y.elements == 0) return;
    std::optional<Floats> packed_now;
    data.packed = are_constant ? packed_once(block, given) : packed(block, given, packed_now);
    inverted_residuals().forward(block, data, run.in_parallel());
  }

 private:
  // Weights that are constants are packed in the first run, and kept.
  const float* packed_once(const BlockShape& block, const LayerInputs (&given)[kLayers]) const {
    std::call_once(is_packed_, [&] {
      const size_t bytes = sizeof(float) * static_cast<size_t>(inverted_residuals().packed_size(block));
      kept_.reset(static_cast<float*>(::operator new(bytes, kCacheLine)));
      pack(block, given, kept_.get());
    });
    return kept_.get();
  }

  const float* packed(const BlockShape& block, const LayerInputs (&given)[kLayers],
                      std::optional<Floats>& memory) const {
    memory.emplace(inverted_residuals().packed_size(block));
    pack(block, given, memory->get());
    return memory->get();
  }

  void pack(const BlockShape& block, const LayerInputs (&given)[kLayers], float* to) const {
    std::optional<Floats> copies[kLayers];
    BlockWeights all{};
    for (size_t i = 0; i < kLayers; ++i) {
      const LayerInputs& own = given[i];
      all.weights[i] = own.weights, all.biases[i] = own.bias;
      if (own.scale == nullptr) continue;
      float* const folded = copies[i].emplace(own.elements + own.channels).get();
      own.fold(layers[i].epsilon, folded, folded + own.elements);
      all.weights[i] = folded, all.biases[i] = folded + own.elements;
    }
    inverted_residuals().pack(block, all, to);
  }

  // Rows are copied with their padding: it must not be what takes the memory.
  static void require_little_padding(const std::vector<int64_t>& pads, const Shape& w) {
    for (size_t i = 0; i < pads.size(); ++i)
      require(pads[i] < w[2 + i % 2], "a block has less padding than its kernels are wide");
  }

  mutable std::once_flag is_packed_;
  mutable std::unique_ptr<float, FreesAligned> kept_;
};

}  // namespace

std::vector<KernelKind> inverted_residual_kernels() {
  return {kind_of<InvertedResidual>("InvertedResidual", {kFloat})};
}

}  // namespace onnxtrain
