// Which instruction set this process uses. A computation is compiled once for each, in a namespace
// of its name (ONNXTRAIN_ISA), and chosen when it is first called.
#pragma once

namespace onnxtrain {

// `amx` is avx512 with a matrix unit for bfloat16. On aarch64, `portable` is NEON, and `neon_bf16` has instructions
// for bfloat16 too.
enum class Isa { portable, neon_bf16, avx2, avx512, amx };

// The widest that the processor has, or a narrower one that the environment variable ONNXTRAIN_ISA
// names ("portable", "avx2", "avx512"; "neon").
Isa isa();
const char* isa_name(Isa isa);

// Whether this instruction set multiplies bfloat16 faster than floats.
bool multiplies_bf16();

}  // namespace onnxtrain

// Declares the tables `kName` of all instruction sets and name(), the one to use. Write it inside
// of the namespace onnxtrain; each `…_isa.cpp` defines its kName.
#if defined(__x86_64__)
#define ONNXTRAIN_TABLE(Type, kName, name) \
  namespace portable {                     \
  extern const Type kName;                 \
  }                                        \
  namespace avx2 {                         \
  extern const Type kName;                 \
  }                                        \
  namespace avx512 {                       \
  extern const Type kName;                 \
  }                                        \
  inline const Type& name() {              \
    switch (isa()) {                       \
      case Isa::amx:                       \
      case Isa::avx512:                    \
        return avx512::kName;              \
      case Isa::avx2:                      \
        return avx2::kName;                \
      default:                             \
        return portable::kName;            \
    }                                      \
  }
#else
#define ONNXTRAIN_TABLE(Type, kName, name) \
  namespace portable {                     \
  extern const Type kName;                 \
  }                                        \
  inline const Type& name() { return portable::kName; }
#endif
