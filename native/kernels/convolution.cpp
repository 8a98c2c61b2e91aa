// The kernels of convolutions, with the attributes strides, dilations, pads and group of the operator Conv:
//
//   Conv(x, w, bias?)             y; with has_bias
//   ConvGradInput(dy, w, …)       dx; its axes are the attribute sizes, or input 2 is its whole shape. With
//                                 has_bias, input 2 is added to its channels: a ConvTranspose.
//   ConvGradWeight(x, dy)         dw, with kernel_shape
//   BatchNormConvGradWeight(-, dy, x, scale, bias, mean, variance)
//                                 memory for the output of a BatchNorm, and dw of the convolution behind it
//   ConvGradBias(dy)              the sum of each channel
//
// With bf16, products round what they multiply to bfloat16 where the processor has instructions for it;
// sums stay float32. How many windows there are is the size of dy where it is given.
#include <algorithm>
#include <cmath>

#include "batch_norm_inputs.h"
#include "conv_window.h"
#include "depthwise.h"
#include "families.h"

namespace onnxtrain {
namespace {

// Whether each group has one input channel, and planes are computed by themselves; products elsewhere.
bool by_planes(const Convolution& conv) { return conv.groups > 1 && conv.in_channels == 1 && depthwise().takes(conv); }

void convolve(const Convolution& conv, const float* x, const float* w, const float* bias, float* y,
              const Parallel& parallel) {
  (by_planes(conv) ? depthwise().convolve : compute().convolve)(conv, x, w, bias, y, parallel);
}

void convolve_input_gradient(const Convolution& conv, const float* dy, const float* w, float* dx,
                             const Parallel& parallel) {
  (by_planes(conv) ? depthwise().input_gradient : compute().convolve_input_gradient)(conv, dy, w, dx, parallel);
}

void convolve_weight_gradient(const Convolution& conv, const float* x, const float* dy, float* dw,
                              const Parallel& parallel) {
  if (by_planes(conv)) {
    depthwise().weight_gradient(conv, x, dy, dw, parallel);
    const int64_t count = conv.groups * conv.out_channels * conv.taps();
    // Zeros beside the rows of a tile meet pixels that a tap does not read: they may be NaN or infinite.
    if (std::all_of(dw, dw + count, [](float each) { return std::isfinite(each); })) return;
  }
  compute().convolve_weight_gradient(conv, x, dy, dw, parallel);
}

struct Conv : Kernel {
  Window window;
  bool has_bias;

  explicit Conv(const Attributes& of) : window(of), has_bias(of.integer("has_bias", 0) != 0) {}
  void run(Run& run) const override {
    const Tensor x = run.input(0), w = run.input(1);
    const Convolution conv = window.padded(x.shape, w.shape);
    const float* bias = has_bias ? bias_of(run.input(2), w.shape[0]) : nullptr;
    Shape shape{x.shape[0], w.shape[0]};
    shape.insert(shape.end(), conv.out + kMostAxes - (x.shape.size() - 2), conv.out + kMostAxes);
    Tensor y = run.output(0, shape);
    if (y.elements > 0) convolve(conv, x.floats(), w.floats(), bias, y.floats(), run.in_parallel());
  }
};

struct ConvGradInput : Kernel {
  Window window;
  std::vector<int64_t> sizes;
  bool has_bias;

  explicit ConvGradInput(const Attributes& of)
      : window(of), sizes(of.integers("sizes")), has_bias(of.integer("has_bias", 0) != 0) {}
  void run(Run& run) const override {
    const Tensor dy = run.input(0), w = run.input(1);
    const Shape shape = shape_of_dx(run, dy, w);
    const Convolution conv = window.with(shape, w.shape, dy.shape);
    const float* bias = has_bias && !sizes.empty() ? bias_of(run.input(2), shape[1]) : nullptr;
    Tensor dx = run.output(0, shape);
    if (dx.elements == 0) return;
    convolve_input_gradient(conv, dy.floats(), w.floats(), dx.floats(), run.in_parallel());
    if (bias == nullptr) return;
    float* to = dx.floats();
    const int64_t pixels = conv.in_size();
    run.parallel(shape[0] * shape[1], [&](int64_t plane) {
      const float added = bias[plane % shape[1]];
      for (float *at = to + plane * pixels, *end = at + pixels; at < end; ++at) *at += added;
    });
  }

 private:
  Shape shape_of_dx(const Run& run, const Tensor& dy, const Tensor& w) const {
    require(dy.shape.size() >= 3 && w.shape.size() == dy.shape.size(), "the gradient and the weights have other axes");
    if (!sizes.empty()) {
      require(window.groups >= 1 && window.groups <= w.shape[0],
              "the channels of image and weights do not fit the groups");
      Shape made{dy.shape[0], w.shape[1] * window.groups};
      made.insert(made.end(), sizes.begin(), sizes.end());
      elements_of(made);
      return made;
    }
    const Tensor given = run.input(2);
    require(given.shape.size() == 1 && given.elements <= kMostAxes + 2, "a shape is a vector of int64");
    Shape made(given.integers(), given.integers() + given.elements);
    elements_of(made);
    return made;
  }
};

struct ConvGradWeight : Kernel {
  Window window;
  std::vector<int64_t> kernel;

