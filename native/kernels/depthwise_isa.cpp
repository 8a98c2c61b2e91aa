// Depthwise convolutions, compiled once for each instruction set. A plane is read and written once;
// see depthwise_tiles.h for how.
#include "depthwise.h"

#include "depthwise_dense.h"
#include "depthwise_input.h"
#include "depthwise_tiles.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

// Elements that a task computes at least.
constexpr int64_t kTaskElements = int64_t{1} << 15;

int64_t largest_offset(const Convolution& conv, int axis) { return (conv.kernel[axis] - 1) * conv.dilation[axis]; }

// Cuts `count` units of work into tasks and calls work(first, end).
template <class Work>
void in_tasks(int64_t count, int64_t elements_of_unit, const Parallel& parallel, const Work& work) {
  const int64_t units = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, elements_of_unit));
  parallel(pieces(count, units), [&](int64_t task) { work(task * units, std::min(count, (task + 1) * units)); });
}

// ---- planes of square kernels without stride -----------------------------------------------------

bool is_dense(const Convolution& conv) {
  const bool flat = conv.kernel[kZ] == 1 && conv.in[kZ] == 1 && conv.out[kZ] == 1;
  const bool square = conv.kernel[kY] == conv.kernel[kX] && (conv.kernel[kX] == 3 || conv.kernel[kX] == 5);
  return flat && square && conv.stride[kY] == 1 && conv.stride[kX] == 1 && conv.dilation[kY] == 1 &&
         conv.dilation[kX] == 1;
}

DensePlanes dense_planes(const Convolution& conv) {
  return {conv.kernel[kX], conv.in[kY], conv.in[kX], conv.out[kY], conv.out[kX], conv.pad[kY], conv.pad[kX]};
}

// The gradient of the input is a convolution of dy with the kernel turned around.
DensePlanes dense_planes_back(const Convolution& conv) {
  const int64_t last = conv.kernel[kX] - 1;
  return {conv.kernel[kX], conv.out[kY],        conv.out[kX],       conv.in[kY],
          conv.in[kX],     last - conv.pad[kY], last - conv.pad[kX]};
}

// Calls work(tiled(tile), plane) for the planes of each tile.
template <class Tiled, class Work>
void over_tiles(const Cut& cut, int64_t planes, int64_t elements, const Parallel& parallel, const Tiled& tiled,
                const Work& work) {
  in_tasks(planes * cut.tiles(), elements, parallel, [&](int64_t unit, int64_t end) {
    while (unit < end) {
      const int64_t index = unit / planes, first = unit % planes, count = std::min(planes - first, end - unit);
      auto own = tiled(index);
      for (int64_t plane = first; plane < first + count; ++plane) work(own, plane);
      unit += count;
    }
  });
}

template <int kSize, int kWidth>
void dense_convolve(const Convolution& conv, const float* x, const float* w, const float* bias, float* y,
                    const Parallel& parallel) {
  const DensePlanes planes = dense_planes(conv);
  const Cut cut = planes.cut();
  const int64_t channels = conv.groups * conv.out_channels, in = conv.in_size(), out = conv.out_size();
  over_tiles(
      cut, conv.batch * channels, cut.tile_rows * cut.tile_columns, parallel,
      [&](int64_t index) { return DenseTile(planes, cut, index); },
      [&](DenseTile& own, int64_t plane) {
        const int64_t channel = plane % channels;
        const float* source = x + (conv.out_channels == 1 ? plane : plane / conv.out_channels) * in;
        own.convolve<kSize, kWidth>(source, w + channel * kSize * kSize, bias == nullptr ? 0 : bias[channel],
                                    y + plane * out);
      });
}

