// Gradients of maxima, compiled once for each instruction set.
#include "pool.h"

#include <cmath>
#include <limits>

#include "depthwise_tiles.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Elements of x that a task reads at least.
constexpr int64_t kTaskElements = int64_t{1} << 16;

typedef int Indices __attribute__((vector_size(kLanes * sizeof(int)), aligned(sizeof(int)), may_alias));

int64_t largest_offset(const Convolution& pool, int axis) { return (pool.kernel[axis] - 1) * pool.dilation[axis]; }

// Where an axis of x lies under tap `tap` of window `window`.
int64_t position(const Convolution& pool, int axis, int64_t window, int64_t tap) {
  return window * pool.stride[axis] + tap * pool.dilation[axis] - pool.pad[axis];
}

bool inside(const Convolution& pool, int axis, int64_t at) { return at >= 0 && at < pool.in[axis]; }

// Calls work(plane) for all channels of all images, in tasks.
template <class Work>
void over_planes(const Convolution& pool, const Parallel& parallel, const Work& work) {
  const int64_t planes = pool.batch * pool.groups;
  const int64_t together = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, pool.in_size()));
  parallel((planes + together - 1) / together,
           [&](int64_t task) { work(task * together, std::min(planes, (task + 1) * together)); });
}

// ---- one window at a time ------------------------------------------------------------------------

// Adds a gradient to the first maximum of a window; a window of nothing but NaN has none.
void add_to_maximum(const Convolution& pool, int64_t z, int64_t y, int64_t x, const float* from, float gradient,
                    float* to) {
  int64_t found = -1;
  float best = -kInfinity;
  for (int64_t i = 0; i < pool.kernel[kZ]; ++i)
    for (int64_t j = 0; j < pool.kernel[kY]; ++j)
      for (int64_t k = 0; k < pool.kernel[kX]; ++k) {
        const int64_t at_z = position(pool, kZ, z, i), at_y = position(pool, kY, y, j), at_x = position(pool, kX, x, k);
        if (!inside(pool, kZ, at_z) || !inside(pool, kY, at_y) || !inside(pool, kX, at_x)) continue;
        const int64_t at = (at_z * pool.in[kY] + at_y) * pool.in[kX] + at_x;
        if (from[at] > best || (found < 0 && from[at] == best)) best = from[at], found = at;
      }
  if (found >= 0) to[found] += gradient;
}

void each_window(const Convolution& pool, const float* x, const float* dy, float* dx, const Parallel& parallel) {
  over_planes(pool, parallel, [&](int64_t first, int64_t end) {
    for (int64_t plane = first; plane < end; ++plane) {
      const float* gradient = dy + plane * pool.out_size();
      float* to = dx + plane * pool.in_size();
      std::fill_n(to, pool.in_size(), 0.0f);
      for (int64_t i = 0; i < pool.out[kZ]; ++i)
        for (int64_t j = 0; j < pool.out[kY]; ++j)
          for (int64_t k = 0; k < pool.out[kX]; ++k)
            add_to_maximum(pool, i, j, k, x + plane * pool.in_size(), *gradient++, to);
    }
  });
}

// ---- windows of a tile at once -------------------------------------------------------------------

// Goes through the taps of kCount vectors of windows, and keeps the best number and its tap.
template <int kCount>
inline void compare_taps(const float* copy, const int64_t* places, int64_t taps, int first_tap, float* bests,
                         int* winners, bool fresh) {
  Vector best[kCount];
  Indices winner[kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    best[i] = fresh ? -kInfinity - Vector{} : load(bests + i * kLanes);
    winner[i] = fresh ? -1 - Indices{} : *reinterpret_cast<const Indices*>(winners + i * kLanes);
  }
  for (int64_t tap = 0; tap < taps; ++tap) {
    const float* from = copy + places[tap];
    const Indices own = static_cast<int>(first_tap + tap) - Indices{};
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      const Vector number = load(from + i * kLanes);
      const auto better = number > best[i];
      best[i] = better ? number : best[i];
      winner[i] = better ? own : winner[i];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    store(bests + i * kLanes, best[i]);
    *reinterpret_cast<Indices*>(winners + i * kLanes) = winner[i];
  }
}

// The windows of one tile, made ready for any plane. What lies outside of the plane is NaN in its
// copy, which is never the best.
struct MaxTile {
  Tile tile;
  int64_t row, column;  // the first window
  std::vector<int64_t> places;
  Memory copy_memory, best_memory;
  std::vector<int> winners;
  float *copy, *bests;

  MaxTile(const Convolution& pool, const Cut& cut, int64_t index)
      : tile(axis(pool, kY, cut.first_row(index), cut.rows_of(index)),
             axis(pool, kX, cut.first_column(index), cut.columns_of(index))),
        row(cut.first_row(index)),
        column(cut.first_column(index)),
        winners(static_cast<size_t>(tile.result_floats())),
        copy(copy_memory.filled(tile.floats(), std::numeric_limits<float>::quiet_NaN())),
        bests(best_memory.zeroed(tile.result_floats())) {
    for (int64_t y = 0; y < pool.kernel[kY]; ++y)
      for (int64_t x = 0; x < pool.kernel[kX]; ++x)
        places.push_back(tile.place(y * pool.dilation[kY], x * pool.dilation[kX]));
  }

