// Convolutions of 3 × 3 taps and stride 1 by Winograd's F(2×2, 3×3): 16 multiplications for four
// outputs instead of 36. Tiles of 4 × 4 pixels, tiles of 2 × 2 outputs and the weights go through
// small linear maps, between which 16 products of matrices, one for each point of a tile, do the work.
//
// All maps work on vectors of kLanes channels: pixels are transposed once on their way in and once
// on their way out. Larger tiles would save more multiplications and lose digits.
#pragma once

#include "product.h"

namespace onnxtrain::ONNXTRAIN_ISA::winograd {

constexpr int kPoints = 16;

// Rows of a matrix of 4 × 4 from the rows of one of 4 × 4 or 2 × 2 or 3 × 3; `step` walks along a row.
inline void map_pixels(const Vector& a, const Vector& b, const Vector& c, const Vector& d, Vector* to, int step) {
  to[0] = a - c;
  to[step] = b + c;
  to[2 * step] = c - b;
  to[3 * step] = b - d;
}

inline void map_weights(const Vector& a, const Vector& b, const Vector& c, Vector* to, int step) {
  const Vector outer = 0.5f * (a + c), inner = 0.5f * b;
  to[0] = a;
  to[step] = outer + inner;
  to[2 * step] = outer - inner;
  to[3 * step] = c;
}

// The transposes of the two that follow map gradients.
inline void map_sums(const Vector* from, int step, Vector* to, int to_step) {
  const Vector& b = from[step];
  const Vector& c = from[2 * step];
  to[0] = from[0] + b + c;
  to[to_step] = b - c - from[3 * step];
}

inline void spread_sums(const Vector& a, const Vector& b, Vector* to, int step) {
  to[0] = a;
  to[step] = a + b;
  to[2 * step] = a - b;
  to[3 * step] = -b;
}

inline void collect_weights(const Vector* from, int step, Vector* to, int to_step) {
  const Vector sum = 0.5f * (from[step] + from[2 * step]);
  to[0] = from[0] + sum;
  to[to_step] = 0.5f * (from[step] - from[2 * step]);
  to[2 * to_step] = sum + from[3 * step];
}

// A rectangle of tiles of one image, numbered from `first` within its block.
struct Rectangle {
  int64_t image, y, x, rows, columns, first;
};

// The tiles that cover the outputs of all images, cut into blocks.
struct Tiling {
  int64_t rows, columns;  // of tiles in an image
  EvenCut across;         // pieces of a row of tiles that a block never cuts
  EvenCut blocks;         // of such pieces

  Tiling(int64_t batch, int64_t height, int64_t width, int64_t most)
      : rows((height + 1) / 2),
        columns((width + 1) / 2),
        across(columns, most),
        blocks(batch * rows * across.pieces, std::max<int64_t>(1, most / across.length(0))) {}

  int64_t most_tiles() const { return blocks.length(0) * across.length(0); }

  // The most pixels that the tiles of a rectangle read.
  int64_t most_pixels() const {
    const int64_t high = across.pieces == 1 ? std::min(rows, blocks.length(0)) : 1;
    return (2 * high + 2) * (2 * across.length(0) + 2);
  }

  // The rectangles of a block.
  std::vector<Rectangle> of(int64_t block) const {
    std::vector<Rectangle> found;
    int64_t tiles = 0;
    for (int64_t at = blocks.begin(block), end = at + blocks.length(block); at < end; ++at) {
      const int64_t piece = at % across.pieces, y = at / across.pieces % rows, image = at / across.pieces / rows;
      if (across.pieces == 1 && !found.empty() && found.back().image == image)
        ++found.back().rows;
      else
        found.push_back({image, y, across.begin(piece), 1, across.length(piece), tiles});
      tiles += across.length(piece);
    }
    return found;
  }
};

inline int64_t tiles_in(const std::vector<Rectangle>& all) {
  return all.back().first + all.back().rows * all.back().columns;
}

// The images that tiles are read from or written to, and where output 0 lies in a tile's pixels.
struct Image {
  int64_t height, width, batch_stride;
  int64_t pad_y = 0, pad_x = 0;

