// Products of small matrices that stay in the cache, and the memory that they are in: what attention is
// made of. This file is compiled once for each instruction set.
#pragma once

#include <algorithm>
#include <type_traits>

#include "half.h"
#include "scratch.h"

namespace onnxtrain::ONNXTRAIN_ISA {

constexpr int64_t kBlock = 64;  // queries, and keys, of one block
// Rows of one tile of a product, which has two vectors of columns: all sums are in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTall = 8;
#else
constexpr int kTall = 4;
#endif
static_assert(kBlock % (2 * kLanes) == 0 && kBlock % kTall == 0);

constexpr int64_t pieces_of(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

// Sizes with zeros behind them, so that all tiles are whole.
constexpr int64_t tall(int64_t size) { return pieces_of(size, kTall) * kTall; }
constexpr int64_t wide(int64_t size) { return pieces_of(size, kLanes) * kLanes; }

// ---- products ----------------------------------------------------------------------------------

// The left side of a product, (i, k) at data[i · stride + k], or with rows side by side at
// data[i + k · stride].
template <bool kRowsAdjacent>
struct Left {
  const float* data;
  int64_t stride;

  const float* place(int64_t i, int64_t k) const { return data + (kRowsAdjacent ? i + k * stride : i * stride + k); }
  float at(int64_t i, int64_t k) const { return *place(i, k); }
  Left from_row(int64_t row) const { return {data + (kRowsAdjacent ? row : row * stride), stride}; }
};

struct Matrix {
  float* data;
  int64_t stride;

  float* row(int64_t i) const { return data + i * stride; }
};

// What happens to the result before the product is added to it.
enum class Before { cleared, kept, scaled };

// A tile of C, kTall × kVectors vectors. With `scaled`, each column of C has a factor of its own.
template <Before kBefore, int kVectors, class A>
void add_tile(int64_t depth, A a, const float* b, int64_t b_stride, float* c, int64_t c_stride, const float* factors) {
  Vector sum[kTall][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kTall; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector{};
  for (int64_t k = 0; k < depth; ++k, b += b_stride) {
    Vector right[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kTall; ++i) {
      const Vector left = broadcast(a.at(i, k));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTall; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      // What was there before is added last: a sum over many blocks keeps its digits.
      float* const place = c + i * c_stride + j * kLanes;
      if (kBefore == Before::kept) sum[i][j] += load(place);
      if (kBefore == Before::scaled) sum[i][j] += load(place) * load(factors + j * kLanes);
      store(place, sum[i][j]);
    }
}

#if defined(ONNXTRAIN_HAS_BF16)
// The same for words of two bfloat16 along the depth; `pairs` is half of that.
template <Before kBefore, int kVectors, class A>
ONNXTRAIN_BF16 void add_rounded_tile(int64_t pairs, A a, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                                     const float* factors) {
  Vector sum[kTall][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kTall; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector{};
  for (int64_t k = 0; k < pairs; ++k, b += b_stride) {
    Vector right[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kTall; ++i) {
      const Vector left = broadcast_bits(a.place(i, k));
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sum[i][j] = add_pairs(sum[i][j], left, right[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTall; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      // What was there before is added last: a sum over many blocks keeps its digits.
      float* const place = c + i * c_stride + j * kLanes;
      if (kBefore == Before::kept) sum[i][j] += load(place);
      if (kBefore == Before::scaled) sum[i][j] += load(place) * load(factors + j * kLanes);
      store(place, sum[i][j]);
    }
}
#else
template <Before kBefore, int kVectors, class A>
void add_rounded_tile(int64_t, A, const float*, int64_t, float*, int64_t, const float*) {}
#endif

// Aligned memory of one task, handed out piece by piece.
class Memory {
 public:
  explicit Memory(int64_t floats) : data_(floats), next_(data_.get()) {}

  float* take(int64_t floats) {
    float* const begin = next_;
    next_ += floats;
    return begin;
  }

  // A matrix whose rows are longer than what is written into them has zeros behind it.
  Matrix matrix(int64_t rows, int64_t stride, int64_t written) {
    const Matrix made{take(rows * stride), stride};
    if (written < stride) std::fill_n(made.data, rows * stride, 0.0f);
    return made;
  }
  Matrix matrix(int64_t rows, int64_t stride) { return matrix(rows, stride, stride); }

 private:
  Floats data_;
  float* next_;
};

// Multiplies, in bfloat16 if so asked: then both sides are rounded into memory of their own first.
class Products {
 public:
  // Floats of the memory for sides of at most `longest` rows or columns beside those of a block.
  static int64_t floats(bool rounded, int64_t longest) {
    return rounded ? kBlock * (tall(longest) + wide(longest)) + 2 * kLanes : 0;
  }

  Products(bool rounded, int64_t longest, Memory& memory)
      : rounded_(rounded),
        left_(rounded ? memory.take(kBlock * tall(longest)) : nullptr),
        right_(rounded ? memory.take(kBlock * wide(longest)) : nullptr),
        unit_(rounded && has_amx()) {}

  // C = A · B, added to what C was before. Rows are whole tiles and columns whole vectors.
  template <Before kBefore, class A>
  void multiply(int64_t rows, int64_t columns, int64_t depth, A a, Matrix b, Matrix c,
                const float* factors = nullptr) const {
    if (rounded_) {
      const Matrix right{right_, columns};
      round_pairs(b.data, b.stride, depth, columns, right.data);
      if (has_amx()) return multiply_tiles<kBefore>(rows, in_rows(a, rows, depth), depth, right, c, factors);
      const A left = rounded(a, rows, depth);
      depth = (depth + 1) / 2;
      return for_tiles(rows, columns, [&](auto width, int64_t i, int64_t j) {
        add_rounded_tile<kBefore, width>(depth, left.from_row(i), right.data + j, right.stride, c.row(i) + j, c.stride,
                                         factors == nullptr ? nullptr : factors + j);
      });
    }
    for_tiles(rows, columns, [&](auto width, int64_t i, int64_t j) {
      add_tile<kBefore, width>(depth, a.from_row(i), b.data + j, b.stride, c.row(i) + j, c.stride,
                               factors == nullptr ? nullptr : factors + j);
    });
  }

 private:
  template <class Tile>
  static void for_tiles(int64_t rows, int64_t columns, const Tile& tile) {
    int64_t j = 0;
    for (; j + 2 * kLanes <= columns; j += 2 * kLanes)
      for (int64_t i = 0; i < rows; i += kTall) tile(std::integral_constant<int, 2>(), i, j);
    if (j < columns)
      for (int64_t i = 0; i < rows; i += kTall) tile(std::integral_constant<int, 1>(), i, j);
  }

  // The same by the matrix unit.
  template <Before kBefore>
  static void multiply_tiles(int64_t rows, TileRows a, int64_t depth, Matrix b, Matrix c, const float* factors) {
    const int64_t columns = b.stride;
    if (kBefore == Before::scaled)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) c.row(i)[j] *= factors[j];
    for (int64_t i = 0; i < rows; i += kTileRows, a.data += kTileRows * a.row)
      for (int64_t j = 0; j < columns; j += 2 * kTile)
        add_tiles((depth + 1) / 2, a, std::min(kTileRows, rows - i), b.data + j, b.stride,
                  std::min(2 * kTile, columns - j), c.row(i) + j, c.stride, kBefore == Before::cleared);
  }

  // Rows for the matrix unit.
  ONNXTRAIN_BF16 TileRows in_rows(Left<false> a, int64_t rows, int64_t depth) const {
    const int64_t stride = pieces_of(depth, 2 * kTile) * kTile;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < depth; k += 2 * kLanes) {
        const float* from = a.data + i * a.stride + k;
        store(left_ + i * stride + k / 2,
              pairs_along(load_first(from, depth - k), load_first(from + kLanes, depth - k - kLanes)));
      }
    return {left_, stride, kTile * stride, kTile};
  }

  ONNXTRAIN_BF16 TileRows in_rows(Left<true> a, int64_t rows, int64_t depth) const {
    const int64_t stride = pieces_of(depth, 2 * kTile) * kTile;
    for (int64_t i = 0; i < rows; i += kLanes)
      for (int64_t k = 0; k < depth; k += 2 * kLanes)
        transpose_pairs(a.data + i + k * a.stride, a.stride, std::min<int64_t>(kLanes, rows - i), depth - k,
                        left_ + i * stride + k / 2, stride);
    return {left_, stride, kTile * stride, kTile};
  }

  Left<false> rounded(Left<false> a, int64_t rows, int64_t depth) const {
    const int64_t stride = wide(depth) / 2;
    for (int64_t i = 0; i < rows; ++i) {
      float* to = left_ + i * stride;
      for (int64_t k = 0; k < depth; k += kLanes)
        round_pairs_of(load_first(a.data + i * a.stride + k, std::min<int64_t>(kLanes, depth - k)), to + k / 2);
    }
    return {left_, stride};
  }

  Left<true> rounded(Left<true> a, int64_t rows, int64_t depth) const {
    round_pairs(a.data, a.stride, depth, rows, left_);
    return {left_, rows};
  }

  bool rounded_;
  float *left_, *right_;
  MatrixUnit unit_;
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