  explicit ConvGradWeight(const Attributes& of) : window(of), kernel(of.integers("kernel_shape")) {}
  void run(Run& run) const override {
    const Tensor x = run.input(0), dy = run.input(1);
    const Shape shape = shape_of_dw(x, dy);
    Tensor dw = run.output(0, shape);
    differentiate(x, dy, dw, run);
  }

 protected:
  Shape shape_of_dw(const Tensor& x, const Tensor& dy) const {
    require(x.shape.size() >= 3 && dy.shape.size() == x.shape.size(), "the image and the gradient have other axes");
    require(window.groups >= 1 && x.shape[1] % window.groups == 0,
            "the channels of image and weights do not fit the groups");
    Shape shape{dy.shape[1], x.shape[1] / window.groups};
    shape.insert(shape.end(), kernel.begin(), kernel.end());
    elements_of(shape);
    window.with(x.shape, shape, dy.shape);  // or an error
    return shape;
  }

  void differentiate(const Tensor& x, const Tensor& dy, Tensor& dw, const Run& run) const {
    const Convolution conv = window.with(x.shape, dw.shape, dy.shape);
    const float *image = x.floats(), *gradient = dy.floats();
    if (x.elements == 0 || dy.elements == 0) {
      std::fill_n(dw.floats(), dw.elements, 0.0f);
      return;
    }
    if (dw.elements > 0) convolve_weight_gradient(conv, image, gradient, dw.floats(), run.in_parallel());
  }
};

struct BatchNormConvGradWeight : ConvGradWeight {
  BatchNormSettings settings;

  explicit BatchNormConvGradWeight(const Attributes& of) : ConvGradWeight(of), settings(of) {}
  void run(Run& run) const override {
    require(run.input_count() >= 7, "BatchNormConvGradWeight needs 7 inputs");
    const Tensor dy = run.input(1), x = run.input(2), scale = run.input(3), bias = run.input(4);
    Tensor mean = run.input(5), variance = run.input(6);
    const BatchNormShape norm = settings.shape_of(x);
    const Shape shape = shape_of_dw(x, dy);
    per_channel(mean, norm), per_channel(variance, norm);
    const float *scales = per_channel(scale, norm), *biases = per_channel(bias, norm), *from = x.floats();
    Tensor y = run.output(0, x.shape), dw = run.output(1, shape);
    batch_norm().apply(norm, {from, scales, biases, nullptr, y.floats(), mean.floats(), variance.floats()},
                       run.in_parallel());
    differentiate(y, dy, dw, run);
  }
};

// The sum of a line in parts that are short enough to keep their digits.
double sum_of(const float* from, int64_t count) {
  constexpr int64_t kPart = 256;
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += kPart) {
    float part = 0;
    for (int64_t i = begin; i < std::min(begin + kPart, count); ++i) part += from[i];
    sum += part;
  }
  return sum;
}

struct ConvGradBias : Kernel {
  explicit ConvGradBias(const Attributes&) {}
  void run(Run& run) const override {
    const Tensor dy = run.input(0);
    require(dy.shape.size() >= 2, "the gradient has no channels");
    const float* from = dy.floats();
    const int64_t batch = dy.shape[0], channels = dy.shape[1];
    Tensor db = run.output(0, {channels});
    float* to = db.floats();
    const int64_t pixels = channels == 0 || batch == 0 ? 0 : dy.elements / batch / channels;
    // Few elements are not worth the way to another thread.
    const int64_t together = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, batch * pixels));
    run.parallel((channels + together - 1) / together, [&](int64_t task) {
      for (int64_t c = task * together; c < std::min((task + 1) * together, channels); ++c) {
        double sum = 0;
        for (int64_t n = 0; n < batch; ++n) sum += sum_of(from + (n * channels + c) * pixels, pixels);
        to[c] = static_cast<float>(sum);
      }
    });
  }
};

}  // namespace

std::vector<KernelKind> convolution_kernels() {
  return {kind_of<Conv>("Conv", {kFloat}), kind_of<ConvGradInput>("ConvGradInput", {kFloat}),
          kind_of<ConvGradWeight>("ConvGradWeight", {kFloat}),
          kind_of<BatchNormConvGradWeight>("BatchNormConvGradWeight", {kFloat}),
          kind_of<ConvGradBias>("ConvGradBias", {kFloat})};
}

}  // namespace onnxtrain
