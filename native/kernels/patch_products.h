// Convolutions of few channels. To pack a patch takes longer there than to multiply it by a handful of rows, so that
// products read patches where they lie.
//
// A task copies a band of the image with its padding, a plane for each phase of the strides. Positions that follow
// each other then read floats that follow each other, at each tap, and a row of B is a load from anywhere. Behind the
// end of a row lie positions that no one asked for: they are computed as well, and left out of the result.
#pragma once

#include "packers.h"
#include "product.h"
#include "scratch.h"
#include "sums.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Positions of a grid: some images, or some lines of one along its first axis of more than one.
struct Band {
  int64_t image, images;
  int64_t begin[kMostAxes], size[kMostAxes];
};

// From the first to the last of several taps.
struct Reach {
  int64_t first[kMostAxes], length[kMostAxes];

  explicit Reach(const std::vector<Patches::Tap>& taps) {
    for (int axis = 0; axis < kMostAxes; ++axis) {
      const auto before = [axis](const Patches::Tap& a, const Patches::Tap& b) {
        return a.offset[axis] < b.offset[axis];
      };
      const auto [least, most] = std::minmax_element(taps.begin(), taps.end(), before);
      first[axis] = least->offset[axis];
      length[axis] = most->offset[axis] - first[axis];
    }
  }
};

// The positions of all images, cut into bands of about `most`. Lines of a band are as many as `least` for each axis.
class Bands {
 public:
  Bands(const Grid& grid, int64_t batch, int64_t most, const int64_t* least)
      : grid_(grid),
        axis_(grid.size[0] > 1 ? 0 : grid.size[1] > 1 ? 1 : 2),
        images_(batch, std::max<int64_t>(1, most / grid.positions())),
        lines_(grid.size[axis_],
               std::max<int64_t>(least[axis_], most / std::max<int64_t>(1, grid.positions() / grid.size[axis_]))) {}

  int64_t count() const { return images_.pieces * lines_.pieces; }

  Band operator[](int64_t index) const {
    const int64_t image = index / lines_.pieces, line = index % lines_.pieces;
    Band made{images_.begin(image), images_.length(image), {0, 0, 0}, {grid_.size[0], grid_.size[1], grid_.size[2]}};
    made.begin[axis_] = lines_.begin(line);
    made.size[axis_] = lines_.length(line);
    return made;
  }

 private:
  Grid grid_;
  int axis_;
  EvenCut images_, lines_;
};

// A row of positions, as a piece of the grid.
struct PlacedRow {
  int64_t place;
  Grid::Piece piece;
};

// What a band reads of each channel: [phase][image][plane]. A place is a position in the first phase.
class BandPlanes {
 public:
  BandPlanes(const Patches& patches, const Reach& reach, const Band& band) : of_(patches), reach_(reach), band_(band) {
    for (int axis = 0; axis < kMostAxes; ++axis) {
      phases_[axis] = std::min(of_.step[axis], reach.length[axis] + 1);
      rows_.size[axis] = band.size[axis] + reach.length[axis] / of_.step[axis];
    }
  }

  int64_t phase_size() const { return band_.images * rows_.positions(); }
  int64_t channel_size() const { return phases_[0] * phases_[1] * phases_[2] * phase_size(); }

  // Places from the first to the last position of the band.
  int64_t places() const {
    return (band_.images - 1) * rows_.positions() +
           ((band_.size[0] - 1) * rows_.size[1] + band_.size[1] - 1) * rows_.size[2] + band_.size[2];
  }

  // Where a place reads each tap of each channel.
  std::vector<int64_t> offsets(int64_t channels) const {
    std::vector<int64_t> made;
    made.reserve(static_cast<size_t>(channels * of_.tap_count()));
    for (int64_t channel = 0; channel < channels; ++channel)
      for (const Patches::Tap& tap : of_.taps) {
        int64_t phase = 0, at = 0;
        for (int axis = 0; axis < kMostAxes; ++axis) {
          const int64_t from_low = tap.offset[axis] - reach_.first[axis];
          phase = phase * phases_[axis] + from_low % of_.step[axis];
          at = at * rows_.size[axis] + from_low / of_.step[axis];
        }
        made.push_back(channel * channel_size() + phase * phase_size() + at);
      }
    return made;
  }

