// One matrix product: C = A · B, or C += A · B, where packers read A and B from wherever they are.
//
// The product is cut into tiles that live in registers. Panels of A (up to kRows high) and of B
// (up to kColumns wide) are packed so that a tile reads memory in order. A packer is a function
// object that writes a panel: a matrix, its transpose, or the patches of an image, which is how a
// convolution becomes a product without a matrix of columns.
//
// This file is compiled once for each instruction set, in a namespace of its own.
#pragma once

#include <type_traits>

#include "half.h"
#include "packers.h"
#include "scratch.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Depth of a packed panel: a panel of B (kDepth × kColumns floats) stays in the first cache.
constexpr int64_t kDepth = 256;
// Rows of A that are packed at once; they stay in the second cache.
constexpr int64_t kBlockRows = kRows * (240 / kRows), kBlockTileRows = kTileRows * (240 / kTileRows);
// Columns of B that are packed at once.
constexpr int64_t kBlockColumns = kColumns * (1024 / kColumns);

inline int64_t pieces_of(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

inline int64_t rounded_up(int64_t size, int64_t unit) { return pieces_of(size, unit) * unit; }

// A tile of any height and width; `rounded` panels are of bfloat16, those of `kLines` of rows side by side. The
// matrix unit multiplies what is rounded where there is one, and has to be ready.
template <bool kLines = false>
void add_panels(int64_t depth, const float* a, int64_t height, const float* b, int64_t width, float* c,
                int64_t stride, bool fresh, bool rounded = false) {
  const int64_t block = (kLines ? kLinesOfPanel : height) * kLanes;
  if constexpr (!kLines) {
    if (rounded && has_amx()) {
      const TileRows rows{a, kLanes, kTile * kLanes, block};
      return add_tiles((depth + 1) / 2, rows, height, b, width, width, c, stride, fresh);
    }
  }
  TileFunction tile = nullptr;
  if (width == kColumns)
    tile = rounded ? rounded_tile_of<kVectors, kLines>(height) : tile_of<kVectors, kLines>(height);
  else if (width == kLanes)
    tile = rounded ? rounded_tile_of<1, kLines>(height) : tile_of<1, kLines>(height);
  else if constexpr (kVectors > 2)
    tile = rounded ? rounded_tile_of<2, kLines>(height) : tile_of<2, kLines>(height);
  tile(depth, a, block, b, c, stride, fresh);
}

// Part of a product: rows × columns × depth.
struct Block {
  int64_t row, row_end, column, column_end, k, k_end;
};

// Panels of B that are there already: [panel][depth][width], in the order of the columns.
struct PackedColumns {
  const float* panels;
  int64_t columns, depth;  // of all panels; columns are whole vectors

  const float* at(int64_t column, int64_t k) const {
    return panels + column * depth + k * std::min<int64_t>(kColumns, columns - column);
  }
};

// Packers that write panels of bfloat16 themselves.
template <class Pack>
constexpr bool kPacksPairs =
    std::is_same_v<Pack, MatrixRows> || std::is_same_v<Pack, MatrixLines> || std::is_same_v<Pack, MatrixColumns>;

template <class PackA>
void pack_rows(const PackA& pack, float* panel, int64_t row, int64_t rows, int64_t k, int64_t depth, bool rounded) {
  if constexpr (kPacksPairs<PackA>) {
    if (rounded) return pack.pairs(panel, row, rows, k, depth);
  }
  const int64_t blocks = pieces_of(depth, kLanes);
  if (rounded && depth < blocks * kLanes)  // what is behind the depth is multiplied, too
    std::fill_n(panel + rows * (blocks - 1) * kLanes, rows * kLanes, 0.0f);
  pack(panel, row, rows, k, depth);
  if (rounded) round_blocks(panel, blocks, rows);
}

template <class PackB>
void pack_columns(const PackB& pack, float* panel, int64_t column, int64_t columns, int64_t k, int64_t depth,
                  bool rounded) {
  const int64_t width = rounded_up(columns, kLanes);
  if constexpr (kPacksPairs<PackB>) {
    if (rounded) return pack.pairs(panel, column, columns, width, k, depth);
  }
  pack(panel, column, columns, width, k, depth);
  if (rounded) round_rows(panel, depth, width);
}

// Computes a block of C.
//
// `pack_a(panel, row, rows, k, depth)` writes rows of A, `pack_b(panel, column, columns, width, k, depth)`
// columns of B, unless they are packed already; see packers.h.
template <class PackA, class PackB, class Store>
void multiply_block(const PackA& pack_a, const PackB& pack_b, const Store& store, const Block& block, bool add,
                    bool rounded = false) {
  constexpr bool kLines = std::is_same_v<PackA, MatrixLines>, kPacked = std::is_same_v<PackB, PackedColumns>;
  constexpr int64_t kPanelRows = kLines ? kBlockRows / kRows * kLinesOfPanel : kBlockRows;
  const bool in_tiles = rounded && has_amx();
  const int64_t block_rows = in_tiles ? kBlockTileRows : kBlockRows;
  const MatrixUnit unit(in_tiles);
  const Floats panels((kPanelRows + (kPacked ? kTile : kBlockColumns)) * kDepth);
  float* const packed_a = panels.get();
  float* const packed_b = packed_a + kPanelRows * kDepth;
  alignas(64) float tile[kMostRows * kColumns + kLanes];  // pieces of a row are read as whole vectors
  for (int64_t jc = block.column; jc < block.column_end; jc += kBlockColumns) {
    const int64_t j_end = std::min(jc + kBlockColumns, block.column_end);
    for (int64_t kc = block.k; kc < block.k_end; kc += kDepth) {
      const int64_t depth = std::min(kDepth, block.k_end - kc), padded = rounded_up(depth, kLanes);
      if constexpr (!kPacked)
        for (int64_t j = jc; j < j_end; j += kColumns)
          pack_columns(pack_b, packed_b + (j - jc) * depth, j, std::min<int64_t>(kColumns, j_end - j), kc, depth,
                       rounded);
      for (int64_t ic = block.row; ic < block.row_end; ic += block_rows) {
        const PanelCut cut(std::min(block_rows, block.row_end - ic), in_tiles);
        const auto panel = [&](int64_t p) {
          return packed_a + (kLines ? p * kLinesOfPanel : cut.begin(p)) * padded;
        };
        for (int64_t p = 0; p < cut.pieces; ++p)
          pack_rows(pack_a, panel(p), ic + cut.begin(p), cut.length(p), kc, depth, rounded);
        for (int64_t j = jc; j < j_end; j += kColumns) {
          const int64_t columns = std::min<int64_t>(kColumns, j_end - j), width = rounded_up(columns, kLanes);
          const float* b = packed_b + (j - jc) * depth;
          if constexpr (kPacked) b = pack_b.at(j, rounded ? kc / 2 : kc);
          for (int64_t p = 0; p < cut.pieces; ++p) {
            const int64_t i = ic + cut.begin(p), rows = cut.length(p);
            bool fresh = !add && kc == block.k;
            if constexpr (std::is_same_v<Store, MatrixStore>) fresh = fresh && !store.begin(i, rows, j, columns);
            float* to = columns == width ? store.run(i, j, columns) : nullptr;
            if (to != nullptr) {
              add_panels<kLines>(depth, panel(p), rows, b, width, to, store.stride(), fresh, rounded);
            } else {
              add_panels<kLines>(depth, panel(p), rows, b, width, tile, kColumns, true, rounded);
              store.put(tile, i, rows, j, columns, fresh);
            }
          }
        }
      }
    }
  }
}

// Sets all of C to what an empty sum is.
template <class Store>
void clear(const Store& store, int64_t rows, int64_t columns) {
  const float zeros[kColumns + kLanes] = {};
  if constexpr (std::is_same_v<Store, MatrixStore>) {
    if (store.begin(0, rows, 0, columns)) return;
  }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; j += kColumns)
      store.put(zeros, i, 1, j, std::min<int64_t>(kColumns, columns - j), true);
}

