// The families of kernels; all.cpp puts them together.
#pragma once

#include "kernel.h"

namespace onnxtrain {

std::vector<KernelKind> convolution_kernels();
std::vector<KernelKind> optimizer_kernels();
std::vector<KernelKind> gradient_kernels();

}  // namespace onnxtrain
