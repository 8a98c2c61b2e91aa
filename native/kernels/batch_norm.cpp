// BatchNorm(x, scale, bias, what is added to y if has_residual=1) -> y, mean, variance, an empty
// tensor in place of x - mean, mean and variance with as many axes as x, and an empty tensor in place
// of a second y, which BatchNormConvGradWeight computes again;
// BatchNormGrad(dy, x, scale, bias, mean, variance) -> dx, dscale, dbias; with frozen=1 the statistics
// are given ones. Outputs at the end may be left out. Attributes: epsilon; clipped=1 with low and high
// if y is clipped behind it, where the gradient passes between the bounds only.
#include "batch_norm_inputs.h"

#include <algorithm>

#include "families.h"

namespace onnxtrain {

BatchNormSettings::BatchNormSettings(const Attributes& of)
    : epsilon(of.number("epsilon", 1e-5f)),
      low(of.number("low", 0)),
      high(of.number("high", 0)),
      clipped(of.integer("clipped", 0) != 0) {}

BatchNormShape BatchNormSettings::shape_of(const Tensor& x) const {
  require(x.shape.size() >= 2, "BatchNormalization needs a batch and channels");
  int64_t plane = 1;
  for (size_t axis = 2; axis < x.shape.size(); ++axis) plane *= x.shape[axis];
  return {x.shape[0], x.shape[1], plane, epsilon, clipped, low, high};
}

const float* per_channel(const Tensor& given, const BatchNormShape& shape) {
  require(given.shape.size() == 1 && given.elements == shape.channels,
          "scale, bias, mean or variance have another size than the channels");
  return given.floats();
}

namespace {

// One number for each channel: an output, or memory of its own where nobody reads it.
struct ChannelOutput {
  std::vector<float> unread;
  float* data;

  ChannelOutput(Run& run, size_t index, const BatchNormShape& shape) {
    if (index >= run.output_count()) unread.resize(shape.channels);
    data = index < run.output_count() ? run.output(index, {shape.channels}).floats() : unread.data();
  }
};

struct BatchNorm : Kernel {
  BatchNormSettings settings;
  bool has_residual;
  explicit BatchNorm(const Attributes& of) : settings(of), has_residual(of.integer("has_residual", 0) != 0) {}
  void run(Run& run) const override {
    require(run.input_count() >= (has_residual ? 4u : 3u), "BatchNorm needs 3 inputs, or 4 with a residual");
    const Tensor x = run.input(0), scale = run.input(1), bias = run.input(2);
    const BatchNormShape shape = settings.shape_of(x);
    Tensor y = run.output(0, x.shape);
    ChannelOutput mean(run, 1, shape), variance(run, 2, shape);
    if (run.output_count() > 3) run.output(3, {0});
    const Tensor residual = has_residual ? run.input(3) : Tensor();
    require(!has_residual || residual.shape == x.shape, "the residual has another shape than the input");
    const float* added = has_residual ? residual.floats() : nullptr;
    const BatchNormForward of{
        x.floats(), per_channel(scale, shape), per_channel(bias, shape), added, y.floats(), mean.data, variance.data};
    batch_norm().forward(shape, of, run.in_parallel());
    Shape with_axes(x.shape.size(), 1);
    with_axes[1] = shape.channels;
    if (run.output_count() > 4) std::copy_n(mean.data, shape.channels, run.output(4, with_axes).floats());
    if (run.output_count() > 5) std::copy_n(variance.data, shape.channels, run.output(5, with_axes).floats());
    if (run.output_count() > 6) run.output(6, {0});
  }
};

struct BatchNormGrad : Kernel {
  BatchNormSettings settings;
  bool of_batch;
  explicit BatchNormGrad(const Attributes& of) : settings(of), of_batch(of.integer("frozen", 0) == 0) {}
  void run(Run& run) const override {
    require(run.input_count() >= 6, "BatchNormGrad needs 6 inputs");
    const Tensor dy = run.input(0), x = run.input(1), scale = run.input(2), bias = run.input(3);
    const Tensor mean = run.input(4), variance = run.input(5);
    const BatchNormShape shape = settings.shape_of(x);
    require(dy.shape == x.shape, "the gradient has another shape than the input");
    Tensor dx = run.output(0, x.shape);
    ChannelOutput dscale(run, 1, shape), dbias(run, 2, shape);
    const BatchNormBackward of{dy.floats(),
                               x.floats(),
                               per_channel(scale, shape),
                               per_channel(bias, shape),
                               per_channel(mean, shape),
                               per_channel(variance, shape),
                               of_batch,
                               dx.floats(),
                               dscale.data,
                               dbias.data};
    batch_norm().backward(shape, of, run.in_parallel());
  }
};

}  // namespace

std::vector<KernelKind> batch_norm_kernels() {
  return {kind_of<BatchNorm>("BatchNorm", {kFloat}), kind_of<BatchNormGrad>("BatchNormGrad", {kFloat})};
}

}  // namespace onnxtrain