// Computes a whole product in parallel. The cut depends on sizes alone, so that results do not
// depend on the number of threads.
template <class PackA, class PackB, class Store>
void multiply(const PackA& pack_a, const PackB& pack_b, const Store& store, int64_t rows, int64_t columns,
              int64_t depth, bool add, const Parallel& parallel, bool rounded = false) {
  if (rows == 0 || columns == 0) return;
  if (depth == 0) {
    if (!add) clear(store, rows, columns);
    return;
  }
  constexpr int64_t kTasks = 16, kLeastWork = int64_t{1} << 21;
  const double work = double(rows) * double(columns) * double(std::max<int64_t>(depth, 1));
  const int64_t tasks = std::max<int64_t>(1, std::min<int64_t>(kTasks, int64_t(work / kLeastWork)));
  // Each cut of the columns packs all rows again, and the other way round: take the cheapest.
  int64_t row_cuts = 1;
  double least = 0;
  for (int64_t cuts = 1; cuts <= tasks; cuts *= 2) {
    const double packed = double(rows) * double(pieces_of(tasks, cuts)) + double(columns) * double(cuts);
    if (cuts == 1 || (packed < least && rows >= 2 * kRows * cuts)) least = packed, row_cuts = cuts;
  }
  // Where that cuts rows only, B is packed once for all of them, if it is small enough to stay in a cache.
  constexpr int64_t kMostShared = int64_t{1} << 18;
  const int64_t padded_columns = rounded_up(columns, kLanes);
  if constexpr (std::is_same_v<PackB, MatrixColumns>) {
    if (row_cuts == tasks && tasks > 1 && padded_columns * depth <= kMostShared) {
      const Floats shared(padded_columns * depth);
      const PackedColumns packed{shared.get(), padded_columns, depth};
      parallel(pieces_of(columns, kColumns), [&](int64_t panel) {
        const int64_t j = panel * kColumns;
        pack_columns(pack_b, shared.get() + j * depth, j, std::min<int64_t>(kColumns, columns - j), 0, depth, rounded);
      });
      const EvenCut down(rows, pieces_of(rows, row_cuts));
      return parallel(down.pieces, [&](int64_t piece) {
        const int64_t row = down.begin(piece);
        multiply_block(pack_a, packed, store, {row, row + down.length(piece), 0, columns, 0, depth}, add, rounded);
      });
    }
  }
  const int64_t column_cuts = pieces_of(tasks, row_cuts);
  const int64_t wide = rounded_up(pieces_of(columns, column_cuts), kColumns);
  const EvenCut down(rows, pieces_of(rows, row_cuts));
  const int64_t across = pieces_of(columns, wide);
  parallel(across * down.pieces, [&](int64_t task) {
    const int64_t piece = task % down.pieces, column = task / down.pieces * wide, row = down.begin(piece);
    multiply_block(pack_a, pack_b, store,
                   {row, row + down.length(piece), column, std::min(column + wide, columns), 0, depth}, add, rounded);
  });
}

