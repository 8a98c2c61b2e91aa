// Tiles of a plane. What a tile reads is copied once, with zeros around it, so that a tap is nothing
// but an offset: the sums over taps then run along flat memory, over the ends of rows, and know of
// no edges, strides or dilations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "compute.h"
#include "depthwise_rows.h"
#include "vector.h"

namespace onnxtrain::ONNXTRAIN_ISA {

constexpr int kZ = 0, kY = 1, kX = 2;  // axes of a convolution

inline int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

// One axis of a tile: `grid` positions, which read the source at base + position · step + offset of
// a tap. Places of the source are held apart by their remainder modulo the step, their phase, so
// that positions side by side read places side by side.
struct TileAxis {
  int64_t grid, step, base, size;  // size: of the source
  int64_t phases, length;          // length: places of each phase that are read

  TileAxis(int64_t positions, int64_t stride, int64_t first, int64_t source, int64_t largest_offset)
      : grid(positions),
        step(stride),
        base(first),
        size(source),
        phases(std::min(stride, largest_offset + 1)),
        length(positions + largest_offset / stride) {}

  // The places of a phase that lie inside of the source: [low, high).
  int64_t low(int64_t phase) const { return clamped(-(base + phase)); }
  int64_t high(int64_t phase) const { return std::max(low(phase), clamped(size - base - phase)); }

 private:
  int64_t clamped(int64_t distance) const { return distance <= 0 ? 0 : std::min(length, (distance + step - 1) / step); }
};

// How the copy of a tile lies in memory: for each phase a plane of rows. Zeros behind a row are also
// those in front of the next.
struct Tile {
  TileAxis rows, columns;
  int64_t pitch, plane;

  Tile(const TileAxis& down, const TileAxis& across) : rows(down), columns(across), pitch(across.grid) {
    for (int64_t phase = 0; phase < columns.phases; ++phase) {
      const int64_t before = columns.low(phase), end = columns.high(phase);
      pitch = std::max(pitch, end - before + std::max(before, columns.length - end));
    }
    plane = (rows.length - 1) * pitch + std::max(pitch, columns.length);
    find_parts();
  }

  // Floats of the copy; vectors that begin in it may read this many.
  int64_t floats() const { return rows.phases * columns.phases * plane + kLanes; }
  // Floats of a result, in rows of the same pitch.
  int64_t result_floats() const { return rows.grid * pitch + kLanes; }
  int64_t result_length() const { return (rows.grid - 1) * pitch + columns.grid; }

  // Where the copy holds what position (0, 0) reads at an offset.
  int64_t place(int64_t row_offset, int64_t column_offset) const {
    const int64_t phase = row_offset % rows.step * columns.phases + column_offset % columns.step;
    return phase * plane + row_offset / rows.step * pitch + column_offset / columns.step;
  }

  // Copies what lies inside of the source; the rest of the copy is zero already.
  void fill(float* copy, const float* source) const {
    if (columns.step == 1) {
      for (const Part& part : parts)
        copy_rows(copy + part.to, pitch, source + part.from, rows.step * columns.size, part.rows, part.count);
    } else if (columns.step == 2 && columns.phases == 2) {
      for (const Part& part : parts)
        split_rows(copy + part.to, copy + part.odd, pitch, source + part.from, rows.step * columns.size, part.rows,
                   part.count);
    } else {
      for (const Part& part : parts)
        for (int64_t row = 0; row < part.rows; ++row)
          for (int64_t at = 0; at < part.count; ++at)
            copy[part.to + row * pitch + at] = source[part.from + row * rows.step * columns.size + at * columns.step];
    }
  }

 private:
  static constexpr int64_t kWide = 48;

  // Rows to copy: from where to where, how many and how long.
  struct Part {
    int64_t to, odd, from, rows, count;
  };
  std::vector<Part> parts;

  void find_parts() {
    // Wide rows are read in the order of memory; of narrow ones, those of a phase are copied at once.
    const int64_t together = rows.phases > 1 && columns.size >= kWide ? 1 : rows.length;
    for (int64_t begin = 0; begin < rows.length; begin += together)
      for (int64_t phase = 0; phase < rows.phases; ++phase) {
        const int64_t low = std::max(begin, rows.low(phase)),
                      count = std::min(begin + together, rows.high(phase)) - low;
        const int64_t from = (rows.base + phase + low * rows.step) * columns.size;
        if (count > 0) find_columns(place(phase, 0) + low * pitch, from, count);
      }
  }

  void find_columns(int64_t to, int64_t from, int64_t count) {
    if (columns.step == 2 && columns.phases == 2) {
      const int64_t first = std::max<int64_t>(0, columns.base), into = first - columns.base;
      const int64_t end = std::min(columns.size, columns.base + 2 * columns.length);
      const int64_t even = to + into % 2 * plane + into / 2, odd = to + (into + 1) % 2 * plane + (into + 1) / 2;
      if (first < end) parts.push_back({even, odd, from + first, count, end - first});
      return;
    }
    for (int64_t phase = 0; phase < columns.phases; ++phase) {
      const int64_t low = columns.low(phase), length_inside = columns.high(phase) - low;
      const int64_t first = from + columns.base + phase + low * columns.step;
      if (length_inside > 0) parts.push_back({to + phase * plane + low, 0, first, count, length_inside});
    }
  }
};

// What a tile's copy may take, so that it and the result stay in the first cache; and the most that
// a convolution of wide kernels may need.
constexpr int64_t kTileFloats = 3584, kMostTileFloats = int64_t{1} << 16;
constexpr int64_t kTileColumns = 512;

// How a grid is cut into tiles.
struct Cut {
  int64_t rows, columns;            // of the grid
  int64_t tile_rows, tile_columns;  // of a tile; the last ones may have fewer
  int64_t down, across;             // how many tiles
  int64_t per_position, more_columns, more_rows;