  // Finds the winning tap of each window at depth z of a volume.
  void find(const Convolution& pool, int64_t z, const float* volume) {
    const int64_t taps = static_cast<int64_t>(places.size());
    bool fresh = true;
    for (int64_t tap = 0; tap < pool.kernel[kZ]; ++tap) {
      const int64_t at = position(pool, kZ, z, tap);
      if (!inside(pool, kZ, at)) continue;
      tile.fill(copy, volume + at * pool.in[kY] * pool.in[kX]);
      compare(static_cast<int>(tap * taps), fresh);
      fresh = false;
    }
    if (fresh) std::fill(winners.begin(), winners.end(), -1);
  }

  // Adds the gradients of its windows where they won.
  void add(const Convolution& pool, const std::vector<int64_t>& offsets, int64_t z, const float* volume,
           const float* gradients, float* to) const {
    for (int64_t i = 0; i < tile.rows.grid; ++i) {
      const int64_t y = row + i, at = (position(pool, kZ, z, 0) * pool.in[kY] + position(pool, kY, y, 0)) * pool.in[kX];
      const int* winner = winners.data() + i * tile.pitch;
      const float* from = gradients + y * pool.out[kX] + column;
      const int64_t begin = at + position(pool, kX, column, 0), step = pool.stride[kX], count = tile.columns.grid;
      const int64_t* const offset = offsets.data();
      for (int64_t j = 0; j < count; ++j)
        if (__builtin_expect(winner[j] >= 0, 1))
          to[begin + j * step + offset[winner[j]]] += from[j];
        else
          add_to_maximum(pool, z, y, column + j, volume, from[j], to);
    }
  }

 private:
  static TileAxis axis(const Convolution& pool, int of, int64_t first, int64_t count) {
    return TileAxis(count, pool.stride[of], position(pool, of, first, 0), pool.in[of], largest_offset(pool, of));
  }

  void compare(int first_tap, bool fresh) {
    const int64_t taps = static_cast<int64_t>(places.size());
    const int64_t end = (tile.result_length() + kLanes - 1) / kLanes * kLanes;
    int64_t at = 0;
    for (; at + 4 * kLanes <= end; at += 4 * kLanes)
      compare_taps<4>(copy + at, places.data(), taps, first_tap, bests + at, winners.data() + at, fresh);
    for (; at < end; at += kLanes)
      compare_taps<1>(copy + at, places.data(), taps, first_tap, bests + at, winners.data() + at, fresh);
  }
};

Cut cut_of(const Convolution& pool) {
  const auto phases = [&](int axis) { return std::min(pool.stride[axis], largest_offset(pool, axis) + 1); };
  return Cut(pool.out[kY], pool.out[kX], phases(kY) * phases(kX), largest_offset(pool, kX) / pool.stride[kX],
             largest_offset(pool, kY) / pool.stride[kY]);
}

// How far each tap lies from the first in a volume.
std::vector<int64_t> offsets_of(const Convolution& pool) {
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < pool.kernel[kZ]; ++i)
    for (int64_t j = 0; j < pool.kernel[kY]; ++j)
      for (int64_t k = 0; k < pool.kernel[kX]; ++k)
        offsets.push_back((i * pool.dilation[kZ] * pool.in[kY] + j * pool.dilation[kY]) * pool.in[kX] +
                          k * pool.dilation[kX]);
  return offsets;
}

void by_tiles(const Convolution& pool, const float* x, const float* dy, float* dx, const Parallel& parallel) {
  const Cut cut = cut_of(pool);
  const std::vector<int64_t> offsets = offsets_of(pool);
  over_planes(pool, parallel, [&](int64_t first, int64_t end) {
    std::vector<MaxTile> tiles;
    for (int64_t index = 0; index < cut.tiles(); ++index) tiles.emplace_back(pool, cut, index);
    for (int64_t plane = first; plane < end; ++plane) {
      const float *volume = x + plane * pool.in_size(), *gradients = dy + plane * pool.out_size();
      float* to = dx + plane * pool.in_size();
      std::fill_n(to, pool.in_size(), 0.0f);
      for (int64_t z = 0; z < pool.out[kZ]; ++z, gradients += pool.out[kY] * pool.out[kX])
        for (MaxTile& own : tiles) {
          own.find(pool, z, volume);
          own.add(pool, offsets, z, volume, gradients, to);
        }
    }
  });
}

// ---- windows of two by two side by side ----------------------------------------------------------

bool is_two_by_two(const Convolution& pool) {
  const auto two = [&](int axis) {
    return pool.kernel[axis] == 2 && pool.stride[axis] == 2 && pool.dilation[axis] == 1 && pool.pad[axis] == 0 &&
           2 * pool.out[axis] <= pool.in[axis];
  };
  return pool.kernel[kZ] == 1 && pool.in[kZ] == 1 && pool.out[kZ] == 1 && two(kY) && two(kX) && pool.out[kX] >= 4;
}