  // Copies channels from the first of the first image on, zeros for padding.
  void read(const float* image, int64_t channels, float* to) const {
    for (int64_t channel = 0; channel < channels; ++channel, image += of_.pixels())
      for (int64_t z = 0; z < phases_[0]; ++z)
        for (int64_t y = 0; y < phases_[1]; ++y)
          for (int64_t x = 0; x < phases_[2]; ++x, to += phase_size())
            read_phase(image, {{reach_.first[0] + z, reach_.first[1] + y, reach_.first[2] + x}}, to);
  }

  // The rows of positions, in the order of their places.
  std::vector<PlacedRow> rows() const {
    std::vector<PlacedRow> made;
    const int64_t *begin = band_.begin, *size = band_.size;
    for (int64_t image = 0; image < band_.images; ++image)
      for (int64_t z = 0; z < size[0]; ++z)
        for (int64_t y = 0; y < size[1]; ++y) {
          const int64_t place = ((image * rows_.size[0] + z) * rows_.size[1] + y) * rows_.size[2];
          made.push_back({place, {0, size[2], band_.image + image, begin[0] + z, begin[1] + y, begin[2]}});
        }
    return made;
  }

 private:
  void read_phase(const float* image, const Patches::Tap& tap, float* to) const {
    rows_.pieces(0, phase_size(), [&](Grid::Piece piece) {
      piece.image = (band_.image + piece.image) * of_.batch_stride;
      piece.z = (band_.begin[0] + piece.z) * of_.step[0];
      piece.y = (band_.begin[1] + piece.y) * of_.step[1];
      piece.x = band_.begin[2] * of_.step[2];
      of_.copy(piece, image, tap, to + piece.begin);
    });
  }

  const Patches& of_;
  const Reach& reach_;
  const Band band_;
  int64_t phases_[kMostAxes];
  Grid rows_;  // of a plane
};

// The most rows of the left side and of the right in a tile of sums along places: 24 sums, 4 rows, 1 row of 32
// registers, or 9 sums, 3 rows, 1 row of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSumRows = 4, kSumTaps = 6;
#else
constexpr int kSumRows = 3, kSumTaps = 3;
#endif

using SumFunction = void (*)(int64_t, const float*, int64_t, const float*, const int64_t*, float*, int64_t, int64_t);