template <int kSize, int kWidth>
void dense_input_gradient(const Convolution& conv, const float* dy, const float* w, float* dx,
                          const Parallel& parallel) {
  const DensePlanes planes = dense_planes_back(conv);
  const Cut cut = planes.cut();
  const int64_t in = conv.in_size(), out = conv.out_size();
  std::vector<float> turned(static_cast<size_t>(conv.groups * kSize * kSize));
  for (int64_t at = 0; at < conv.groups * kSize * kSize; at += kSize * kSize)
    std::reverse_copy(w + at, w + at + kSize * kSize, turned.data() + at);
  over_tiles(
      cut, conv.batch * conv.groups, cut.tile_rows * cut.tile_columns, parallel,
      [&](int64_t index) { return DenseTile(planes, cut, index); },
      [&](DenseTile& own, int64_t plane) {
        const float* weights = turned.data() + plane % conv.groups * kSize * kSize;
        own.convolve<kSize, kWidth>(dy + plane * out, weights, 0, dx + plane * in);
      });
}

// ---- large to small: forward, and the gradient of weights ----------------------------------------

// The outputs of a plane, in tiles that read x.
Cut cut_of_output(const Convolution& conv) {
  const auto phases = [&](int axis) { return std::min(conv.stride[axis], largest_offset(conv, axis) + 1); };
  return Cut(conv.out[kY], conv.out[kX], phases(kY) * phases(kX), largest_offset(conv, kX) / conv.stride[kX],
             largest_offset(conv, kY) / conv.stride[kY]);
}

Tile tile_of_output(const Convolution& conv, const Cut& cut, int64_t tile) {
  const auto axis = [&](int of, int64_t first, int64_t count) {
    return TileAxis(count, conv.stride[of], first * conv.stride[of] - conv.pad[of], conv.in[of],
                    largest_offset(conv, of));
  };
  return Tile(axis(kY, cut.first_row(tile), cut.rows_of(tile)), axis(kX, cut.first_column(tile), cut.columns_of(tile)));
}

// Where the copy of a tile holds what each tap of a plane reads.
std::vector<int64_t> places_of(const Convolution& conv, const Tile& tile) {
  std::vector<int64_t> places;
  for (int64_t y = 0; y < conv.kernel[kY]; ++y)
    for (int64_t x = 0; x < conv.kernel[kX]; ++x)
      places.push_back(tile.place(y * conv.dilation[kY], x * conv.dilation[kX]));
  return places;
}

// The plane of x that a plane of the output reads at a tap, or -1.
int64_t plane_read(const Convolution& conv, int64_t out, int64_t tap) {
  const int64_t plane = out * conv.stride[kZ] + tap * conv.dilation[kZ] - conv.pad[kZ];
  return plane >= 0 && plane < conv.in[kZ] ? plane : -1;
}

// One tile of the output, made ready for any plane.
struct OutputTile {
  Tile tile;
  std::vector<int64_t> places;
  int64_t first;  // the first element that it writes
  Memory copy_memory, result_memory;
  float *copy, *result;

  OutputTile(const Convolution& conv, const Cut& cut, int64_t index)
      : tile(tile_of_output(conv, cut, index)),
        places(places_of(conv, tile)),
        first(cut.first_row(index) * conv.out[kX] + cut.first_column(index)),
        copy(copy_memory.zeroed(tile.floats())),
        result(result_memory.zeroed(tile.result_floats())) {}
};

// Planes of x, w and y that a plane of the output needs.
struct OutputPlane {
  int64_t channel, image, z;

  OutputPlane(const Convolution& conv, int64_t index)
      : channel(index / conv.out[kZ] % (conv.groups * conv.out_channels)),
        image(index / conv.out[kZ] / (conv.groups * conv.out_channels)),
        z(index % conv.out[kZ]) {}
  // The volume of x that its channel reads.
  const float* source(const Convolution& conv, const float* x) const {
    return x + (image * conv.groups + channel / conv.out_channels) * conv.in_size();
  }
  int64_t begin(const Convolution& conv) const {
    return ((image * conv.groups * conv.out_channels + channel) * conv.out[kZ] + z) * conv.out[kY] * conv.out[kX];
  }
};

void write_result(const Tile& tile, float* result, float bias, float* to, int64_t to_step) {
  if (bias != 0)
    for (int64_t at = 0; at < tile.result_length(); ++at) result[at] += bias;
  copy_rows(to, to_step, result, tile.pitch, tile.rows.grid, tile.columns.grid);
}

