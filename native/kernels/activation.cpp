// Activations, Gelu(x), and their gradients, GeluGrad(dy, x) or SigmoidGrad(dy, y): one pass over
// memory each. Attributes are those of the ONNX operators. GeluOnce and GeluTanhOnce leave an empty
// tensor in place of a copy of y; with it, GeluGradAgain(dy, x, empty) -> dx, y and GeluTanhGradAgain
// compute y once more. AddReluGrad(dy, more, y) is the gradient of a Relu whose result is read twice,
// as at the end of a residual block. PReluGrad(dy, x, slope) -> dx, dslope, where slopes lie along one axis at most;
// dslope may be left out.
#include "activation.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "families.h"

namespace onnxtrain {
namespace {

constexpr int64_t kChunk = 16384;

// How an activation reads its attributes.
using Read = Constants (*)(const Attributes&);

Constants nothing(const Attributes&) { return {0.0f, 0.0f}; }

template <int thousandths>
Constants alpha(const Attributes& of) {
  return {of.number("alpha", thousandths / 1000.0f), 0.0f};
}

Constants elu(const Attributes& of) {
  const float gamma = of.number("gamma", 1.0f);
  return {of.number("alpha", 1.0f) * gamma, gamma};
}

Constants celu(const Attributes& of) {
  const float alpha = of.number("alpha", 1.0f);
  require(alpha != 0.0f, "alpha of Celu is zero");
  return {1.0f / alpha, 0.0f};
}

Constants bounds(const Attributes& of) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  return {of.number("low", -infinity), of.number("high", infinity)};
}

// The second tensor is missing in forward passes.
void over_chunks(const Run& run, Pass pass, const float* first, const float* second, Tensor& y, Constants constants) {
  float* to = y.floats();
  run.parallel((y.elements + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t begin = chunk * kChunk, count = std::min(kChunk, y.elements - begin);
    pass(first + begin, second == nullptr ? nullptr : second + begin, to + begin, count, constants);
  });
}

template <Pass Activations::* pass, Read read>
struct OfOne : Kernel {
  Constants constants;
  explicit OfOne(const Attributes& of) : constants(read(of)) {}
  void run(Run& run) const override {
    require(run.input_count() >= 1, "an activation needs an input");
    const Tensor x = run.input(0);
    const float* from = x.floats();
    Tensor y = run.output(0, x.shape);
    over_chunks(run, activations().*pass, from, nullptr, y, constants);
    // What the plain form saves for its gradient, which the kernel of the gradient does not read.
    for (size_t index = 1; index < run.output_count(); ++index) run.output(index, {0});
  }
};

// With `again`, the activation of the second input is another output.
template <Pass Activations::* pass, Read read, Pass Activations::* again>
struct OfTwo : Kernel {
  Constants constants;
  explicit OfTwo(const Attributes& of) : constants(read(of)) {}
  void run(Run& run) const override {
    require(run.input_count() >= 2, "an input is missing, two are needed");
    const Tensor dy = run.input(0), other = run.input(1);
    require(dy.shape == other.shape, "the inputs have different shapes");
    const float *first = dy.floats(), *second = other.floats();
    if constexpr (again != nullptr)
      if (run.output_count() > 1) {
        Tensor y = run.output(1, other.shape);
        over_chunks(run, activations().*again, second, nullptr, y, constants);
      }
    Tensor dx = run.output(0, dy.shape);
    over_chunks(run, activations().*pass, first, second, dx, constants);
  }
};

struct AddReluGrad : Kernel {
  explicit AddReluGrad(const Attributes&) {}
  void run(Run& run) const override {
    require(run.input_count() >= 3, "an input is missing, three are needed");
    const Tensor dy = run.input(0), more = run.input(1), y = run.input(2);
    require(dy.shape == more.shape && dy.shape == y.shape, "the inputs have different shapes");
    const float *first = dy.floats(), *second = more.floats(), *of = y.floats();
    Tensor dx = run.output(0, dy.shape);
    float* to = dx.floats();
    run.parallel((dx.elements + kChunk - 1) / kChunk, [&](int64_t chunk) {
      const int64_t begin = chunk * kChunk, count = std::min(kChunk, dx.elements - begin);
      activations().add_relu_grad(first + begin, second + begin, of + begin, to + begin, count);
    });
  }
};

struct PReluGrad : Kernel {
  explicit PReluGrad(const Attributes&) {}
  void run(Run& run) const override {
    require(run.input_count() >= 3, "an input is missing, three are needed");
    const Tensor dy = run.input(0), x = run.input(1), slope = run.input(2);
    require(dy.shape == x.shape, "the inputs have different shapes");
    const int64_t behind = elements_behind(x, slope), slopes = slope.elements;
    const float *first = dy.floats(), *second = x.floats(), *factors = slope.floats();
    float* to = run.output(0, x.shape).floats();
    float* dslope = run.output_count() > 1 ? run.output(1, slope.shape).floats() : nullptr;
    // With a single slope, rows are chunks of the tensor, and the last one may be shorter.
    const int64_t width = slopes == 1 ? std::min(kChunk, x.elements) : behind, stride = slopes * width;
    const int64_t rows = stride == 0 ? 0 : (x.elements + stride - 1) / stride;
    const int64_t parts = rows == 0 ? 0 : std::min(rows, (kTasks + slopes - 1) / slopes);
    std::vector<double> sums(slopes * parts);
    run.parallel(slopes * parts, [&](int64_t task) {
      const int64_t own = task / parts, part = task % parts;
      const int64_t begin = rows * part / parts * stride, end = std::min(x.elements, rows * (part + 1) / parts * stride);
      for (int64_t at = begin + own * width; at < end; at += stride)
        sums[task] += activations().prelu_grad(first + at, second + at, factors[own], std::min(width, end - at), to + at);
    });
    for (int64_t own = 0; dslope != nullptr && own < slopes; ++own)
      dslope[own] = static_cast<float>(std::accumulate(sums.data() + own * parts, sums.data() + (own + 1) * parts, 0.0));
  }

