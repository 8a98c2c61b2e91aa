// What the passes of recurrent layers are made of: tiles of products with weights that are packed once
// for all steps, the rows of the batch cut into tiles, and the order of the work.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "recurrent.h"
#include "vector_math.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Zeroed memory, aligned to a cache line.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count)
      : data_(static_cast<float*>(::operator new(sizeof(float) * std::max<int64_t>(count, 1), std::align_val_t(64)))) {
    std::fill_n(data_.get(), count, 0.0f);
  }
  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { ::operator delete(data, std::align_val_t(64)); }
  };
  std::unique_ptr<float, Free> data_;
};

// Part of a tile's columns that fits a vector: hidden units [unit, unit + count).
struct Place {
  int64_t unit;
  int lane;  // the first column in the tile
  int64_t count;
};

// Units are cut into blocks of kColumns. Calls use(place) for each vector of a block.
template <class Use>
void each_vector(int64_t block, int64_t hidden, const Use& use) {
  for (int lane = 0; lane < kColumns; lane += kLanes) {
    const int64_t unit = block * kColumns + lane;
    if (unit >= hidden) return;
    use(Place{unit, lane, std::min<int64_t>(kLanes, hidden - unit)});
  }
}

// Units of a row; a row that is null is zero.
inline Vector get(const float* row, const Place& place) {
  if (row == nullptr) return Vector{};
  return place.count == kLanes ? load(row + place.unit) : load_first(row + place.unit, place.count);
}

inline void put(float* row, const Place& place, Vector value) {
  if (place.count == kLanes)
    store(row + place.unit, value);
  else
    store_first(row + place.unit, value, place.count);
}

// A tile of values, in rows of kColumns, with room for whole squares.
struct TileValues {
  alignas(64) float data[(kRows + kLanes - 1) / kLanes * kLanes * kColumns];

  Vector get(int64_t row, const Place& place) const { return load(data + row * kColumns + place.lane); }
  void put(int64_t row, const Place& place, Vector value) { store(data + row * kColumns + place.lane, value); }
};

// to = left · right, for panels left[depth][height] and right[depth][kColumns].
using TileProduct = void (*)(int64_t depth, const float* left, const float* right, TileValues& to);

