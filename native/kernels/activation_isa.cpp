// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "activation.h"

#include "sums.h"
#include "vector_math.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

// ---- over memory --------------------------------------------------------------------------------

using Unary = Vector (*)(Vector x, Constants);
using Binary = Vector (*)(Vector dy, Vector x_or_y, Constants);

// The first elements of a vector that ends before a whole one.
struct Rest {
  alignas(64) float values[kLanes] = {};

  Rest(const float* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) values[i] = from[i];
  }
  void copy_to(float* to, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) to[i] = values[i];
  }
};

template <Unary function>
void pass(const float* x, const float*, float* y, int64_t count, Constants of) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, function(load(x + i), of));
  if (i == count) return;
  Rest rest(x + i, count - i);
  store(rest.values, function(load(rest.values), of));
  rest.copy_to(y + i, count - i);
}

template <Binary function>
void pass(const float* dy, const float* other, float* dx, int64_t count, Constants of) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(dx + i, function(load(dy + i), load(other + i), of));
  if (i == count) return;
  Rest rest(dy + i, count - i), second(other + i, count - i);
  store(rest.values, function(load(rest.values), load(second.values), of));
  rest.copy_to(dx + i, count - i);
}

// ---- piecewise linear ---------------------------------------------------------------------------

Vector relu_grad(Vector dy, Vector y, Constants) { return y > 0.0f ? dy : Vector{}; }

void add_relu_grad(const float* dy, const float* more, const float* y, float* dx, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dx[i] = y[i] > 0.0f ? dy[i] + more[i] : 0.0f;
}

double prelu_grad(const float* dy, const float* x, float slope, int64_t count, float* dx) {
  Sums<1> sums;
  sums.add(count, [&](auto way, int64_t i, auto* terms) {
    const auto given = way.get(dy + i), at = way.get(x + i);
    way.put(dx + i, at > 0.0f ? given : given * slope);
    terms[0] = at > 0.0f ? decltype(given * at){} : given * at;
  });
  return sums.total(0);
}

Vector leaky_relu_grad(Vector dy, Vector x, Constants of) { return x > 0.0f ? dy : dy * of.alpha; }

// From alpha to beta, both included.
Vector clip_grad(Vector dy, Vector x, Constants of) {
  const Vector kept = x >= of.alpha ? dy : Vector{};
  return x <= of.beta ? kept : Vector{};
}

// Between alpha and beta, which are not included.
Vector clip_inside_grad(Vector dy, Vector x, Constants of) {
  const Vector kept = x > of.alpha ? dy : Vector{};
  return x < of.beta ? kept : Vector{};
}

Vector hard_sigmoid_grad(Vector dy, Vector y, Constants of) { return clip_inside_grad(dy * of.alpha, y, {0.0f, 1.0f}); }

Vector hard_swish(Vector x, Constants) { return x * vmin(vmax(x * (1.0f / 6.0f) + 0.5f, Vector{}), broadcast(1.0f)); }

Vector hard_swish_grad(Vector dy, Vector x, Constants) {
  const Vector slope = x < 3.0f ? x * (1.0f / 3.0f) + 0.5f : broadcast(1.0f);
  return x > -3.0f ? dy * slope : Vector{};
}

// ---- exponential --------------------------------------------------------------------------------

Vector sigmoid_grad(Vector dy, Vector y, Constants) { return dy * (y * (1.0f - y)); }

Vector tanh_grad(Vector dy, Vector y, Constants) { return dy * (1.0f - y * y); }

Vector softplus(Vector x, Constants) { return vsoftplus(x); }

Vector softplus_grad(Vector dy, Vector x, Constants) { return dy * vsigmoid(x); }

// beta x above 0, alpha (exp(x) - 1) below, where alpha is both factors of Selu.
Vector elu(Vector x, Constants of) { return x > 0.0f ? x * of.beta : of.alpha * vexpm1(vmin(x, Vector{})); }

Vector elu_grad(Vector dy, Vector x, Constants of) {
  return dy * (x > 0.0f ? broadcast(of.beta) : of.alpha * small_exp(clamped(x, -87.0f, 0.0f)));
}

