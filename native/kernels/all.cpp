// All kernels: each family lists its own.
#include "families.h"

namespace onnxtrain {

const std::vector<KernelKind>& kernel_kinds() {
  static const std::vector<KernelKind> all = [] {
    std::vector<KernelKind> found;
    for (const auto family : {convolution_kernels, optimizer_kernels, gradient_kernels})
      for (KernelKind& kind : family()) found.push_back(std::move(kind));
    return found;
  }();
  return all;
}

}  // namespace onnxtrain
