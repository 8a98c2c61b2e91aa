// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "quantized.h"

#include "product.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef int32_t Signed __attribute__((vector_size(kLanes * sizeof(int32_t))));

// kLanes numbers of kBits each, as floats. Every lane gets the word that its number is in, and shifts it down.
template <int kBits>
inline Vector numbers(const uint8_t* from) {
  constexpr int kBytes = kLanes * kBits / 8, kOfWord = 32 / kBits;
  Signed lanes{}, shifts{};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) lanes[i] = i, shifts[i] = i % kOfWord * kBits;
  Words found{};
#pragma GCC unroll 4
  for (int first = 0; first < kLanes; first += kOfWord) {
    uint32_t word = 0;
    std::memcpy(&word, from + first * kBits / 8, kBytes < 4 ? kBytes : 4);
    const Words own = word - Words{};
    found = first == 0 ? own : lanes >= first ? own : found;
  }
  const Words mask = ((1u << kBits) - 1) - Words{};
  return __builtin_convertvector((Signed)((found >> (Words)shifts) & mask), Vector);
}

// Columns of a quantized matrix for the right side. A vector of columns never leaves its block.
template <int kBits>
struct QuantizedColumns {
  const QuantizedMatrix& of;

  void operator()(float* panel, int64_t first, int64_t, int64_t width, int64_t k, int64_t depth) const {
    const int64_t blocks = of.blocks(), line = blocks * of.block * kBits / 8;
    for (int64_t j = 0; j < width; j += kLanes) {
      const int64_t column = first + j;
      int64_t at = k * blocks + column / of.block;
      const uint8_t* from = of.bytes + k * line + column * kBits / 8;
      float* to = panel + j;
      for (int64_t x = 0; x < depth; ++x, at += blocks, from += line, to += width) {
        const float zero = of.zeros != nullptr ? static_cast<float>(of.zeros[at]) : of.float_zeros[at];
        store(to, (numbers<kBits>(from) - broadcast(zero)) * broadcast(of.scales[at]));
      }
    }
  }
};

// Rows of a quantized matrix as columns of the right side. Each lane has the word of a row, and shifts it down from
// number to number. Depths begin with a word, which never leaves its block.
template <int kBits>
struct QuantizedRows {
  const QuantizedMatrix& of;

  void operator()(float* panel, int64_t first, int64_t count, int64_t width, int64_t k, int64_t depth) const {
    constexpr int64_t kOfWord = 32 / kBits;
    const int64_t blocks = of.blocks(), line = blocks * of.block * kBits / 8;
    const Words mask = ((1u << kBits) - 1) - Words{};
    for (int64_t j = 0; j < width; j += kLanes) {
      const int64_t row = first + j, rows = std::min<int64_t>(kLanes, count - j);
      Vector scales{}, zeros{};
      for (int64_t x = 0; x < depth; x += kOfWord) {
        const int64_t column = k + x;
        if (x == 0 || column % of.block == 0)
          for (int64_t i = 0, at = row * blocks + column / of.block; i < rows; ++i, at += blocks) {
            scales[i] = of.scales[at];
            zeros[i] = of.zeros != nullptr ? static_cast<float>(of.zeros[at]) : of.float_zeros[at];
          }
        uint32_t of_rows[kLanes] = {};
        const uint8_t* from = of.bytes + row * line + column * kBits / 8;
        for (int64_t i = 0; i < rows; ++i, from += line) std::memcpy(of_rows + i, from, sizeof(uint32_t));
        Words words;
        std::memcpy(&words, of_rows, sizeof(words));
        const int64_t deep = std::min<int64_t>(kOfWord, depth - x);
        for (int64_t y = 0; y < deep; ++y, words >>= kBits)
          store(panel + (x + y) * width + j,
                (__builtin_convertvector((Signed)(words & mask), Vector) - zeros) * scales);
      }
    }
  }
};

template <int kBits>
void multiply_by(const float* a, int64_t rows, const QuantizedMatrix& b, float* c, const Parallel& parallel) {
  multiply(MatrixRows{a, b.rows, 1}, QuantizedColumns<kBits>{b}, MatrixStore{c, b.columns}, rows, b.columns, b.rows,
           false, parallel);
}

void product(const float* a, int64_t rows, const QuantizedMatrix& b, float* c, const Parallel& parallel) {
  if (b.bits == 2) return multiply_by<2>(a, rows, b, c, parallel);
  if (b.bits == 4) return multiply_by<4>(a, rows, b, c, parallel);
  multiply_by<8>(a, rows, b, c, parallel);
}

template <int kBits>
void multiply_by_transposed(const float* a, int64_t rows, const QuantizedMatrix& b, float* c, bool bf16,
                            const Parallel& parallel) {
  multiply(MatrixRows{a, b.columns, 1}, QuantizedRows<kBits>{b}, MatrixStore{c, b.rows}, rows, b.rows, b.columns, false,
           parallel, bf16 && has_bf16());
}

void transposed(const float* a, int64_t rows, const QuantizedMatrix& b, float* c, bool bf16, const Parallel& parallel) {
  if (b.bits == 2) return multiply_by_transposed<2>(a, rows, b, c, bf16, parallel);
  if (b.bits == 4) return multiply_by_transposed<4>(a, rows, b, c, bf16, parallel);
  multiply_by_transposed<8>(a, rows, b, c, bf16, parallel);
}

}  // namespace

const Quantized kQuantized = {product, transposed};

}  // namespace onnxtrain::ONNXTRAIN_ISA