// Alpha is one over the alpha of Celu.
Vector celu_grad(Vector dy, Vector x, Constants of) {
  return dy * (x > 0.0f ? broadcast(1.0f) : vexp(x * of.alpha));  // which grows where alpha is negative
}

// sigmoid(x), and sigmoid(-x), which is 1 - sigmoid(x) without the rounding.
struct Sigmoids {
  Vector s, other;

  explicit Sigmoids(Vector x) {
    const Vector e = small_exp(clamped(-x, -87.0f, 85.0f));
    const Vector found = 1.0f / (1.0f + e);
    s = x < -85.0f ? Vector{} : found;  // what is left beyond would be multiplied by x
    other = x > 87.0f ? Vector{} : as_rounded(e * found);  // e times something else could be infinite
  }
};

Vector swish(Vector x, Constants of) { return x * vsigmoid(x * of.alpha); }

// With s = sigmoid(alpha x): (s + alpha x s (1 - s)) dy.
Vector swish_grad(Vector dy, Vector x, Constants of) {
  const Vector scaled = x * of.alpha;
  const Sigmoids at(scaled);
  return dy * (at.s * (scaled * at.other + 1.0f));
}

// tanh(log(1 + e)) = n / (n + 2) with e = exp(x) and n = e (e + 2). From 20 on it is 1.
struct MishParts {
  Vector e, n, inverse;

  explicit MishParts(Vector x)
      : e(x < -87.0f ? Vector{} : small_exp(clamped(x, -87.0f, 20.0f))), n(e * (e + 2.0f)), inverse(1.0f / (n + 2.0f)) {}
};

Vector mish(Vector x, Constants) {
  const MishParts of(x);
  return x * as_rounded(of.n * of.inverse);  // x n could be infinite
}

Vector mish_grad(Vector dy, Vector x, Constants) {
  const MishParts of(x);
  const Vector slope = (of.e * (of.e + 1.0f) * of.inverse) * (4.0f * of.inverse);
  return dy * (of.n * of.inverse + (x > 20.0f ? Vector{} : x * slope));
}

// ---- Gelu ---------------------------------------------------------------------------------------

Vector gelu(Vector x, Constants) { return x * vnormal(x).below; }

Vector gelu_grad(Vector dy, Vector x, Constants) {
  const Normal at = vnormal(x);
  return dy * (at.below + x * at.density);
}

constexpr float kScale = 0.797884561f, kCube = 0.044715f;  // √(2/π), and the factor of x³

// (1 + tanh(u)) / 2 is sigmoid(2u), with u = √(2/π) (x + c x³).
Vector gelu_tanh(Vector x, Constants) { return x * vsigmoid(x * (x * x * (2.0f * kScale * kCube) + 2.0f * kScale)); }

Vector gelu_tanh_grad(Vector dy, Vector x, Constants) {
  const Vector near = clamped(x, -30.0f, 30.0f);  // beyond, the gradient is 0 or 1 to the last digit
  const Vector square = near * near;
  const Sigmoids at(near * (square * (2.0f * kScale * kCube) + 2.0f * kScale));
  const Vector slope = near * (square * (6.0f * kScale * kCube) + 2.0f * kScale);
  return dy * (at.s * (slope * at.other + 1.0f));
}

}  // namespace

const Activations kActivations = {
    pass<elu>,          pass<gelu>,          pass<gelu_tanh>,      pass<hard_swish>,        pass<mish>,
    pass<softplus>,     pass<swish>,         pass<celu_grad>,      pass<clip_grad>,         pass<clip_inside_grad>,
    pass<elu_grad>,     pass<gelu_grad>,     pass<gelu_tanh_grad>, pass<hard_swish_grad>,   pass<leaky_relu_grad>,
    pass<mish_grad>,    pass<softplus_grad>, pass<swish_grad>,     pass<hard_sigmoid_grad>, pass<relu_grad>,
    pass<sigmoid_grad>, pass<tanh_grad>,     add_relu_grad,       prelu_grad,
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