template <int kHeight>
void tile_product(int64_t depth, const float* left, const float* right, TileValues& to) {
  constexpr int64_t kPart = 256;  // of the depth; a sum of all would lose digits
  for (int64_t begin = 0; begin == 0 || begin < depth; begin += kPart) {
    Vector sum[kHeight][kVectors];
    for (int i = 0; i < kHeight; ++i)
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Vector{};
    for (int64_t k = begin; k < std::min(depth, begin + kPart); ++k, left += kHeight, right += kColumns) {
      Vector columns[kVectors];
      for (int j = 0; j < kVectors; ++j) columns[j] = load(right + j * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kHeight; ++i) {
        const Vector row = broadcast(left[i]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[i][j] += row * columns[j];
      }
    }
    for (int i = 0; i < kHeight; ++i)
      for (int j = 0; j < kVectors; ++j) {
        float* const place = to.data + i * kColumns + j * kLanes;
        store(place, begin == 0 ? sum[i][j] : load(place) + sum[i][j]);
      }
  }
}

template <int... kHeights>
TileProduct tile_product_of(int64_t height, std::integer_sequence<int, kHeights...>) {
  static constexpr TileProduct kAll[] = {tile_product<kHeights + 1>...};
  return kAll[height - 1];
}

inline int64_t ceil_divide(int64_t size, int64_t by) { return (size + by - 1) / by; }

inline int64_t blocks_of(int64_t hidden) { return ceil_divide(hidden, kColumns); }

// A matrix on the right side of products, packed as panels [depth][kColumns], one for each block of columns.
// Several matrices of one width can lie below each other.
class RightPanels {
 public:
  RightPanels() = default;
  RightPanels(int64_t depth, int64_t columns)
      : depth_(depth), columns_(columns), panels_(blocks_of(columns) * kColumns * depth) {}

  // Packs a matrix into the panels, from a depth on; columns that a panel has beyond the last stay zero. Rows of
  // the matrix lie along the columns, or, if `transposed`, along the depth.
  void pack(int64_t from, const float* matrix, int64_t depth, int64_t row, bool transposed,
            const Parallel& parallel) const {
    parallel(blocks_of(columns_), [&](int64_t block) {
      const int64_t first = block * kColumns, count = std::min<int64_t>(kColumns, columns_ - first);
      const float* source = matrix + first * (transposed ? row : 1);
      float* to = at(block, from);
      if (!transposed) {
        for (int64_t k = 0; k < depth; ++k) std::copy_n(source + k * row, count, to + k * kColumns);
        return;
      }
      for (int64_t j = 0; j < count; j += kLanes)
        transpose_lines(source + j * row, row, std::min<int64_t>(kLanes, count - j), depth, to + j, kColumns);
    });
  }
  float* at(int64_t block, int64_t depth) const { return panels_.data() + (block * depth_ + depth) * kColumns; }

 private:
  int64_t depth_ = 0, columns_ = 0;
  Buffer panels_;
};

// The rows of the batch, cut into tiles of one height. Chains are runs of tiles that can be computed without
// waiting for each other, step after step.
struct RowTiles {
  int64_t batch, height, tiles, chains, tiles_of_chain;

  explicit RowTiles(int64_t rows) : batch(rows) {
    constexpr int64_t kRowsOfChain = 16;  // fewer would read the weights too often
    chains = std::max<int64_t>(1, rows / kRowsOfChain);
    const int64_t own = ceil_divide(rows, chains);
    tiles_of_chain = ceil_divide(own, kRows);
    height = ceil_divide(own, tiles_of_chain);
    tiles = ceil_divide(rows, height);
    chains = ceil_divide(tiles, tiles_of_chain);
  }
  int64_t first(int64_t tile) const { return tile * height; }
  int64_t count(int64_t tile) const { return std::min(height, batch - first(tile)); }
  TileProduct product() const { return tile_product_of(height, std::make_integer_sequence<int, kRows>()); }
  // Floats of packed rows of that depth.
  int64_t packed_size(int64_t depth) const { return tiles * height * depth; }
  float* packed(const Buffer& buffer, int64_t tile, int64_t depth) const {
    return buffer.data() + tile * height * depth;
  }
  // Writes a tile of values as packed rows; `to` is the place of the first unit.
  void pack(const TileValues& values, int64_t tile, int64_t block, int64_t hidden, float* to) const {
    const int64_t unit = block * kColumns, units = std::min<int64_t>(kColumns, hidden - unit), rows = count(tile);
    for (int64_t first = 0; first < rows; first += kLanes)
      for (int64_t k = 0; k < units; k += kLanes)
        pack_square(values.data + first * kColumns + k, std::min<int64_t>(kLanes, rows - first),
                    std::min<int64_t>(kLanes, units - k), to + (unit + k) * height + first);
  }

 private:
  void pack_square(const float* from, int64_t rows, int64_t units, float* to) const {
    Vector square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = i < rows ? load(from + i * kColumns) : Vector{};
    transpose(square);
#pragma GCC unroll 16
    for (int k = 0; k < kLanes; ++k)
      if (k < units) store_first(to + k * height, square[k], rows);
  }
};

// Calls step(index, stage, tile, block) for indices 0 … count - 1 in order. A stage reads what all blocks of
// the stage before wrote for its tile. `work` is about the number of multiplications of a stage.
//
// Threads take a chain each, or, if there are fewer chains than cores, the blocks of each stage, and meet behind
// it. Results are the same: each is computed from the same tiles in the same order.
template <class Step>
void run_steps(const RowTiles& rows, int64_t blocks, int64_t count, int stages, double work, const Parallel& parallel,
               const Step& step) {
  constexpr double kWorthThreads = 1 << 17;
  static const int64_t cores = std::thread::hardware_concurrency();
  const bool enough = rows.chains > 1 && rows.chains >= cores;
  if (enough || blocks == 1 || work < kWorthThreads) {
    parallel(rows.chains, [&](int64_t chain) {
      const int64_t first = chain * rows.tiles_of_chain, last = std::min(first + rows.tiles_of_chain, rows.tiles);
      for (int64_t index = 0; index < count; ++index)
        for (int stage = 0; stage < stages; ++stage)
          for (int64_t block = 0; block < blocks; ++block)
            for (int64_t tile = first; tile < last; ++tile) step(index, stage, tile, block);
    });
    return;
  }
  for (int64_t index = 0; index < count; ++index)
    for (int stage = 0; stage < stages; ++stage)
      parallel(blocks, [&](int64_t block) {
        for (int64_t tile = 0; tile < rows.tiles; ++tile) step(index, stage, tile, block);
      });
}

static_assert(kSavedUnits % kLanes == 0, "vectors lie within blocks");

// What a step saved for some units: a vector of each part.
struct SavedVectors {
  const float* first;
  Vector operator[](int64_t part) const { return load(first + part * kSavedUnits); }
};

// One direction of a layer. Positions count steps in the order of the direction, times are rows of x.
struct Direction {
  const RecurrentLayer& layer;
  int64_t index;

  bool reverse() const { return layer.reverse || index == 1; }
  int64_t time(int64_t position) const { return reverse() ? layer.steps - 1 - position : position; }
  bool valid(int64_t time, int64_t b) const { return layer.lengths == nullptr || time < layer.lengths[b]; }
  int64_t hidden() const { return layer.hidden; }
  int64_t gates() const { return gates_of(layer.cell); }
  int64_t blocks() const { return blocks_of(layer.hidden); }
  // Parts of what the layer was given.
  const float* w() const { return layer.w + index * gates() * layer.hidden * layer.inputs; }
  const float* r() const { return layer.r + index * gates() * layer.hidden * layer.hidden; }
  const float* bias() const {
    return layer.bias == nullptr ? nullptr : layer.bias + index * 2 * gates() * layer.hidden;
  }
  const float* peepholes(int64_t gate) const {
    return layer.peepholes == nullptr ? nullptr : layer.peepholes + (index * 3 + gate) * layer.hidden;
  }
  // Rows of sequences and of states.
  int64_t y_row(int64_t time, int64_t b) const {
    return ((time * layer.directions + index) * layer.batch + b) * layer.hidden;
  }
  // One of the vectors that a step saves, from a unit on: until the end of its block.
  int64_t saved_at(int64_t time, int64_t b, int64_t part, int64_t unit) const {
    const int64_t block = (index * layer.steps + time) * ceil_divide(layer.hidden, kSavedUnits) + unit / kSavedUnits;
    return ((block * layer.batch + b) * saved_of(layer.cell) + part) * kSavedUnits + unit % kSavedUnits;
  }
  int64_t state_row(int64_t b) const { return (index * layer.batch + b) * layer.hidden; }
  // Whether a sequence is in its initial state before a step. In steps beyond its length a forward sequence
  // is not, but its state there matters to nothing.
  bool is_first(int64_t position, int64_t b) const { return position == 0 || !valid(time(position - 1), b); }
  const float* h_before(const float* y, int64_t position, int64_t b) const {
    if (!is_first(position, b)) return y + y_row(time(position - 1), b);
    return layer.initial_h == nullptr ? nullptr : layer.initial_h + state_row(b);
  }
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