  // A tile holds `per_position` floats for each of its positions and of those around it.
  Cut(int64_t grid_rows, int64_t grid_columns, int64_t floats_each, int64_t columns_around, int64_t rows_around)
      : rows(grid_rows),
        columns(grid_columns),
        per_position(floats_each),
        more_columns(columns_around),
        more_rows(rows_around) {
    across = (columns + kTileColumns - 1) / kTileColumns;
    tile_columns = (columns + across - 1) / across;
    across = (columns + tile_columns - 1) / tile_columns;
    const int64_t row = per_position * (tile_columns + more_columns);
    const int64_t high = std::max<int64_t>(std::max<int64_t>(1, more_rows), kTileFloats / row - more_rows);
    down = (rows + high - 1) / high;
    tile_rows = (rows + down - 1) / down;
    down = (rows + tile_rows - 1) / tile_rows;
  }

  int64_t tiles() const { return down * across; }
  int64_t floats() const { return per_position * (tile_columns + more_columns) * (tile_rows + more_rows); }
  int64_t first_row(int64_t tile) const { return tile / across * tile_rows; }
  int64_t first_column(int64_t tile) const { return tile % across * tile_columns; }
  int64_t rows_of(int64_t tile) const { return std::min(tile_rows, rows - first_row(tile)); }
  int64_t columns_of(int64_t tile) const { return std::min(tile_columns, columns - first_column(tile)); }
};

// Adds kCount vectors of the sum over taps of weight · copy at the tap's place.
template <int kCount>
inline void add_taps(const float* copy, const int64_t* places, const float* weights, int64_t taps, float* result,
                     bool fresh) {
  Vector sum[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) sum[i] = fresh ? Vector{} : load(result + i * kLanes);
  for (int64_t tap = 0; tap < taps; ++tap) {
    const Vector weight = broadcast(weights[tap]);
    const float* from = copy + places[tap];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] += weight * load(from + i * kLanes);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) store(result + i * kLanes, sum[i]);
}

inline void correlate(const float* copy, const int64_t* places, const float* weights, int64_t taps, float* result,
                      int64_t length, bool fresh) {
  int64_t left = (length + kLanes - 1) / kLanes;
  for (; left >= 8; left -= 8, copy += 8 * kLanes, result += 8 * kLanes)
    add_taps<8>(copy, places, weights, taps, result, fresh);
  if (left >= 4) {
    add_taps<4>(copy, places, weights, taps, result, fresh);
    left -= 4, copy += 4 * kLanes, result += 4 * kLanes;
  }
  for (; left > 0; --left, copy += kLanes, result += kLanes) add_taps<1>(copy, places, weights, taps, result, fresh);
}

// Adds to the sums of kTaps taps the products of a copy at their places and `other`.
template <int kTaps>
inline void add_products(const float* copy, const int64_t* places, const float* other, int64_t length, Vector* sums) {
  Vector sum[kTaps];
  const float* from[kTaps];
#pragma GCC unroll 9
  for (int tap = 0; tap < kTaps; ++tap) sum[tap] = sums[tap], from[tap] = copy + places[tap];
  for (int64_t at = 0; at < length; at += kLanes) {
    const Vector factor = load(other + at);
#pragma GCC unroll 9
    for (int tap = 0; tap < kTaps; ++tap) sum[tap] += factor * load(from[tap] + at);
  }
#pragma GCC unroll 9
  for (int tap = 0; tap < kTaps; ++tap) sums[tap] = sum[tap];
}

constexpr int kMostSums = 9;  // that fit the registers

inline void multiply_taps(const float* copy, const int64_t* places, int64_t taps, const float* other, int64_t length,
                          Vector* sums) {
  for (; taps >= kMostSums; taps -= kMostSums, places += kMostSums, sums += kMostSums)
    add_products<kMostSums>(copy, places, other, length, sums);
  switch (taps) {
    case 1:
      return add_products<1>(copy, places, other, length, sums);
    case 2:
      return add_products<2>(copy, places, other, length, sums);
    case 3:
      return add_products<3>(copy, places, other, length, sums);
    case 4:
      return add_products<4>(copy, places, other, length, sums);
    case 5:
      return add_products<5>(copy, places, other, length, sums);
    case 6:
      return add_products<6>(copy, places, other, length, sums);
    case 7:
      return add_products<7>(copy, places, other, length, sums);
    case 8:
      return add_products<8>(copy, places, other, length, sums);
  }
}

// Memory of a task.
class Memory {
 public:
  float* zeroed(int64_t floats) { return filled(floats, 0); }
  float* filled(int64_t floats, float value) {
    data_.assign(static_cast<size_t>(floats), value);
    return data_.data();
  }

 private:
  std::vector<float> data_;
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
