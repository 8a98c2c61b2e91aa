// The kernels of pools, with the attributes kernel_shape, strides, dilations and pads of the operators:
//
//   MaxPoolGrad(x, dy)             dx; of equal maxima, the first of a window gets the gradient
//   AveragePoolGrad(dy, …)         dx, with count_include_pad; its axes are the attribute sizes, or
//                                  input 1 is its whole shape
//   GlobalAveragePoolGrad(dy, …)   dx, the same
//
// How many windows there are is the size of dy.
#include "pool.h"

#include <algorithm>

#include "depthwise.h"
#include "families.h"

namespace onnxtrain {
namespace {

// What the attributes say; vectors may be empty, which means ones, or no padding.
struct Window {
  std::vector<int64_t> kernel, strides, dilations, pads;

  explicit Window(const Attributes& of)
      : kernel(of.integers("kernel_shape")),
        strides(of.integers("strides")),
        dilations(of.integers("dilations")),
        pads(of.integers("pads")) {}

  // The windows of dy on x, as a convolution whose groups have one channel each.
  Convolution of(const Shape& x, const Shape& dy) const {
    const size_t axes = kernel.size();
    require(axes >= 1 && axes <= kMostAxes && x.size() == axes + 2 && dy.size() == axes + 2,
            "a pool needs one to three axes beside batch and channels, the same in image and gradient");
    require(x[0] == dy[0] && x[1] == dy[1], "image and gradient have other batches or channels");
    require((strides.empty() || strides.size() == axes) && (dilations.empty() || dilations.size() == axes) &&
                (pads.empty() || pads.size() == 2 * axes),
            "strides, dilations or pads have another number of axes than the kernel");
    for (const int64_t pad : pads) require(pad >= 0 && pad < kMost, "padding is negative or too large");
    Convolution made{x[0], x[1], 1, 1, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}};
    for (size_t axis = 0; axis < axes; ++axis) {
      const size_t own = kMostAxes - axes + axis;
      made.in[own] = x[axis + 2];
      made.out[own] = dy[axis + 2];
      made.kernel[own] = kernel[axis];
      made.stride[own] = strides.empty() ? 1 : strides[axis];
      made.dilation[own] = dilations.empty() ? 1 : dilations[axis];
      made.pad[own] = pads.empty() ? 0 : pads[axis];
      require(std::min({made.kernel[own], made.stride[own], made.dilation[own]}) >= 1 && made.pad[own] >= 0,
              "kernel, strides and dilations have to be positive, padding not negative");
      require(std::max({made.in[own], made.out[own], made.kernel[own], made.stride[own], made.dilation[own],
                        made.pad[own]}) < kMost,
              "the image, its kernel, strides, dilations or padding are too large");
    }
    require(double(made.kernel[0]) * double(made.kernel[1]) * double(made.kernel[2]) <= kMostTaps,
            "the kernel is too large");
    return made;
  }

  // The padding behind an axis of `of`.
  int64_t after(int axis) const {
    const int64_t own = axis - (kMostAxes - static_cast<int64_t>(kernel.size()));
    return own < 0 || pads.empty() ? 0 : pads[kernel.size() + static_cast<size_t>(own)];
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 30, kMostTaps = int64_t{1} << 22;  // places are kept of all taps
};

// The shape of x: its axes as an attribute, or all of it as an input.
Shape shape_from(const Run& run, const std::vector<int64_t>& sizes, const Tensor& dy, size_t input) {
  require(dy.shape.size() >= 3, "the gradient has no axes beside batch and channels");
  Shape made{dy.shape[0], dy.shape[1]};
  if (!sizes.empty()) {
    made.insert(made.end(), sizes.begin(), sizes.end());
  } else {
    require(run.input_count() > input, "the shape of the image is missing");
    const Tensor given = run.input(input);
    require(given.shape.size() == 1 && given.elements <= 64, "a shape is a vector of int64");
    made.assign(given.integers(), given.integers() + given.elements);
  }
  elements_of(made);
  require(made.size() == dy.shape.size() && made[0] == dy.shape[0] && made[1] == dy.shape[1],
          "image and gradient have other axes, batches or channels");
  return made;
}

struct MaxPoolGrad : Kernel {
  Window window;

  explicit MaxPoolGrad(const Attributes& of) : window(of) {}
  void run(Run& run) const override {
    require(run.input_count() >= 2, "two inputs are needed");
    const Tensor x = run.input(0), dy = run.input(1);
    const Convolution planes = window.of(x.shape, dy.shape);
    Tensor dx = run.output(0, x.shape);
    if (dx.elements > 0) pool().max_gradient(planes, x.floats(), dy.floats(), dx.floats(), run.in_parallel());
  }
};

struct AveragePoolGrad : Kernel {
  Window window;
  std::vector<int64_t> sizes;
  bool counts_padding;