// Adds the sums over `count` places, whole vectors, of kHeight lines of the left times as many as `taps` rows of the
// right, which begin at offsets: c[row][tap].
template <int kHeight>
void add_sums(int64_t count, const float* left, int64_t line, const float* right, const int64_t* offsets, float* c,
              int64_t stride, int64_t taps) {
  Vector sum[kHeight][kSumTaps];
  const float* at[kSumTaps];
  for (int j = 0; j < kSumTaps; ++j) at[j] = right + offsets[j < taps ? j : 0];
#pragma GCC unroll 4
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 6
    for (int j = 0; j < kSumTaps; ++j) sum[i][j] = Vector{};
  for (int64_t place = 0; place < count; place += kLanes) {
    Vector own[kHeight];
#pragma GCC unroll 4
    for (int i = 0; i < kHeight; ++i) own[i] = load(left + i * line + place);
#pragma GCC unroll 6
    for (int j = 0; j < kSumTaps; ++j) {
      const Vector read = load(at[j] + place);
#pragma GCC unroll 4
      for (int i = 0; i < kHeight; ++i) sum[i][j] += own[i] * read;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 6
    for (int j = 0; j < kSumTaps; ++j)
      if (j < taps) c[i * stride + j] += total_of(sum[i][j]);
}

template <size_t... kHeight>
constexpr std::array<SumFunction, kSumRows> sum_tiles(std::index_sequence<kHeight...>) {
  return {add_sums<int(kHeight) + 1>...};
}

// A product for each group of a convolution: rows of A by the patches of its channels.
class PatchProduct {
 public:
  // Patches and channels are those of the first group, and there are taps.
  PatchProduct(const Patches& patches, int64_t batch, int64_t groups, int64_t channels, int64_t rows,
               const Parallel& parallel)
      : patches_(patches),
        reach_(patches.taps),
        batch_(batch),
        groups_(groups),
        channels_(channels),
        rows_(rows),
        depth_(channels * patches.tap_count()),
        parallel_(parallel) {}

  // `rows_of(group)` packs rows of A; the store is that of the first group.
  template <class RowsOf>
  void multiply(const RowsOf& rows_of, const ImageStore& store, const float* bias) const {
    const EvenCut cut(rows_, kRows);
    const int64_t blocks = rounded_up(depth_, kLanes), of_group = rows_ * blocks;
    const Floats packed(groups_ * of_group);
    for (int64_t g = 0; g < groups_; ++g)
      for (int64_t p = 0; p < cut.pieces; ++p)
        rows_of(g)(packed.get() + g * of_group + cut.begin(p) * blocks, cut.begin(p), cut.length(p), 0, depth_);
    const Bands bands = cut_into_bands(channels_);
    parallel_(groups_ * bands.count(), [&](int64_t task) {
      const int64_t g = task / bands.count();
      ImageStore own = store;
      own.data += g * rows_ * store.channel_stride;
      multiply_band(bands[task % bands.count()], g, packed.get() + g * of_group, cut, own,
                    bias == nullptr ? nullptr : bias + g * rows_);
    });
  }

  // c[row][channel and tap] = Σ left[row][position] · what the position reads, for all groups.
  void sum(const float* left, int64_t batch_stride, float* c) const {
    constexpr int64_t kParts = 16, kMostFloats = int64_t{1} << 21;
    const Bands bands = cut_into_bands(channels_ + rows_);
    const int64_t size = groups_ * rows_ * depth_;
    const int64_t parts = std::max<int64_t>(
        1, std::min({pieces_of(kParts, groups_), bands.count(), kMostFloats / std::max<int64_t>(1, size)}));
    const EvenCut cut(bands.count(), pieces_of(bands.count(), parts));
    const Floats sums((cut.pieces - 1) * size);
    parallel_(groups_ * cut.pieces, [&](int64_t task) {
      const int64_t g = task / cut.pieces, part = task % cut.pieces;
      float* const to = (part == 0 ? c : sums.get() + (part - 1) * size) + g * rows_ * depth_;
      std::fill_n(to, rows_ * depth_, 0.0f);
      for (int64_t i = cut.begin(part), end = i + cut.length(part); i < end; ++i)
        add_sums_of_band(bands[i], g, left + g * rows_ * patches_.grid.positions(), batch_stride, to);
    });
    add_parts(sums.get(), cut.pieces - 1, size, c, parallel_);
  }

 private:
  // Bands whose copies stay in the second cache, and of which there are some for each thread. Of what a band reads,
  // at most half is what the next one reads, too.
  Bands cut_into_bands(int64_t planes) const {
    constexpr int64_t kMostFloats = 1 << 17, kMostPlaces = 2048, kLeastPlaces = 256, kTasks = 16;
    int64_t phases = 1, lines[kMostAxes];
    for (int axis = 0; axis < kMostAxes; ++axis) {
      phases *= std::min(patches_.step[axis], reach_.length[axis] + 1);
      lines[axis] = std::max<int64_t>(1, reach_.length[axis] / patches_.step[axis]);
    }
    const int64_t fits = std::min(kMostPlaces, kMostFloats / (planes * phases));
    const int64_t shared = pieces_of(batch_ * patches_.grid.positions(), pieces_of(kTasks, groups_));
    return Bands(patches_.grid, batch_, std::max(kLeastPlaces, std::min(fits, shared)), lines);
  }

  const float* image_of(int64_t group) const { return patches_.image + group * channels_ * patches_.pixels(); }

  void multiply_band(const Band& band, int64_t group, const float* packed, const EvenCut& cut, const ImageStore& store,
                     const float* bias) const {
    const BandPlanes planes(patches_, reach_, band);
    const int64_t size = channels_ * planes.channel_size(), places = planes.places();
    const int64_t blocks = rounded_up(depth_, kLanes);
    const Floats copy(size + kWideColumns);
    planes.read(image_of(group), channels_, copy.get());
    std::fill_n(copy.get() + size, kWideColumns, 0.0f);
    const std::vector<int64_t> offsets = planes.offsets(channels_);
    const std::vector<PlacedRow> positions = planes.rows();
    alignas(64) float tile[kRows * kColumns + kLanes];  // pieces of a row are read as whole vectors
    for (int64_t p = 0; p < cut.pieces; ++p) {
      const int64_t row = cut.begin(p), height = cut.length(p), width = scattered_width(height);
      const ScatteredTile add = scattered_tile_of(height);
      size_t next = 0;
      for (int64_t place = 0; place < places; place += width) {
        for (int64_t i = 0; i < height; ++i)
          std::fill_n(tile + i * width, width, bias == nullptr ? 0.0f : bias[row + i]);
        for (int64_t k = 0; k < depth_; k += kDepth)  // a sum of all would lose digits
          add(std::min(kDepth, depth_ - k), packed + row * blocks + k * height, copy.get() + place,
              offsets.data() + k, tile);
        next = each_piece(positions, next, place, width, [&](const Grid::Piece& piece) {
          store.put_piece(tile, width, row, height, piece, true);
        });
      }
    }
  }

  // Calls use(piece) for what a tile at a place holds of rows from the next one on; the first that goes on behind it.
  template <class Use>
  static size_t each_piece(const std::vector<PlacedRow>& rows, size_t next, int64_t place, int64_t width,
                           const Use& use) {
    const int64_t end = place + width;
    for (; next < rows.size() && rows[next].place < end; ++next) {
      Grid::Piece piece = rows[next].piece;
      const int64_t begin = rows[next].place, row_end = begin + piece.length;
      const int64_t skipped = std::max<int64_t>(0, place - begin);
      piece.begin = begin + skipped - place;
      piece.x += skipped;
      piece.length = std::min(row_end, end) - begin - skipped;
      use(piece);
      if (row_end > end) break;
    }
    return next;
  }

  void add_sums_of_band(const Band& band, int64_t group, const float* left, int64_t batch_stride, float* c) const {
    static constexpr std::array<SumFunction, kSumRows> tiles = sum_tiles(std::make_index_sequence<kSumRows>());
    const BandPlanes planes(patches_, reach_, band);
    const int64_t size = channels_ * planes.channel_size(), line = rounded_up(planes.places(), kLanes);
    const Floats copy(size + kLanes), lines(rows_ * line);
    planes.read(image_of(group), channels_, copy.get());
    std::fill_n(copy.get() + size, kLanes, 0.0f);
    std::fill_n(lines.get(), rows_ * line, 0.0f);
    for (const auto& [place, piece] : planes.rows()) {
      const Grid& grid = patches_.grid;
      const float* from =
          left + piece.image * batch_stride + (piece.z * grid.size[1] + piece.y) * grid.size[2] + piece.x;
      for (int64_t row = 0; row < rows_; ++row)
        copy_floats(from + row * grid.positions(), piece.length, lines.get() + row * line + place);
    }
    const std::vector<int64_t> offsets = planes.offsets(channels_);
    const EvenCut cut(rows_, kSumRows);
    for (int64_t k = 0; k < depth_; k += kSumTaps)
      for (int64_t p = 0; p < cut.pieces; ++p)
        tiles[static_cast<size_t>(cut.length(p) - 1)](line, lines.get() + cut.begin(p) * line, line, copy.get(),
                                                      offsets.data() + k, c + cut.begin(p) * depth_ + k, depth_,
                                                      std::min<int64_t>(kSumTaps, depth_ - k));
  }

  const Patches& patches_;
  const Reach reach_;
  const int64_t batch_, groups_, channels_, rows_, depth_;
  const Parallel& parallel_;
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