// Writes rows whose elements are those of two vectors in turn.
template <class Own>
inline void write_joined(float* to, typename Own::Type even, typename Own::Type odd) {
  Own::write(to, first_half(even, odd));
  Own::write(to + WidthOf<Own>::value, second_half(even, odd));
}

// The windows of two rows of x.
template <class Own>
[[gnu::always_inline]] inline void two_by_two_row(const float* x, int64_t width, const float* dy, int64_t count,
                                                  float* dx) {
  constexpr int kWidth = WidthOf<Own>::value;
  using Row = typename Own::Type;
  const auto split = [](const float* from, Row& even, Row& odd) {
    const Row first = Own::read(from), second = Own::read(from + kWidth);
    even = evens(first, second), odd = odds(first, second);
  };
  cover<kWidth>(count, [&](int64_t at) {
    Row a, b, c, d;
    split(x + 2 * at, a, b);
    split(x + width + 2 * at, c, d);
    const Row gradient = Own::read(dy + at), none{};
    // The first of those that none is above; NaN is above nothing, and nothing is above NaN.
    const auto first = (a == a) & ~(b > a) & ~(c > a) & ~(d > a);
    const auto second = ~first & (b == b) & ~(c > b) & ~(d > b);
    const auto third = ~first & ~second & (c == c) & ~(d > c), fourth = ~first & ~second & ~third & (d == d);
    write_joined<Own>(dx + 2 * at, first ? gradient : none, second ? gradient : none);
    write_joined<Own>(dx + width + 2 * at, third ? gradient : none, fourth ? gradient : none);
  });
}

// Calls row(Narrow, two rows of dx, where their row of dy begins, width of x, of dy) for all planes,
// and writes zeros where no window lies.
template <class Row>
void two_by_two(const Convolution& pool, float* dx, const Parallel& parallel, const Row& row) {
  const int64_t width = pool.in[kX], columns = pool.out[kX], rows = pool.out[kY], in = pool.in_size();
  over_planes(pool, parallel, [&](int64_t first, int64_t end) {
    by_width(
        columns,
        [&](auto narrow) {
          for (int64_t plane = first; plane < end; ++plane) {
            float* to = dx + plane * in;
            int64_t from = plane * rows * columns;
            for (int64_t at = 0; at < rows; ++at, to += 2 * width, from += columns) {
              row(narrow, to, from, width, columns);
              for (int64_t rest = 2 * columns; rest < width; ++rest) to[rest] = to[width + rest] = 0;
            }
            std::fill(to, dx + (plane + 1) * in, 0.0f);
          }
        },
        [](int64_t) {});
  });
}

bool average_two_by_two(const Convolution& pool, float factor, const float* dy, float* dx, const Parallel& parallel) {
  if (pool.in_size() == 0 || !is_two_by_two(pool)) return false;
  two_by_two(pool, dx, parallel, [=](auto narrow, float* to, int64_t from, int64_t width, int64_t columns) {
    using Own = decltype(narrow);
    cover<WidthOf<Own>::value>(columns, [=](int64_t at) {
      const auto share = Own::read(dy + from + at) * factor;
      write_joined<Own>(to + 2 * at, share, share);
      write_joined<Own>(to + width + 2 * at, share, share);
    });
  });
  return true;
}

void max_gradient(const Convolution& pool, const float* x, const float* dy, float* dx, const Parallel& parallel) {
  if (pool.out_size() == 0) return each_window(pool, x, dy, dx, parallel);
  if (is_two_by_two(pool))
    return two_by_two(pool, dx, parallel, [=](auto narrow, float* to, int64_t from, int64_t width, int64_t columns) {
      two_by_two_row<decltype(narrow)>(x + (to - dx), width, dy + from, columns, to);
    });
  const bool near = std::max(largest_offset(pool, kY), largest_offset(pool, kX)) <= kMostTileFloats &&
                    std::max(pool.stride[kY], pool.stride[kX]) <= kTileColumns && pool.taps() < (int64_t{1} << 31);
  if (near && cut_of(pool).floats() <= kMostTileFloats) return by_tiles(pool, x, dy, dx, parallel);
  each_window(pool, x, dy, dx, parallel);
}

void spread(int64_t planes, int64_t size, float factor, const float* numbers, float* to, const Parallel& parallel) {
  const int64_t together = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, size));
  parallel((planes + together - 1) / together, [&](int64_t task) {
    const int64_t first = task * together, end = std::min(planes, first + together);
    by_width(
        size,
        [&](auto narrow) {
          using Own = decltype(narrow);
          for (int64_t plane = first; plane < end; ++plane) {
            const auto all = numbers[plane] * factor - typename Own::Type{};
            cover<WidthOf<Own>::value>(size, [&](int64_t at) { Own::write(to + plane * size + at, all); });
          }
        },
        [&](int64_t at) {
          for (int64_t plane = first; plane < end; ++plane) to[plane * size + at] = numbers[plane] * factor;
        });
  });
}

}  // namespace

const Pool kPool = {max_gradient, average_two_by_two, spread};

}  // namespace onnxtrain::ONNXTRAIN_ISA