  int64_t plane() const { return height * width; }
};

// Pixels of `channels` channels, from `size` × `size` of each tile on with zeros around the image,
// as [row][column][kLanes]; tiles lie two pixels apart.
inline void gather(const Image& image, const float* x, int64_t channels, const Rectangle& of, int64_t size, float* to) {
  const int64_t top = 2 * of.y - image.pad_y, left = 2 * of.x - image.pad_x;
  const int64_t rows = 2 * of.rows + size - 2, pitch = 2 * of.columns + size - 2;
  const int64_t begin = std::min(pitch, std::max<int64_t>(0, -left));
  const int64_t end = std::max(begin, std::min(pitch, image.width - left));
  const float* from = x + of.image * image.batch_stride;
  for (int64_t r = 0; r < rows; ++r, to += pitch * kLanes) {
    const int64_t y = top + r;
    if (y < 0 || y >= image.height) {
      std::fill_n(to, pitch * kLanes, 0.0f);
      continue;
    }
    std::fill_n(to, begin * kLanes, 0.0f);
    transpose_lines(from + y * image.width + left + begin, image.plane(), channels, end - begin, to + begin * kLanes,
                    kLanes);
    std::fill_n(to + end * kLanes, (pitch - end) * kLanes, 0.0f);
  }
}

// Writes [row][column][kLanes] of two rows and columns for each tile into the planes of an image.
inline void scatter(const Image& image, const float* from, int64_t channels, const Rectangle& of, float* y) {
  const int64_t pitch = 2 * of.columns;
  int64_t rows = std::min(2 * of.rows, image.height - 2 * of.y), columns = std::min(pitch, image.width - 2 * of.x);
  float* to = y + of.image * image.batch_stride + 2 * of.y * image.width + 2 * of.x;
  if (columns == image.width && columns == pitch) columns *= rows, rows = 1;
  Vector square[kLanes];
  for (int64_t r = 0; r < rows; ++r, to += image.width, from += pitch * kLanes)
    for (int64_t x = 0; x < columns; x += kLanes) {
      const int64_t left = std::min<int64_t>(columns - x, kLanes);
      if (left == kLanes && channels == kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) square[i] = load(from + (x + i) * kLanes);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(to + i * image.plane() + x, square[i]);
      } else {
        for (int i = 0; i < kLanes; ++i) square[i] = i < left ? load(from + (x + i) * kLanes) : Vector{};
        transpose(square);
        for (int i = 0; i < channels; ++i) store_first(to + i * image.plane() + x, square[i], left);
      }
    }
}

// Maps the pixels of the tiles of a rectangle; place(tile) is where the first point goes.
template <class Place>
inline void map_all_pixels(const float* pixels, const Rectangle& of, int64_t point, const Place& place) {
  const int64_t pitch = (2 * of.columns + 2) * kLanes;
  for (int64_t y = 0, tile = of.first; y < of.rows; ++y)
    for (int64_t x = 0; x < of.columns; ++x, ++tile) {
      const float* from = pixels + 2 * y * pitch + 2 * x * kLanes;
      Vector half[16], mapped[16];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c)
        map_pixels(load(from + c * kLanes), load(from + pitch + c * kLanes), load(from + 2 * pitch + c * kLanes),
                   load(from + 3 * pitch + c * kLanes), half + c, 4);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r)
        map_pixels(half[4 * r], half[4 * r + 1], half[4 * r + 2], half[4 * r + 3], mapped + 4 * r, 1);
      float* to = place(tile);
#pragma GCC unroll 16
      for (int p = 0; p < kPoints; ++p) store(to + p * point, mapped[p]);
    }
}

