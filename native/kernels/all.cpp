// All kernels: each family lists its own.
#include "families.h"

namespace onnxtrain {

const std::vector<KernelKind>& kernel_kinds() {
  static const std::vector<KernelKind> all = [] {
    std::vector<KernelKind> found;
    for (const auto family : {
             activation_kernels,
             attention_kernels,
             batch_norm_kernels,
             convolution_kernels,
             embedding_kernels,
             gradient_kernels,
             inverted_residual_kernels,
             loss_kernels,
             matmul_kernels,
             norm_kernels,
             optimizer_kernels,
             pool_kernels,
             quantized_kernels,
             recurrent_kernels,
             rotary_kernels,
         })
      for (KernelKind& kind : family()) found.push_back(std::move(kind));
    return found;
  }();
  return all;
}

}  // namespace onnxtrain
