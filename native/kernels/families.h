// The families of kernels; all.cpp puts them together.
#pragma once

#include "kernel.h"

namespace onnxtrain {

std::vector<KernelKind> batch_norm_kernels();
std::vector<KernelKind> convolution_kernels();
std::vector<KernelKind> norm_kernels();
std::vector<KernelKind> optimizer_kernels();

}  // namespace onnxtrain
