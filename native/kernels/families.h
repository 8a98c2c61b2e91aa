// The families of kernels; all.cpp puts them together.
#pragma once

#include "kernel.h"

namespace onnxtrain {

std::vector<KernelKind> activation_kernels();
std::vector<KernelKind> attention_kernels();
std::vector<KernelKind> batch_norm_kernels();
std::vector<KernelKind> convolution_kernels();
std::vector<KernelKind> embedding_kernels();
std::vector<KernelKind> gradient_kernels();
std::vector<KernelKind> inverted_residual_kernels();
std::vector<KernelKind> loss_kernels();
std::vector<KernelKind> matmul_kernels();
std::vector<KernelKind> norm_kernels();
std::vector<KernelKind> optimizer_kernels();
std::vector<KernelKind> pool_kernels();
std::vector<KernelKind> quantized_kernels();
std::vector<KernelKind> recurrent_kernels();
std::vector<KernelKind> rotary_kernels();

}  // namespace onnxtrain
