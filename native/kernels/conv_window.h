// The windows of a convolution, from the attributes of the operator Conv and the shapes of its inputs.
#pragma once

#include <algorithm>

#include "compute.h"
#include "kernel.h"

namespace onnxtrain {

// What the attributes say; vectors may be empty, which means ones, or no padding.
struct Window {
  std::vector<int64_t> strides, dilations, pads;
  int64_t groups;
  bool bf16;

  explicit Window(const Attributes& of)
      : Window(of.integers("strides"), of.integers("dilations"), of.integers("pads"), of.integer("group", 1),
               of.integer("bf16", 0) != 0) {}
  Window(std::vector<int64_t> strides, std::vector<int64_t> dilations, std::vector<int64_t> pads, int64_t groups,
         bool bf16)
      : strides(std::move(strides)),
        dilations(std::move(dilations)),
        pads(std::move(pads)),
        groups(groups),
        bf16(bf16) {}

  // The convolution of an image and weights, if they fit each other.
  Convolution of(const Shape& x, const Shape& w) const {
    const int64_t axes = static_cast<int64_t>(x.size()) - 2;
    require(axes >= 1 && axes <= kMostAxes && w.size() == x.size(),
            "a convolution needs one to three axes beside batch and channels, the same in image and weights");
    require(groups >= 1 && groups <= std::max<int64_t>(1, x[1]) && w[0] % groups == 0 && w[1] <= x[1] &&
                x[1] == w[1] * groups,
            "the channels of image and weights do not fit the groups");
    Convolution made{x[0],      groups,    w[1],      w[0] / groups, {1, 1, 1}, {1, 1, 1},
                     {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0},     bf16};
    for (int64_t axis = 0; axis < axes; ++axis) {
      const int64_t own = kMostAxes - axes + axis;
      made.in[own] = x[axis + 2];
      made.kernel[own] = w[axis + 2];
      made.stride[own] = value(strides, axis, axes);
      made.dilation[own] = value(dilations, axis, axes);
      made.pad[own] = pad(axis, axes, 0);
      require(std::min({made.kernel[own], made.stride[own], made.dilation[own]}) >= 1 && made.pad[own] >= 0,
              "kernel, strides and dilations have to be positive, padding not negative");
      require(std::max({made.in[own], made.kernel[own], made.stride[own], made.dilation[own], made.pad[own]}) < kMost,
              "the image, its kernel, strides, dilations or padding are too large");
    }
    return made;
  }

  // The same with as many windows as the padding leaves room for.
  Convolution padded(const Shape& x, const Shape& w) const {
    Convolution made = of(x, w);
    const int64_t axes = static_cast<int64_t>(x.size()) - 2;
    for (int64_t axis = 0; axis < axes; ++axis) {
      const int64_t own = kMostAxes - axes + axis, after = pad(axis, axes, 1);
      require(after >= 0 && after < kMost, "the padding is out of range");
      const int64_t reach = made.in[own] + made.pad[own] + after - made.dilation[own] * (made.kernel[own] - 1) - 1;
      require(reach >= 0, "the kernel is larger than the padded image");
      made.out[own] = reach / made.stride[own] + 1;
    }
    return made;
  }

  // The same with as many windows as there are gradients.
  Convolution with(const Shape& x, const Shape& w, const Shape& dy) const {
    Convolution made = of(x, w);
    require(dy.size() == x.size() && dy[0] == x[0] && dy[1] == w[0],
            "the gradient does not fit the image and the weights");
    for (size_t axis = 2; axis < dy.size(); ++axis) {
      require(dy[axis] < kMost, "the gradient is too large");
      made.out[kMostAxes - dy.size() + axis] = dy[axis];
    }
    return made;
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 30;

  static int64_t value(const std::vector<int64_t>& given, int64_t axis, int64_t axes) {
    require(given.empty() || static_cast<int64_t>(given.size()) == axes,
            "strides or dilations have another number of axes than the image");
    return given.empty() ? 1 : given[axis];
  }
  int64_t pad(int64_t axis, int64_t axes, int64_t side) const {
    require(pads.empty() || static_cast<int64_t>(pads.size()) == 2 * axes,
            "pads have another number of axes than the image");
    return pads.empty() ? 0 : pads[side * axes + axis];
  }
};

// The bias of as many channels, if there is one.
inline const float* bias_of(const Tensor& given, int64_t channels) {
  require(given.elements == channels, "the bias has another size than the channels");
  return given.floats();
}

}  // namespace onnxtrain