void convolve_plane(const Convolution& conv, OutputTile& own, int64_t index, const float* x, const float* w,
                    const float* bias, float* y) {
  const OutputPlane plane(conv, index);
  const int64_t taps = static_cast<int64_t>(own.places.size()), in = conv.in[kY] * conv.in[kX];
  const float* weights = w + plane.channel * conv.taps();
  bool fresh = true;
  for (int64_t tap = 0; tap < conv.kernel[kZ]; ++tap) {
    const int64_t z = plane_read(conv, plane.z, tap);
    if (z < 0) continue;
    own.tile.fill(own.copy, plane.source(conv, x) + z * in);
    correlate(own.copy, own.places.data(), weights + tap * taps, taps, own.result, own.tile.result_length(), fresh);
    fresh = false;
  }
  if (fresh) std::fill_n(own.result, own.tile.result_length(), 0.0f);
  write_result(own.tile, own.result, bias == nullptr ? 0 : bias[plane.channel], y + plane.begin(conv) + own.first,
               conv.out[kX]);
}

void convolve(const Convolution& conv, const float* x, const float* w, const float* bias, float* y,
              const Parallel& parallel) {
  if (is_dense(conv))
    return by_columns(conv.out[kX], [&](auto narrow) {
      constexpr int width = WidthOf<decltype(narrow)>::value;
      if (conv.kernel[kX] == 3) return dense_convolve<3, width>(conv, x, w, bias, y, parallel);
      dense_convolve<5, width>(conv, x, w, bias, y, parallel);
    });
  const Cut cut = cut_of_output(conv);
  const int64_t planes = conv.batch * conv.groups * conv.out_channels * conv.out[kZ];
  over_tiles(
      cut, planes, cut.tile_rows * cut.tile_columns, parallel,
      [&](int64_t index) { return OutputTile(conv, cut, index); },
      [&](OutputTile& own, int64_t plane) { convolve_plane(conv, own, plane, x, w, bias, y); });
}

// ---- the gradient of weights ---------------------------------------------------------------------

// Sums of the taps of channels: vectors that become doubles before they hold too many terms.
template <int kWidth>
class TapSums {
 public:
  explicit TapSums(int64_t taps) : parts_(static_cast<size_t>(taps)), totals_(static_cast<size_t>(taps)) {}

  using Row = typename Narrow<kWidth>::Type;

  Row* parts(int64_t first_tap) { return parts_.data() + first_tap; }

  void count(int64_t terms) {
    terms_ += terms;
    if (terms_ > kMostTerms * kWidth) fold();
  }

  // Adds the first `count` sums to `to` and begins anew; the others are zero.
  void take(double* to, int64_t count) {
    fold();
    for (size_t tap = 0; tap < static_cast<size_t>(count); ++tap) to[tap] += totals_[tap], totals_[tap] = 0;
  }

 private:
  static constexpr int64_t kMostTerms = 1024;  // of each lane

  void fold() {
    for (size_t tap = 0; tap < parts_.size(); ++tap) {
      float lanes[kWidth], sum = 0;
      Narrow<kWidth>::write(lanes, parts_[tap]);
      for (int lane = 0; lane < kWidth; ++lane) sum += lanes[lane];
      totals_[tap] += sum;
      parts_[tap] = Row{};
    }
    terms_ = 0;
  }

  std::vector<Row> parts_;
  std::vector<double> totals_;
  int64_t terms_ = 0;
};

// Adds what one tile of an image gives to a channel's weights, whose sums begin at `first_sum`.
void correlate_channel(const Convolution& conv, OutputTile& own, int64_t channel, int64_t image, const float* x,
                       const float* dy, TapSums<kLanes>& sums, int64_t first_sum) {
  const int64_t channels = conv.groups * conv.out_channels, taps = static_cast<int64_t>(own.places.size());
  const int64_t in = conv.in[kY] * conv.in[kX], length = own.tile.result_length();
  for (int64_t z = 0; z < conv.out[kZ]; ++z) {
    const OutputPlane plane(conv, (image * channels + channel) * conv.out[kZ] + z);
    copy_rows(own.result, own.tile.pitch, dy + plane.begin(conv) + own.first, conv.out[kX], own.tile.rows.grid,
              own.tile.columns.grid);
    for (int64_t tap = 0; tap < conv.kernel[kZ]; ++tap) {
      const int64_t from = plane_read(conv, z, tap);
      if (from < 0) continue;
      own.tile.fill(own.copy, plane.source(conv, x) + from * in);
      multiply_taps(own.copy, own.places.data(), taps, own.result, length, sums.parts(first_sum + tap * taps));
    }
  }
}

