// Conv(x, w, bias?), ConvGradInput(dy, w, shape of x) and ConvGradWeight(x, dy, shape of w), with
// the attributes strides, dilations, pads and group as Conv has them.
#include <algorithm>

#include "compute.h"
#include "families.h"

namespace onnxtrain {
namespace {

// What the attributes say; vectors may be empty, which means ones, or no padding.
struct Window {
  std::vector<int64_t> strides, dilations, pads;
  int64_t groups;

  explicit Window(const Attributes& of)
      : strides(of.integers("strides")), dilations(of.integers("dilations")), pads(of.integers("pads")), groups(of.integer("group", 1)) {}

  // The convolution of an image and weights, if they fit each other.
  Convolution of(const Shape& x, const Shape& w) const {
    const int64_t axes = static_cast<int64_t>(x.size()) - 2;
    require(axes >= 1 && axes <= kMostAxes && w.size() == x.size(), "a convolution needs one to three axes beside batch and channels, the same in image and weights");
    require(groups >= 1 && w[0] % groups == 0 && x[1] == w[1] * groups, "channels of image and weights do not fit the groups");
    Convolution made{x[0], groups, w[1], w[0] / groups, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}};
    for (int64_t axis = 0; axis < axes; ++axis) {
      const int64_t own = kMostAxes - axes + axis;
      const int64_t before = pad(axis, axes, 0), after = pad(axis, axes, 1);
      made.in[own] = x[axis + 2];
      made.kernel[own] = w[axis + 2];
      made.stride[own] = value(strides, axis, axes);
      made.dilation[own] = value(dilations, axis, axes);
      made.pad[own] = before;
      require(made.kernel[own] >= 1 && made.stride[own] >= 1 && made.dilation[own] >= 1, "kernel, strides and dilations have to be positive");
      require(before >= 0 && after >= 0 && std::max({before, after, made.kernel[own], made.stride[own], made.dilation[own]}) < kMost, "padding, kernel, strides or dilations are out of range");
      const int64_t reach = made.in[own] + before + after - made.dilation[own] * (made.kernel[own] - 1) - 1;
      require(reach >= 0, "the kernel is larger than the padded image");
      made.out[own] = reach / made.stride[own] + 1;
    }
    return made;
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 31;

  static int64_t value(const std::vector<int64_t>& given, int64_t axis, int64_t axes) {
    require(given.empty() || static_cast<int64_t>(given.size()) == axes, "strides or dilations have another number of axes than the image");
    return given.empty() ? 1 : given[axis];
  }
  int64_t pad(int64_t axis, int64_t axes, int64_t side) const {
    require(pads.empty() || static_cast<int64_t>(pads.size()) == 2 * axes, "pads have another number of axes than the image");
    return pads.empty() ? 0 : pads[side * axes + axis];
  }
};

Shape output_shape(const Convolution& conv, const Shape& x, const Shape& w) {
  Shape made{x[0], w[0]};
  for (size_t axis = 2; axis < x.size(); ++axis) made.push_back(conv.out[kMostAxes - x.size() + axis]);
  return made;
}

Shape shape_from(const Tensor& vector) {
  require(vector.shape.size() == 1 && vector.elements <= 8, "a shape is a vector of int64");
  Shape made(vector.integers(), vector.integers() + vector.elements);
  elements_of(made);
  return made;
}

struct Conv : Kernel {
  Window window;
  explicit Conv(const Attributes& of) : window(of), has_bias(of.integer("has_bias", 0) != 0) {}
  void run(Run& run) const override {
    const Tensor x = run.input(0), w = run.input(1);
    const Convolution conv = window.of(x.shape, w.shape);
    const float* bias = nullptr;
    if (has_bias) {
      const Tensor given = run.input(2);
      require(given.elements == w.shape[0], "the bias has another size than the channels");
      bias = given.floats();
    }
    Tensor y = run.output(0, output_shape(conv, x.shape, w.shape));
    if (y.elements > 0) compute().convolve(conv, x.floats(), w.floats(), bias, y.floats(), run.in_parallel());
  }
  bool has_bias;
};

struct ConvGradInput : Kernel {
  Window window;
  explicit ConvGradInput(const Attributes& of) : window(of) {}
  void run(Run& run) const override {
    const Tensor dy = run.input(0), w = run.input(1);
    const Shape shape = shape_from(run.input(2));
    const Convolution conv = window.of(shape, w.shape);
    require(dy.shape == output_shape(conv, shape, w.shape), "the gradient has another shape than the output of the convolution");
    Tensor dx = run.output(0, shape);
    if (dx.elements > 0) compute().convolve_input_gradient(conv, dy.floats(), w.floats(), dx.floats(), run.in_parallel());
  }
};

struct ConvGradWeight : Kernel {
  Window window;
  explicit ConvGradWeight(const Attributes& of) : window(of) {}
  void run(Run& run) const override {
    const Tensor x = run.input(0), dy = run.input(1);
    const Shape shape = shape_from(run.input(2));
    const Convolution conv = window.of(x.shape, shape);
    require(dy.shape == output_shape(conv, x.shape, shape), "the gradient has another shape than the output of the convolution");
    Tensor dw = run.output(0, shape);
    if (dw.elements > 0) compute().convolve_weight_gradient(conv, x.floats(), dy.floats(), dw.floats(), run.in_parallel());
  }
};

}  // namespace

std::vector<KernelKind> convolution_kernels() {
  return {kind_of<Conv>("Conv", {kFloat}), kind_of<ConvGradInput>("ConvGradInput", {kFloat}), kind_of<ConvGradWeight>("ConvGradWeight", {kFloat})};
}

}  // namespace onnxtrain