// Maps the gradients of the outputs of the tiles of a rectangle.
template <class Place>
inline void map_all_gradients(const float* gradients, const Rectangle& of, int64_t point, const Place& place) {
  const int64_t pitch = 2 * of.columns * kLanes;
  for (int64_t y = 0, tile = of.first; y < of.rows; ++y)
    for (int64_t x = 0; x < of.columns; ++x, ++tile) {
      const float* from = gradients + 2 * y * pitch + 2 * x * kLanes;
      Vector half[8], mapped[16];
      for (int c = 0; c < 2; ++c) spread_sums(load(from + c * kLanes), load(from + pitch + c * kLanes), half + c, 2);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) spread_sums(half[2 * r], half[2 * r + 1], mapped + 4 * r, 1);
      float* to = place(tile);
#pragma GCC unroll 16
      for (int p = 0; p < kPoints; ++p) store(to + p * point, mapped[p]);
    }
}

// Weights of a convolution from some channels to others: w[out · out_step + in · in_step + tap].
struct Weights {
  const float* w;
  int64_t in, out, in_step, out_step;
  bool turned;  // taps in reverse order

  int64_t panels() const { return pieces_of(out, kColumns); }
  int64_t width(int64_t panel) const { return rounded_up(std::min<int64_t>(kColumns, out - panel * kColumns), kLanes); }
  int64_t mapped_size() const { return kPoints * in * rounded_up(out, kLanes); }

  // Maps a panel of outputs to [point][in][width].
  void map(int64_t panel, float* to, bool rounded) const {
    const int64_t wide = width(panel), together = in_step == 9 ? kLanes : 1;
    alignas(64) float taps[9 * kLanes * kLanes];
    for (int64_t j = 0; j < wide; j += kLanes) {
      const int64_t first = panel * kColumns + j, count = std::min<int64_t>(kLanes, out - first);
      for (int64_t k = 0; k < in; k += together) {
        const int64_t held = std::min(together, in - k);
        transpose_lines(w + first * out_step + k * in_step, out_step, count, 9 * held, taps, kLanes);
        for (int64_t i = 0; i < held; ++i) map_one(taps + i * 9 * kLanes, to + (k + i) * wide + j, in * wide);
      }
    }
    if (rounded)
      for (int64_t p = 0; p < kPoints; ++p) round_rows(to + p * in * wide, in, wide);
  }

 private:
  void map_one(const float* taps, float* to, int64_t point) const {
    Vector half[12], mapped[16];
    const int64_t begin = turned ? 8 * kLanes : 0, step = turned ? -kLanes : kLanes;
#pragma GCC unroll 3
    for (int c = 0; c < 3; ++c) {
      const float* from = taps + begin + c * step;
      map_weights(load(from), load(from + 3 * step), load(from + 6 * step), half + c, 3);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) map_weights(half[3 * r], half[3 * r + 1], half[3 * r + 2], mapped + 4 * r, 1);
#pragma GCC unroll 16
    for (int p = 0; p < kPoints; ++p) store(to + p * point, mapped[p]);
  }
};

// A block of tiles of a convolution on its way through the products.
struct Forward {
  const Image& in;
  const Image& out;
  const Weights& weights;
  const float* mapped;  // all weights; missing where each panel of outputs is used once
  const float* x;
  const float* bias;  // may be missing
  float* y;
  bool rounded;

  static constexpr int64_t kTogether = 2;  // panels of outputs between two maps

  // Mapped weights of a panel of outputs.
  int64_t panel_size() const { return kPoints * weights.in * kColumns; }

  void run(const std::vector<Rectangle>& tiles, int64_t panel, int64_t panel_end) const {
    const int64_t count = tiles_in(tiles), blocks = pieces_of(weights.in, kLanes);
    const bool in_tiles = rounded && has_amx();
    const PanelCut cut(count, in_tiles);
    const MatrixUnit unit(in_tiles);
    int64_t most = 0;
    for (const Rectangle& each : tiles) most = std::max(most, (2 * each.rows + 2) * (2 * each.columns + 2));
    const Floats pixels(most * kLanes), points((kPoints * count * blocks + kTile) * kLanes),
        sums(kPoints * kTogether * count * kColumns), own(mapped != nullptr ? 0 : kTogether * panel_size());
    read(tiles, cut, pixels.get(), points.get());
    for (; panel < panel_end; panel += kTogether) {
      const int64_t end = std::min(panel + kTogether, panel_end);
      for (int64_t i = panel; mapped == nullptr && i < end; ++i)
        weights.map(i, own.get() + (i - panel) * panel_size(), rounded);
      const float* right = mapped != nullptr ? mapped + panel * panel_size() : own.get();
      multiply(cut, panel, end, points.get(), right, sums.get());
      for (int64_t i = panel; i < end; ++i)
        write(tiles, i, sums.get() + (i - panel) * count * kColumns, kTogether * count * kColumns, pixels.get());
    }
  }

