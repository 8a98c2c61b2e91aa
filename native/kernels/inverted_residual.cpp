// A block of a network that does not train:
//
//   InvertedResidual(x, w, b?, …, residual?)   y
//
// of an expansion (with `expands`: a Conv of one group), a depthwise Conv and a 1×1 Conv of one group. Each has
// its weights among the inputs, and its bias where `biases` has a one at its place. `expansion_strides` and
// `expansion_pads` belong to the first, `strides` and `pads` to the second. Behind the Conv of number i, the numbers
// are kept between `low_i` and `high_i`. With `has_residual`, the last input is added to the output.
#include <limits>

#include "conv_window.h"
#include "families.h"
#include "inverted_residual.h"

namespace onnxtrain {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct InvertedResidual : Kernel {
  bool expands, has_residual;
  std::vector<int64_t> biases, expansion_strides, expansion_pads, strides, pads;
  Bounds bounds[3];

  explicit InvertedResidual(const Attributes& of)
      : expands(of.integer("expands", 0) != 0),
        has_residual(of.integer("has_residual", 0) != 0),
        biases(of.integers("biases")),
        expansion_strides(of.integers("expansion_strides")),
        expansion_pads(of.integers("expansion_pads")),
        strides(of.integers("strides")),
        pads(of.integers("pads")),
        bounds{{of.number("low_0", -kInfinity), of.number("high_0", kInfinity)},
               {of.number("low_1", -kInfinity), of.number("high_1", kInfinity)},
               {of.number("low_2", -kInfinity), of.number("high_2", kInfinity)}} {}

  void run(Run& run) const override {
    require(biases.size() == 3, "a block says of each of three convolutions whether it has a bias");
    Inputs inputs{run};
    const Tensor x = inputs.next();
    require(x.shape.size() == 4, "a block needs images: batch, channels, rows and columns");
    BlockShape block{expands, {}, {}, 0, {bounds[0], bounds[1], bounds[2]}};
    BlockData data{};
    data.x = x.floats();
    Shape wide = x.shape;
    if (expands) {
      const Tensor w = inputs.next();
      block.expansion = Window(expansion_strides, {}, expansion_pads, 1, false).padded(x.shape, w.shape);
      wide = {x.shape[0], w.shape[0], block.expansion.out[1], block.expansion.out[2]};
      data.weights[0] = w.floats(), data.biases[0] = inputs.bias(biases[0], w.shape[0]);
    }
    const Tensor w = inputs.next();
    require(w.shape.size() == 4 && w.shape[0] == wide[1], "the depthwise convolution has other channels than its image");
    block.depthwise = Window(strides, {}, pads, std::max<int64_t>(1, wide[1]), false).padded(wide, w.shape);
    data.weights[1] = w.floats(), data.biases[1] = inputs.bias(biases[1], wide[1]);
    const Tensor last = inputs.next();
    require(last.shape.size() == 4 && last.shape[1] == wide[1] && last.shape[2] == 1 && last.shape[3] == 1,
            "the last convolution of a block has 1×1 weights for the channels of the depthwise one");
    block.out_channels = last.shape[0];
    data.weights[2] = last.floats(), data.biases[2] = inputs.bias(biases[2], last.shape[0]);
    const Shape shape{x.shape[0], last.shape[0], block.depthwise.out[1], block.depthwise.out[2]};
    if (has_residual) {
      const Tensor residual = inputs.next();
      require(residual.shape == shape, "the residual has another shape than the output");
      data.residual = residual.floats();
    }
    elements_of(wide);
    Tensor y = run.output(0, shape);
    data.y = y.floats();
    if (y.elements > 0) inverted_residuals().forward(block, data, run.in_parallel());
  }

 private:
  // The inputs one by one.
  struct Inputs {
    const Run& run;
    size_t used = 0;

    Tensor next() {
      require(used < run.input_count(), "an input of a block is missing");
      return run.input(used++);
    }
    const float* bias(int64_t exists, int64_t channels) {
      return exists != 0 ? bias_of(next(), channels) : nullptr;
    }
  };
};

}  // namespace

std::vector<KernelKind> inverted_residual_kernels() {
  return {kind_of<InvertedResidual>("InvertedResidual", {kFloat})};
}

}  // namespace onnxtrain
