// Activations, Gelu(x), and their gradients, GeluGrad(dy, x) or SigmoidGrad(dy, y): one pass over
// memory each. Attributes are those of the ONNX operators.
#include "activation.h"

#include <algorithm>
#include <limits>

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

template <Pass Activations::*pass, Read read>
struct Forward : Kernel {
  Constants constants;
  explicit Forward(const Attributes& of) : constants(read(of)) {}
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

template <Pass Activations::*pass, Read read>
struct Gradient : Kernel {
  Constants constants;
  explicit Gradient(const Attributes& of) : constants(read(of)) {}
  void run(Run& run) const override {
    require(run.input_count() >= 2, "the gradient of an activation needs two inputs");
    const Tensor dy = run.input(0), other = run.input(1);
    require(dy.shape == other.shape, "the gradient has another shape than the activation");
    const float *first = dy.floats(), *second = other.floats();
    Tensor dx = run.output(0, dy.shape);
    over_chunks(run, activations().*pass, first, second, dx, constants);
  }
};

template <Pass Activations::*pass, Read read = nothing>
KernelKind forward(const char* name) {
  return kind_of<Forward<pass, read>>(name, {kFloat}, true);
}

template <Pass Activations::*pass, Read read = nothing>
KernelKind gradient(const char* name) {
  return kind_of<Gradient<pass, read>>(name, {kFloat}, true);
}

}  // namespace

std::vector<KernelKind> activation_kernels() {
  using A = Activations;
  return {
      forward<&A::elu, elu>("Elu"),
      forward<&A::gelu>("Gelu"),
      forward<&A::gelu_tanh>("GeluTanh"),
      forward<&A::hard_swish>("HardSwish"),
      forward<&A::mish>("Mish"),
      forward<&A::softplus>("Softplus"),
      forward<&A::swish, alpha<1000>>("Swish"),
      gradient<&A::celu_grad, celu>("CeluGrad"),
      gradient<&A::clip_grad, bounds>("ClipGrad"),
      gradient<&A::clip_inside_grad, bounds>("ClipInsideGrad"),
      gradient<&A::elu_grad, elu>("EluGrad"),
      gradient<&A::gelu_grad>("GeluGrad"),
      gradient<&A::gelu_tanh_grad>("GeluTanhGrad"),
      gradient<&A::hard_sigmoid_grad, alpha<200>>("HardSigmoidGrad"),
      gradient<&A::hard_swish_grad>("HardSwishGrad"),
      gradient<&A::leaky_relu_grad, alpha<10>>("LeakyReluGrad"),
      gradient<&A::mish_grad>("MishGrad"),
      gradient<&A::relu_grad>("ReluGrad"),
      gradient<&A::sigmoid_grad>("SigmoidGrad"),
      gradient<&A::softplus_grad>("SoftplusGrad"),
      gradient<&A::swish_grad, alpha<1000>>("SwishGrad"),
      gradient<&A::tanh_grad>("TanhGrad"),
  };
}

}  // namespace onnxtrain