 private:
  // Maps all pixels to [point][panel of tiles][block of channels][tile][kLanes].
  void read(const std::vector<Rectangle>& tiles, const PanelCut& cut, float* pixels, float* points) const {
    const int64_t blocks = pieces_of(weights.in, kLanes), point = cut.size * blocks * kLanes;
    std::vector<std::pair<int64_t, int64_t>> places;  // of each tile, and from block to block of its channels
    for (int64_t p = 0; p < cut.pieces; ++p)
      for (int64_t i = 0; i < cut.length(p); ++i)
        places.emplace_back((cut.begin(p) * blocks + i) * kLanes, cut.length(p) * kLanes);
    for (int64_t b = 0; b < blocks; ++b)
      for (const Rectangle& each : tiles) {
        gather(in, x + b * kLanes * in.plane(), std::min<int64_t>(kLanes, weights.in - b * kLanes), each, 4, pixels);
        map_all_pixels(pixels, each, point, [&](int64_t tile) {
          const auto& place = places[static_cast<size_t>(tile)];
          return points + place.first + b * place.second;
        });
      }
    if (!rounded) return;
    for (int64_t p = 0; p < kPoints; ++p)
      for (int64_t i = 0; i < cut.pieces; ++i)
        round_blocks(points + p * point + cut.begin(i) * blocks * kLanes, blocks, cut.length(i));
  }

  // `mapped` are the weights from that panel on.
  void multiply(const PanelCut& cut, int64_t panel, int64_t panel_end, const float* points, const float* mapped,
                float* sums) const {
    const int64_t deep = rounded_up(weights.in, kLanes);
    for (int64_t p = 0; p < kPoints; ++p)
      for (int64_t own = panel; own < panel_end; ++own) {
        const int64_t width = weights.width(own);
        const float* right = mapped + (own - panel) * panel_size() + p * weights.in * width;
        float* to = sums + (p * kTogether + own - panel) * cut.size * kColumns;
        constexpr int64_t kPart = 2 * kDepth;  // a sum of all would lose digits
        for (int64_t k = 0; k < weights.in; k += kPart) {
          const int64_t at = rounded ? k / 2 : k;
          for (int64_t i = 0; i < cut.pieces; ++i)
            add_panels(std::min(kPart, weights.in - k),
                       points + (p * cut.size + cut.begin(i)) * deep + at * cut.length(i), cut.length(i),
                       right + at * width, width, to + cut.begin(i) * kColumns, kColumns, k == 0, rounded);
        }
      }
  }

  void write(const std::vector<Rectangle>& tiles, int64_t panel, const float* sums, int64_t point,
             float* pixels) const {
    for (int64_t j = 0; j < weights.width(panel); j += kLanes) {
      const int64_t first = panel * kColumns + j, count = std::min<int64_t>(kLanes, weights.out - first);
      const Vector added = bias != nullptr ? load_first(bias + first, count) : Vector{};
      for (const Rectangle& each : tiles) {
        collect(sums + j, point, each, added, pixels);
        scatter(out, pixels, count, each, y + first * out.plane());
      }
    }
  }

