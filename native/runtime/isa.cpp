#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace onnxtrain {
namespace {

#if defined(__aarch64__)
constexpr char kPortable[] = "neon";
#else
constexpr char kPortable[] = "portable";
#endif

#if defined(__x86_64__)
// Whether the processor has a matrix unit for bfloat16 and the system lets this process use it.
bool has_matrix_unit() {
#if defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;  // of leaf 7
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTiles) == 0) return false;
  // The state of the tiles is large: Linux keeps room for it only for processes that ask.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Isa widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return has_matrix_unit() ? Isa::amx : Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // of AT_HWCAP2
  if ((getauxval(AT_HWCAP2) & kBf16) != 0) return Isa::neon_bf16;
#endif
  return Isa::portable;
}

const char* named() { return std::getenv("ONNXTRAIN_ISA"); }

Isa chosen() {
  const Isa most = widest();
  const char* wanted = named();
  for (const Isa each : {Isa::portable, Isa::avx2, Isa::avx512})
    if (wanted != nullptr && std::strcmp(wanted, isa_name(each)) == 0 && each < most) return each;
  return most;
}

// The instruction of AVX-512 takes as long as four multiplications of floats on processors of Intel, so that
// floats are faster. Whoever names the instruction set gets it all the same, as tests do.
bool pairs_pay() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && (!__builtin_cpu_is("intel") || named() != nullptr);
#else
  return false;
#endif
}

}  // namespace

Isa isa() {
  static const Isa only = chosen();
  return only;
}

bool multiplies_bf16() {
  static const bool found =
      isa() == Isa::amx || isa() == Isa::neon_bf16 || (isa() == Isa::avx512 && pairs_pay());
  return found;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return "amx";
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    case Isa::neon_bf16:
      return "neon+bf16";
    default:
      return kPortable;
  }
}

}  // namespace onnxtrain