// Channels whose sums are kept at once, so that planes are read in the order of memory. Small planes
// are read faster in the order of images, several of which the processor follows at once.
int64_t channels_together(const Convolution& conv) { return conv.in_size() < 512 ? 1 : 8; }

// Calls work(first channel, end, first image, end, totals of the channels' taps) for tasks, and sums
// up. Where channels are few, parts of the batch are tasks of their own.
template <class Work>
void sum_over_channels(const Convolution& conv, float* dw, const Parallel& parallel, const Work& work) {
  constexpr int64_t kEnough = 32;  // tasks
  const int64_t channels = conv.groups * conv.out_channels, taps = conv.taps();
  const int64_t elements = conv.batch * conv.out_size();
  const int64_t parts = std::max<int64_t>(1, std::min({conv.batch, kEnough / channels, elements / kTaskElements}));
  const int64_t images = std::max<int64_t>(1, pieces(conv.batch, parts));
  std::vector<double> totals(static_cast<size_t>(parts * channels * taps));
  in_tasks(parts * channels, elements / parts, parallel, [&](int64_t unit, int64_t end) {
    while (unit < end) {
      const int64_t part = unit / channels, stop = std::min(end, (part + 1) * channels);
      const int64_t image = std::min(conv.batch, part * images), last = std::min(conv.batch, image + images);
      work(unit - part * channels, stop - part * channels, image, last, totals.data() + unit * taps);
      unit = stop;
    }
  });
  for (int64_t at = 0; at < channels * taps; ++at) {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += totals[static_cast<size_t>(part * channels * taps + at)];
    dw[at] = static_cast<float>(sum);
  }
}

template <int kSize, int kWidth>
void dense_weight_gradient(const Convolution& conv, const float* x, const float* dy, float* dw,
                           const Parallel& parallel) {
  const DensePlanes planes = dense_planes(conv);
  const Cut cut = planes.cut();
  const int64_t channels = conv.groups * conv.out_channels, in = conv.in_size(), out = conv.out_size();
  const int64_t together = channels_together(conv);
  const float* const dy_end = dy + conv.batch * channels * out;
  sum_over_channels(conv, dw, parallel,
                    [&](int64_t first, int64_t end, int64_t first_image, int64_t last, double* totals) {
                      TapSums<kWidth> sums(together * kSize * kSize);
                      for (int64_t index = 0; index < cut.tiles(); ++index) {
                        DenseTile own(planes, cut, index);
                        for (int64_t begin = first; begin < end; begin += together) {
                          const int64_t count = std::min(together, end - begin);
                          for (int64_t image = first_image; image < last; ++image) {
                            for (int64_t channel = begin; channel < begin + count; ++channel) {
                              const int64_t group = conv.out_channels == 1 ? channel : channel / conv.out_channels;
                              own.multiply<kSize, kWidth>(x + (image * conv.groups + group) * in,
                                                          dy + (image * channels + channel) * out, dy_end,
                                                          sums.parts((channel - begin) * kSize * kSize));
                            }
                            sums.count(own.tile.result_length());
                          }
                          sums.take(totals + (begin - first) * kSize * kSize, count * kSize * kSize);
                        }
                      }
                    });
}