  explicit AveragePoolGrad(const Attributes& of)
      : window(of), sizes(of.integers("sizes")), counts_padding(of.integer("count_include_pad", 0) != 0) {}

  // The gradient of a convolution's input, whose weights are ones over the number of elements that
  // were averaged.
  void run(Run& run) const override {
    const Tensor dy = run.input(0);
    const Shape shape = shape_from(run, sizes, dy, 1);
    const Convolution planes = window.of(shape, dy.shape);
    const float* gradients = dy.floats();
    Tensor dx = run.output(0, shape);
    if (dx.elements == 0) return;
    if (dy.elements == 0) {
      std::fill_n(dx.floats(), dx.elements, 0.0f);
      return;
    }
    std::vector<float> shares[kMostAxes];
    for (int axis = 0; axis < kMostAxes; ++axis) shares[axis] = shares_of(planes, axis);
    const bool equal = std::all_of(shares, shares + kMostAxes, [](const std::vector<float>& own) {
      return std::all_of(own.begin(), own.end(), [&](float share) { return share == own[0]; });
    });
    std::vector<float> scaled;
    float weight = 1;
    if (equal)
      for (const auto& own : shares) weight *= own.empty() ? 1 : own[0];
    else
      scale(planes, shares, gradients, scaled, run), gradients = scaled.data();
    if (equal && pool().average_two_by_two(planes, weight, gradients, dx.floats(), run.in_parallel())) return;
    require(planes.taps() <= (int64_t{1} << 27) / planes.groups, "the kernel is too large for as many channels");
    const std::vector<float> weights(static_cast<size_t>(planes.groups * planes.taps()), weight);
    const auto gradient = depthwise().takes(planes) ? depthwise().input_gradient : compute().convolve_input_gradient;
    gradient(planes, gradients, weights.data(), dx.floats(), run.in_parallel());
  }

 private:
  // One over the number of taps of each window along an axis that count.
  std::vector<float> shares_of(const Convolution& planes, int axis) const {
    const int64_t low = counts_padding ? -planes.pad[axis] : 0;
    const int64_t high = planes.in[axis] + (counts_padding ? window.after(axis) : 0);
    std::vector<float> made;
    for (int64_t at = 0; at < planes.out[axis]; ++at) {
      const int64_t first = at * planes.stride[axis] - planes.pad[axis], step = planes.dilation[axis];
      const int64_t before = first >= low ? 0 : std::min(planes.kernel[axis], (low - first + step - 1) / step);
      const int64_t end = first >= high ? 0 : std::min(planes.kernel[axis], (high - first + step - 1) / step);
      made.push_back(1.0f / static_cast<float>(std::max<int64_t>(1, end - before)));
    }
    return made;
  }

  static void scale(const Convolution& planes, const std::vector<float>* shares, const float* gradients,
                    std::vector<float>& scaled, const Run& run) {
    const int64_t size = planes.out_size(), count = planes.batch * planes.groups;
    scaled.resize(static_cast<size_t>(size * count));
    const int64_t together = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, size));
    run.parallel((count + together - 1) / together, [&](int64_t task) {
      const float* from = gradients + task * together * size;
      float* to = scaled.data() + task * together * size;
      for (int64_t plane = task * together; plane < std::min(count, (task + 1) * together); ++plane)
        for (const float z : shares[0])
          for (const float y : shares[1])
            for (const float x : shares[2]) *to++ = *from++ * (z * y * x);
    });
  }
};

struct GlobalAveragePoolGrad : Kernel {
  std::vector<int64_t> sizes;

  explicit GlobalAveragePoolGrad(const Attributes& of) : sizes(of.integers("sizes")) {}
  void run(Run& run) const override {
    const Tensor dy = run.input(0);
    const Shape shape = shape_from(run, sizes, dy, 1);
    const int64_t planes = dy.shape[0] * dy.shape[1];
    require(dy.elements == planes, "the gradient has another shape than the output");
    const float* from = dy.floats();
    Tensor dx = run.output(0, shape);
    if (dx.elements == 0) return;
    const int64_t size = dx.elements / planes;
    pool().spread(planes, size, 1.0f / static_cast<float>(size), from, dx.floats(), run.in_parallel());
  }
};

}  // namespace

std::vector<KernelKind> pool_kernels() {
  return {kind_of<MaxPoolGrad>("MaxPoolGrad", {kFloat}), kind_of<AveragePoolGrad>("AveragePoolGrad", {kFloat}),
          kind_of<GlobalAveragePoolGrad>("GlobalAveragePoolGrad", {kFloat})};
}

}  // namespace onnxtrain
