// Products with a matrix of small integers, which are never expanded in memory.
#pragma once

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace onnxtrain {

// Rows of numbers of 2, 4 or 8 bits, the lowest bits of a byte first. Each `block` of a row shares a scale s and a
// zero point z, and means (number - z) · s. A row has whole blocks, which may be more than its columns.
struct QuantizedMatrix {
  int64_t rows, columns, block, bits;
  const uint8_t* bytes;
  const float* scales;   // of each block, row by row
  const uint8_t* zeros;  // the same; one of both is given
  const float* float_zeros;

  int64_t blocks() const { return (columns + block - 1) / block; }
};

struct Quantized {
  // C = A · B: `rows` of A, as wide as B has rows.
  void (*product)(const float* a, int64_t rows, const QuantizedMatrix& b, float* c, const Parallel&);
  // C = A · Bᵀ: `rows` of A, as wide as B has columns. With bf16, both are rounded to bfloat16 where the processor
  // multiplies these faster.
  void (*transposed)(const float* a, int64_t rows, const QuantizedMatrix& b, float* c, bool bf16, const Parallel&);
};

ONNXTRAIN_TABLE(Quantized, kQuantized, quantized)

}  // namespace onnxtrain
