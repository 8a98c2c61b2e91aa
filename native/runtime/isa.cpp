#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace onnxtrain {
namespace {

Isa widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::portable;
}

Isa chosen() {
  const Isa most = widest();
  const char* wanted = std::getenv("ONNXTRAIN_ISA");
  for (const Isa each : {Isa::portable, Isa::avx2})
    if (wanted != nullptr && std::strcmp(wanted, isa_name(each)) == 0 && each < most) return each;
  return most;
}

}  // namespace

Isa isa() {
  static const Isa only = chosen();
  return only;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "portable";
  }
}

}  // namespace onnxtrain