  static void collect(const float* sums, int64_t point, const Rectangle& of, Vector added, float* pixels) {
    const int64_t pitch = 2 * of.columns * kLanes;
    for (int64_t r = 0, tile = of.first; r < of.rows; ++r)
      for (int64_t c = 0; c < of.columns; ++c, ++tile) {
        Vector points[16], half[8], made[4];
#pragma GCC unroll 16
        for (int p = 0; p < kPoints; ++p) points[p] = load(sums + p * point + tile * kColumns);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) map_sums(points + i, 4, half + i, 4);
        map_sums(half, 1, made, 1);
        map_sums(half + 4, 1, made + 2, 1);
        float* to = pixels + 2 * r * pitch + 2 * c * kLanes;
        store(to, made[0] + added);
        store(to + kLanes, made[1] + added);
        store(to + pitch, made[2] + added);
        store(to + pitch + kLanes, made[3] + added);
      }
  }
};

// y = x * w + bias for one group.
inline void convolve(const Image& in, const Image& out, const Weights& weights, int64_t batch, const float* x,
                     const float* bias, float* y, bool rounded, const Parallel& parallel) {
  // Mapped pixels of a block stay in the second cache.
  const int64_t most = std::max<int64_t>(64, std::min<int64_t>(112, 7168 / std::max<int64_t>(1, weights.in)));
  const Tiling tiling(batch, out.height, out.width, most);
  const EvenCut outputs(weights.panels(),
                        tiling.blocks.pieces >= 16 ? weights.panels() : std::max<int64_t>(1, 128 / kColumns));
  const bool once = tiling.blocks.pieces == 1;
  const Floats mapped(once ? 0 : weights.mapped_size());
  const Forward forward{in, out, weights, once ? nullptr : mapped.get(), x, bias, y, rounded};
  if (!once)
    parallel(weights.panels(),
             [&](int64_t panel) { weights.map(panel, mapped.get() + panel * forward.panel_size(), rounded); });
  parallel(tiling.blocks.pieces * outputs.pieces, [&](int64_t task) {
    const int64_t own = task % outputs.pieces, first = outputs.begin(own);
    forward.run(tiling.of(task / outputs.pieces), first, first + outputs.length(own));
  });
}

// Rows of a tile of the products for gradients of weights, whose left side is [tile][kLanes].
constexpr int kGradientRows = kLanes > 4 ? kLanes / 2 : kLanes;

// The gradient with respect to the weights, for a range of channels of both sides and of blocks of tiles.
struct WeightGradient {
  const Image& in;
  const Image& out;
  const Tiling& tiling;
  const float* x;
  const float* dy;
  int64_t in_channels, out_channels;
  bool rounded;

  int64_t padded_in() const { return rounded_up(in_channels, kColumns); }
  int64_t padded_out() const { return rounded_up(out_channels, kLanes); }
  int64_t points_size() const { return kPoints * padded_in() * padded_out(); }

  struct Range {
    int64_t panel, panel_end;  // of input channels
    int64_t lane, lane_end;    // vectors of output channels
    int64_t block, block_end;  // of tiles

    int64_t high() const { return (lane_end - lane) * kLanes; }
    int64_t wide() const { return (panel_end - panel) * kColumns; }
  };

  // Sets sums[point][out][in] of its channels.
  void run(const Range& of, float* sums) const {
    const int64_t most = tiling.most_tiles(), panels = of.panel_end - of.panel, lanes = of.lane_end - of.lane;
    const bool in_tiles = rounded && has_amx();
    const MatrixUnit unit(in_tiles);
    const Floats pixels(tiling.most_pixels() * kLanes), left(kPoints * lanes * height_of(most) * kLanes),
        right(kPoints * panels * most * kColumns);
    for (int64_t block = of.block; block < of.block_end; ++block) {
      const std::vector<Rectangle> tiles = tiling.of(block);
      const int64_t count = tiles_in(tiles), height = height_of(count);
      for (int64_t i = 0; i < lanes; ++i)
        read_gradients(tiles, of.lane + i, pixels.get(), left.get() + i * height * kLanes, lanes * height * kLanes);
      for (int64_t i = 0; i < panels; ++i)
        read_pixels(tiles, of.panel + i, count, pixels.get(), right.get() + i * count * kColumns,
                    panels * count * kColumns);
      if (rounded) {
        for (int64_t i = 0; i < kPoints * lanes; ++i) {
          float* const own = left.get() + i * height * kLanes;
          if (in_tiles)
            round_lines(own, count);
          else
            round_rows(own, count, kLanes);
        }
        for (int64_t i = 0; i < kPoints * panels; ++i) round_rows(right.get() + i * count * kColumns, count, kColumns);
      }
      for (int64_t p = 0; p < kPoints; ++p)
        multiply(of, count, left.get() + p * lanes * height * kLanes, right.get() + p * panels * count * kColumns,
                 sums + p * of.high() * of.wide(), block == of.block);
    }
  }

