// Activations and their gradients, element by element.
#pragma once

#include <cstdint>

#include "isa.h"

namespace onnxtrain {

// What the attributes of an activation say.
struct Constants {
  float alpha, beta;
};

// Writes a function of one tensor, or of two. The output may be one of the inputs.
using Pass = void (*)(const float* first, const float* second, float* y, int64_t count, Constants constants);

// Writes dx from two parts of dy and y.
using SumPass = void (*)(const float* dy, const float* more, const float* y, float* dx, int64_t count);

// Writes dx of a PRelu where one slope holds, and returns what that adds to the gradient of the slope.
using SlopePass = double (*)(const float* dy, const float* x, float slope, int64_t count, float* dx);

// Forward passes read x; gradients read dy, and then x or y.
struct Activations {
  Pass elu, gelu, gelu_tanh, hard_swish, mish, softplus, swish;
  Pass celu_grad, clip_grad, clip_inside_grad, elu_grad, gelu_grad, gelu_tanh_grad, hard_swish_grad, leaky_relu_grad,
      mish_grad, softplus_grad, swish_grad;
  Pass hard_sigmoid_grad, relu_grad, sigmoid_grad, tanh_grad;  // these read y
  SumPass add_relu_grad;
  SlopePass prelu_grad;
};

ONNXTRAIN_TABLE(Activations, kActivations, activations)

}  // namespace onnxtrain