// Adds parts of a sum, one behind the other, each of as many floats as the sum.
inline void add_parts(const float* parts, int64_t count, int64_t size, float* sum, const Parallel& parallel) {
  if (count == 0) return;
  const EvenCut ranges(size, 8192);
  parallel(ranges.pieces, [&](int64_t range) {
    for (int64_t part = 0; part < count; ++part) {
      const float* from = parts + part * size;
      for (int64_t i = ranges.begin(range), end = i + ranges.length(range); i < end; ++i) sum[i] += from[i];
    }
  });
}

// A product whose depth is long beside its rows and columns: parts of the depth are summed apart.
template <class PackA, class PackB>
void multiply_deep(const PackA& pack_a, const PackB& pack_b, float* c, int64_t rows, int64_t columns, int64_t depth,
                   const Parallel& parallel, bool rounded = false) {
  constexpr int64_t kParts = 16, kLeastDepth = 2 * kDepth, kMostFloats = int64_t{1} << 21;
  const int64_t size = rows * columns;
  const int64_t parts = std::min({kParts, depth / kLeastDepth, kMostFloats / std::max<int64_t>(1, size)});
  if (parts < 2)
    return multiply(pack_a, pack_b, MatrixStore{c, columns}, rows, columns, depth, false, parallel, rounded);
  const EvenCut cut(depth, rounded_up(pieces_of(depth, parts), kDepth));
  const Floats sums((cut.pieces - 1) * size);
  parallel(cut.pieces, [&](int64_t part) {
    const MatrixStore store{part == 0 ? c : sums.get() + (part - 1) * size, columns};
    multiply_block(pack_a, pack_b, store, {0, rows, 0, columns, cut.begin(part), cut.begin(part) + cut.length(part)},
                   false, rounded);
  });
  add_parts(sums.get(), cut.pieces - 1, size, c, parallel);
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