  // Writes the taps of a range of channels, from sums of `parts` ranges of blocks that lie `part` apart.
  void collect(const Range& of, const float* sums, int64_t parts, int64_t part, float* dw) const;

 private:
  void read_gradients(const std::vector<Rectangle>& tiles, int64_t lane, float* pixels, float* to,
                      int64_t point) const {
    const Image image{out.height, out.width, out.batch_stride};
    for (const Rectangle& each : tiles) {
      gather(image, dy + lane * kLanes * out.plane(), std::min<int64_t>(kLanes, out_channels - lane * kLanes), each, 2,
             pixels);
      map_all_gradients(pixels, each, point, [&](int64_t tile) { return to + tile * kLanes; });
    }
  }

  void read_pixels(const std::vector<Rectangle>& tiles, int64_t panel, int64_t count, float* pixels, float* to,
                   int64_t point) const {
    for (int64_t j = 0; j < kColumns; j += kLanes) {
      const int64_t first = panel * kColumns + j,
                    channels = std::max<int64_t>(0, std::min<int64_t>(kLanes, in_channels - first));
      if (channels == 0) {
        for (int64_t p = 0; p < kPoints; ++p)
          for (int64_t t = 0; t < count; ++t) store(to + p * point + t * kColumns + j, Vector{});
        continue;
      }
      for (const Rectangle& each : tiles) {
        gather(in, x + first * in.plane(), channels, each, 4, pixels);
        map_all_pixels(pixels, each, point, [&](int64_t tile) { return to + tile * kColumns + j; });
      }
    }
  }

  // Rows of the left side of a vector of channels; a tile of the matrix unit is whole.
  static int64_t height_of(int64_t tiles) { return std::max(tiles, kTile); }

  void multiply(const Range& of, int64_t count, const float* left, const float* right, float* sums, bool fresh) const {
    for (int64_t panel = of.panel; panel < of.panel_end; ++panel, right += count * kColumns) {
      const float* a = left;
      if (rounded && has_amx()) {
        const int64_t below = height_of(count) * kLanes;
        for (int64_t lane = of.lane; lane < of.lane_end; lane += 2, a += 2 * below)
          add_tiles((count + 1) / 2, {a, kLanes, below, kTile * kLanes}, std::min<int64_t>(of.lane_end - lane, 2) * kTile,
                    right, kColumns, kColumns,
                    sums + (lane - of.lane) * kLanes * of.wide() + (panel - of.panel) * kColumns, of.wide(), fresh);
        continue;
      }
      for (int64_t lane = of.lane; lane < of.lane_end; ++lane, a += height_of(count) * kLanes)
        for (int64_t i = 0; i < kLanes; i += kGradientRows) {
          float* to = sums + ((lane - of.lane) * kLanes + i) * of.wide() + (panel - of.panel) * kColumns;
          if (rounded)
            add_rounded_tile<kGradientRows, kVectors, 1, kLanes>(count, a + i, kLanes * kLanes, right, to,
                                                                 of.wide(), fresh);
          else
            add_tile<kGradientRows, kVectors, 1, kLanes>(count, a + i, kLanes * kLanes, right, to, of.wide(), fresh);
        }
    }
  }
};