 private:
  static constexpr int64_t kTasks = 16;

  // How many elements of x lie behind the axis that has a slope for each place; all where there is one slope.
  static int64_t elements_behind(const Tensor& x, const Tensor& slope) {
    require(slope.shape.size() <= x.shape.size(), "the slope has more axes than the input");
    int64_t behind = 1, found = -1;
    for (size_t from_last = 1; from_last <= slope.shape.size(); ++from_last) {
      const int64_t size = slope.shape[slope.shape.size() - from_last], own = x.shape[x.shape.size() - from_last];
      if (size != 1) {
        require(found < 0, "slopes lie along more than one axis");
        require(size == own, "the slope does not fit the input");
        found = behind;
      }
      behind *= own;
    }
    return found < 0 ? x.elements : found;
  }
};

template <Pass Activations::* pass, Read read = nothing>
KernelKind of_one(const char* name) {
  return kind_of<OfOne<pass, read>>(name, {kFloat}, true);
}

template <Pass Activations::* pass, Read read = nothing, Pass Activations::* again = nullptr>
KernelKind of_two(const char* name) {
  return kind_of<OfTwo<pass, read, again>>(name, {kFloat}, true);
}

}  // namespace

std::vector<KernelKind> activation_kernels() {
  using A = Activations;
  return {
      kind_of<AddReluGrad>("AddReluGrad", {kFloat}, true),
      kind_of<PReluGrad>("PReluGrad", {kFloat}, true),
      of_one<&A::elu, elu>("Elu"),
      of_one<&A::gelu>("Gelu"),
      of_one<&A::gelu>("GeluOnce"),
      of_one<&A::gelu_tanh>("GeluTanh"),
      of_one<&A::gelu_tanh>("GeluTanhOnce"),
      of_one<&A::hard_swish>("HardSwish"),
      of_one<&A::mish>("Mish"),
      of_one<&A::softplus>("Softplus"),
      of_one<&A::swish, alpha<1000>>("Swish"),
      of_two<&A::celu_grad, celu>("CeluGrad"),
      of_two<&A::clip_grad, bounds>("ClipGrad"),
      of_two<&A::clip_inside_grad, bounds>("ClipInsideGrad"),
      of_two<&A::elu_grad, elu>("EluGrad"),
      of_two<&A::gelu_grad>("GeluGrad"),
      of_two<&A::gelu_grad, nothing, &A::gelu>("GeluGradAgain"),
      of_two<&A::gelu_tanh_grad>("GeluTanhGrad"),
      of_two<&A::gelu_tanh_grad, nothing, &A::gelu_tanh>("GeluTanhGradAgain"),
      of_two<&A::hard_sigmoid_grad, alpha<200>>("HardSigmoidGrad"),
      of_two<&A::hard_swish_grad>("HardSwishGrad"),
      of_two<&A::leaky_relu_grad, alpha<10>>("LeakyReluGrad"),
      of_two<&A::mish_grad>("MishGrad"),
      of_two<&A::relu_grad>("ReluGrad"),
      of_two<&A::sigmoid_grad>("SigmoidGrad"),
      of_two<&A::softplus_grad>("SoftplusGrad"),
      of_two<&A::swish_grad, alpha<1000>>("SwishGrad"),
      of_two<&A::tanh_grad>("TanhGrad"),
  };
}

}  // namespace onnxtrain
