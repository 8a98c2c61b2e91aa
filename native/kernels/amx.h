// Products of bfloat16 by the matrix unit of a processor (AMX). Its tiles are squares: 16 rows of 16 pairs
// of bfloat16, or of 16 sums.
#pragma once

#include "isa.h"
#include "vector.h"

#if defined(__AVX512F__) && defined(__linux__) && (__has_include(<amxtileintrin.h>) || __has_include(<amxintrin.h>))
#define ONNXTRAIN_AMX __attribute__((target("amx-tile,amx-bf16")))
#endif

namespace onnxtrain::ONNXTRAIN_ISA {

// The left side of a product: 16 pairs of row i, from pair 16 · k on, are at
// data[i / 16 · below + i % 16 · row + k · block], with zeros behind the depth.
struct TileRows {
  const float* data;
  int64_t row, below, block;
};

constexpr int64_t kTile = 16;
constexpr int64_t kTileRows = 2 * kTile;  // of the left side that are multiplied at once

#if defined(ONNXTRAIN_AMX)
inline bool has_amx() { return isa() == Isa::amx; }

// Makes the tiles of this thread ready, for a scope. Other libraries find them as new afterwards.
class MatrixUnit {
 public:
  explicit MatrixUnit(bool used) : used_(used) {
    if (used) begin();
  }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
  ~MatrixUnit() {
    if (used_) end();
  }

 private:
  // What the instruction reads: all eight tiles are squares.
  struct Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  ONNXTRAIN_AMX static void begin() {
    static const Shapes shapes;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ONNXTRAIN_AMX static void end() { asm volatile("tilerelease"); }

  bool used_;
};

// Compilers do not know what tiles hold, nor, if it were their own functions, what memory these read.
#define ONNXTRAIN_LOAD_TILE(tile, from, bytes) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(bytes) : "memory")
#define ONNXTRAIN_STORE_TILE(tile, to, bytes) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(bytes) : "memory")
#define ONNXTRAIN_CLEAR_TILE(tile) asm volatile("tilezero %tmm" #tile)
#define ONNXTRAIN_ADD_PRODUCT(sum, left, right) asm volatile("tdpbf16ps %tmm" #right ", %tmm" #left ", %tmm" #sum)

// C += A · B, or C = A · B: one tile or two, `kHigh` and `kWide`, of rows and of columns. B has a row of
// `b_row` pairs for each pair of the depth.
template <bool kHigh, bool kWide>
ONNXTRAIN_AMX void add_whole_tiles(int64_t pairs, const TileRows& a, const float* b, int64_t b_row, float* c,
                                   int64_t stride, bool fresh) {
  constexpr int64_t kBytes = sizeof(float);
  const int64_t c_bytes = stride * kBytes, a_bytes = a.row * kBytes;
  float* const lower = c + kTile * stride;
  if (fresh) {
    ONNXTRAIN_CLEAR_TILE(0);
    if constexpr (kWide) ONNXTRAIN_CLEAR_TILE(1);
    if constexpr (kHigh) ONNXTRAIN_CLEAR_TILE(2);
    if constexpr (kHigh && kWide) ONNXTRAIN_CLEAR_TILE(3);
  } else {
    ONNXTRAIN_LOAD_TILE(0, c, c_bytes);
    if constexpr (kWide) ONNXTRAIN_LOAD_TILE(1, c + kTile, c_bytes);
    if constexpr (kHigh) ONNXTRAIN_LOAD_TILE(2, lower, c_bytes);
    if constexpr (kHigh && kWide) ONNXTRAIN_LOAD_TILE(3, lower + kTile, c_bytes);
  }
  const float* left = a.data;
  const auto add = [&](const float* right, int64_t row) __attribute__((always_inline)) ONNXTRAIN_AMX {
    const int64_t b_bytes = row * kBytes;
    ONNXTRAIN_LOAD_TILE(4, left, a_bytes);
    ONNXTRAIN_LOAD_TILE(6, right, b_bytes);
    ONNXTRAIN_ADD_PRODUCT(0, 4, 6);
    if constexpr (kWide) {
      ONNXTRAIN_LOAD_TILE(7, right + kTile, b_bytes);
      ONNXTRAIN_ADD_PRODUCT(1, 4, 7);
    }
    if constexpr (kHigh) {
      ONNXTRAIN_LOAD_TILE(5, left + a.below, a_bytes);
      ONNXTRAIN_ADD_PRODUCT(2, 5, 6);
    }
    if constexpr (kHigh && kWide) ONNXTRAIN_ADD_PRODUCT(3, 5, 7);
  };
  for (; pairs >= kTile; pairs -= kTile, left += a.block, b += kTile * b_row) add(b, b_row);
  if (pairs > 0) {  // zeros of A are not enough: those of B could be NaN
    constexpr int64_t kWidth = kWide ? 2 * kTile : kTile;
    alignas(64) float rest[kTile * kWidth] = {};
    for (int64_t k = 0; k < pairs; ++k)
      for (int64_t j = 0; j < kWidth; j += kLanes) store(rest + k * kWidth + j, load(b + k * b_row + j));
    add(rest, kWidth);
  }
  ONNXTRAIN_STORE_TILE(0, c, c_bytes);
  if constexpr (kWide) ONNXTRAIN_STORE_TILE(1, c + kTile, c_bytes);
  if constexpr (kHigh) ONNXTRAIN_STORE_TILE(2, lower, c_bytes);
  if constexpr (kHigh && kWide) ONNXTRAIN_STORE_TILE(3, lower + kTile, c_bytes);
}

// The same for up to kTileRows rows and one or two vectors of columns. Rows of A up to the next whole tile
// are read, whatever they hold.
inline void add_tiles(int64_t pairs, const TileRows& a, int64_t height, const float* b, int64_t b_row, int64_t width,
                      float* c, int64_t stride, bool fresh) {
  const auto whole = height > kTile ? (width > kTile ? add_whole_tiles<true, true> : add_whole_tiles<true, false>)
                                    : (width > kTile ? add_whole_tiles<false, true> : add_whole_tiles<false, false>);
  if (height % kTile == 0) return whole(pairs, a, b, b_row, c, stride, fresh);
  alignas(64) float made[kTileRows * 2 * kTile];
  whole(pairs, a, b, b_row, made, 2 * kTile, true);
  for (int64_t i = 0; i < height; ++i)
    for (int64_t j = 0; j < width; j += kLanes) {
      float* const to = c + i * stride + j;
      const Vector added = load(made + i * 2 * kTile + j);
      store(to, fresh ? added : load(to) + added);
    }
}
#undef ONNXTRAIN_LOAD_TILE
#undef ONNXTRAIN_STORE_TILE
#undef ONNXTRAIN_CLEAR_TILE
#undef ONNXTRAIN_ADD_PRODUCT
#else
constexpr bool has_amx() { return false; }
struct MatrixUnit {
  explicit MatrixUnit(bool) {}
};
inline void add_tiles(int64_t, const TileRows&, int64_t, const float*, int64_t, int64_t, float*, int64_t, bool) {}
#endif

}  // namespace onnxtrain::ONNXTRAIN_ISA