// Collects the taps of kLanes input channels from `parts` sums of their points.
inline void collect_taps(const float* sums, int64_t point, int64_t parts, int64_t part, int64_t channels, float* dw) {
  Vector points[16], half[12], taps[9];
#pragma GCC unroll 16
  for (int p = 0; p < kPoints; ++p) points[p] = load(sums + p * point);
  for (int64_t i = 1; i < parts; ++i)
#pragma GCC unroll 16
    for (int p = 0; p < kPoints; ++p) points[p] += load(sums + i * part + p * point);
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) collect_weights(points + c, 4, half + c, 4);
#pragma GCC unroll 3
  for (int r = 0; r < 3; ++r) collect_weights(half + 4 * r, 1, taps + 3 * r, 1);
  if constexpr (kLanes > 9) {
    Vector square[kLanes];
    for (int i = 0; i < kLanes; ++i) square[i] = i < 9 ? taps[i] : Vector{};
    transpose(square);
    for (int i = 0; i < channels; ++i) store_first(dw + 9 * i, square[i], 9);
  } else {
    for (int64_t i = 0; i < channels; ++i)
      for (int t = 0; t < 9; ++t) dw[9 * i + t] = taps[t][i];
  }
}

inline void WeightGradient::collect(const Range& of, const float* sums, int64_t parts, int64_t part, float* dw) const {
  const int64_t first_in = of.panel * kColumns, first_out = of.lane * kLanes;
  const int64_t end_in = std::min(in_channels, of.panel_end * kColumns);
  const int64_t end_out = std::min(out_channels, of.lane_end * kLanes);
  for (int64_t o = first_out; o < end_out; ++o)
    for (int64_t c = first_in; c < end_in; c += kLanes)
      collect_taps(sums + (o - first_out) * of.wide() + c - first_in, of.high() * of.wide(), parts, part,
                   std::min<int64_t>(kLanes, end_in - c), dw + (o * in_channels + c) * 9);
}

// The gradient with respect to the weights of one group.
inline void convolve_weight_gradient(const Image& in, const Image& out, int64_t batch, int64_t in_channels,
                                     int64_t out_channels, const float* x, const float* dy, float* dw, bool rounded,
                                     const Parallel& parallel) {
  constexpr int64_t kChannels = 128, kTiles = 32, kTasks = 16, kMostFloats = int64_t{1} << 21;
  const Tiling tiling(batch, out.height, out.width, in_channels + out_channels <= 128 ? 2 * kTiles : kTiles);
  const WeightGradient gradient{in, out, tiling, x, dy, in_channels, out_channels, rounded};
  const EvenCut panels(pieces_of(in_channels, kColumns), kChannels / kColumns);
  const EvenCut lanes(pieces_of(out_channels, kLanes), kChannels / kLanes);
  // Where there are few channels, parts of the batch are summed apart.
  const int64_t ranges = panels.pieces * lanes.pieces, most = kMostFloats / gradient.points_size();
  const int64_t wanted = std::max<int64_t>(1, std::min({tiling.blocks.pieces, kTasks / ranges, most}));
  const EvenCut parts(tiling.blocks.pieces, pieces_of(tiling.blocks.pieces, wanted));
  const auto range = [&](int64_t task) -> WeightGradient::Range {
    const int64_t part = task / ranges, panel = task % ranges % panels.pieces, lane = task % ranges / panels.pieces;
    return {panels.begin(panel), panels.begin(panel) + panels.length(panel),
            lanes.begin(lane),   lanes.begin(lane) + lanes.length(lane),
            parts.begin(part),   parts.begin(part) + parts.length(part)};
  };
  const int64_t size = kPoints * panels.length(0) * kColumns * lanes.length(0) * kLanes;  // of the largest range
  if (parts.pieces == 1)
    return parallel(ranges, [&](int64_t task) {
      const Floats sums(size);
      gradient.run(range(task), sums.get());
      gradient.collect(range(task), sums.get(), 1, 0, dw);
    });
  const Floats sums(parts.pieces * ranges * size);
  parallel(parts.pieces * ranges, [&](int64_t task) { gradient.run(range(task), sums.get() + task * size); });
  parallel(ranges, [&](int64_t task) {
    gradient.collect(range(task), sums.get() + task * size, parts.pieces, ranges * size, dw);
  });
}

}  // namespace onnxtrain::ONNXTRAIN_ISA::winograd
