// Vectors of floats as the compiler knows them, as wide as the instruction set of this compilation,
// and the size of the tile of a product that fits its registers.
#pragma once

namespace onnxtrain::ONNXTRAIN_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 14, kColumns = 32;  // 28 sums, 2 columns, 1 row of 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6, kColumns = 16;  // 12 sums, 2 columns, 1 row of 16 registers
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRows = 8, kColumns = 12;  // 24 sums, 3 columns, 2 rows of 32 registers
#else
constexpr int kLanes = 4, kRows = 4, kColumns = 8;  // 8 sums, 2 columns, 1 row of 16 registers
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
// The same in memory, where it may lie anywhere.
typedef float InMemory __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const InMemory*>(from); }

inline void store(float* to, Vector value) { *reinterpret_cast<InMemory*>(to) = value; }

inline Vector broadcast(float value) { return value - Vector{}; }

}  // namespace onnxtrain::ONNXTRAIN_ISA
