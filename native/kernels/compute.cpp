#include "compute.h"

namespace onnxtrain {

#define ONNXTRAIN_DECLARE(isa) \
  namespace isa {              \
  extern const Compute kCompute; \
  }
#if defined(__x86_64__)
ONNXTRAIN_DECLARE(portable)
ONNXTRAIN_DECLARE(avx2)
ONNXTRAIN_DECLARE(avx512)
#else
ONNXTRAIN_DECLARE(portable)
#endif

const Compute& compute() {
#if defined(__x86_64__)
  static const Compute& chosen = [&]() -> const Compute& {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
      return avx512::kCompute;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kCompute;
    return portable::kCompute;
  }();
  return chosen;
#else
  return portable::kCompute;
#endif
}

}  // namespace onnxtrain