void weight_gradient(const Convolution& conv, const float* x, const float* dy, float* dw, const Parallel& parallel) {
  if (is_dense(conv))
    return by_columns(conv.out[kX], [&](auto narrow) {
      constexpr int width = WidthOf<decltype(narrow)>::value;
      if (conv.kernel[kX] == 3) return dense_weight_gradient<3, width>(conv, x, dy, dw, parallel);
      dense_weight_gradient<5, width>(conv, x, dy, dw, parallel);
    });
  const Cut cut = cut_of_output(conv);
  const int64_t together = channels_together(conv);
  sum_over_channels(
      conv, dw, parallel, [&](int64_t first, int64_t end, int64_t first_image, int64_t last, double* totals) {
        TapSums<kLanes> sums(together * conv.taps());
        for (int64_t index = 0; index < cut.tiles(); ++index) {
          OutputTile own(conv, cut, index);
          for (int64_t begin = first; begin < end; begin += together) {
            const int64_t count = std::min(together, end - begin);
            for (int64_t image = first_image; image < last; ++image) {
              for (int64_t channel = begin; channel < begin + count; ++channel)
                correlate_channel(conv, own, channel, image, x, dy, sums, (channel - begin) * conv.taps());
              sums.count(conv.out[kZ] * own.tile.result_length());
            }
            sums.take(totals + (begin - first) * conv.taps(), count * conv.taps());
          }
        }
      });
}

// ---- small to large: the gradient of the input ---------------------------------------------------

void input_gradient_plane(const Convolution& conv, const Reach& depth, InputTile& own, int64_t phases_across,
                          int64_t index, const float* dy, const float* w, float* dx) {
  const int64_t z = index % conv.in[kZ], group = index / conv.in[kZ] % conv.groups,
                image = index / conv.in[kZ] / conv.groups;
  const int64_t taps = conv.kernel[kY] * conv.kernel[kX], out = conv.out[kY] * conv.out[kX];
  bool fresh = true;
  for (int64_t channel = group * conv.out_channels; channel < (group + 1) * conv.out_channels; ++channel)
    for (const Reach::Tap& tap : depth.phases[static_cast<size_t>(z % conv.stride[kZ])]) {
      const int64_t from = z / conv.stride[kZ] + tap.offset;
      if (from < 0 || from >= conv.out[kZ]) continue;
      const int64_t plane = (image * conv.groups * conv.out_channels + channel) * conv.out[kZ] + from;
      own.tile.fill(own.copy, dy + plane * out);
      own.add(w + channel * conv.taps() + tap.tap * taps, fresh);
      fresh = false;
    }
  if (fresh) std::fill_n(own.results, static_cast<int64_t>(own.phases.size()) * own.tile.result_floats(), 0.0f);
  own.write(conv, phases_across, dx + index * conv.in[kY] * conv.in[kX]);
}

void input_gradient(const Convolution& conv, const float* dy, const float* w, float* dx, const Parallel& parallel) {
  if (is_dense(conv) && conv.out_channels == 1)
    return by_columns(conv.in[kX], [&](auto narrow) {
      constexpr int width = WidthOf<decltype(narrow)>::value;
      if (conv.kernel[kX] == 3) return dense_input_gradient<3, width>(conv, dy, w, dx, parallel);
      dense_input_gradient<5, width>(conv, dy, w, dx, parallel);
    });
  const Reach depth(conv, kZ), down(conv, kY), across(conv, kX);
  const Cut cut = cut_of_input(conv, down, across);
  const int64_t planes = conv.batch * conv.groups * conv.in[kZ];
  const int64_t elements = cut.tile_rows * cut.tile_columns * down.count() * across.count();
  over_tiles(
      cut, planes, elements, parallel, [&](int64_t index) { return InputTile(conv, down, across, cut, index); },
      [&](InputTile& own, int64_t plane) { input_gradient_plane(conv, depth, own, across.count(), plane, dy, w, dx); });
}

// ---- which convolutions --------------------------------------------------------------------------

bool takes(const Convolution& conv) {
  if (conv.in_channels != 1 || conv.in_size() == 0 || conv.out_size() == 0) return false;
  // Kernels that reach very far are left to the product: they would need large copies.
  if (largest_offset(conv, kY) > kMostTileFloats || largest_offset(conv, kX) > kMostTileFloats) return false;
  if (conv.stride[kY] > kTileColumns || conv.stride[kX] > kTileColumns) return false;
  const Cut of_input = cut_of_input(conv, Reach(conv, kY), Reach(conv, kX));
  return cut_of_output(conv).floats() <= kMostTileFloats && of_input.floats() <= kMostTileFloats;
}

}  // namespace

const Depthwise kDepthwise = {takes, convolve, weight_gradient, input_gradient};

}  // namespace onnxtrain::ONNXTRAIN_ISA
