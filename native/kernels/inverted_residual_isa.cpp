// Blocks of frozen networks, some rows of an image at a time.
//
// The channels between the convolutions are many, and their images leave the cache before they are
// read again. Here a task goes down a band of an image: it computes the next rows of the expansion,
// the rows of the depthwise convolution that they complete, and of these the rows of the output.
// The rows that the next windows reach stay in a ring. In all of them, vectors run along the channels.
#include "inverted_residual.h"

#include "inverted_residual_tiles.h"
#include "product.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

// Whether channels are one vector and at most half of another. Networks have multiples of eight: half a vector
// of AVX-512, and whole ones elsewhere.
constexpr bool is_half_more(int64_t channels) {
  return kLanes == 16 && channels > kLanes && channels <= kLanes + kLanes / 2;
}

// Weights and biases in the order in which tiles read them, in one piece of memory.
class PackedBlock {
 public:
  PackedBlock(const BlockShape& of, const float* memory)
      : memory_(memory),
        channels_(of.depthwise.groups),
        out_channels_(of.out_channels),
        depth_(of.expands ? of.expansion.in_channels * of.expansion.taps() : 0),
        taps_(of.depthwise.taps()),
        padded_(rounded_up(channels_, kLanes)),
        expansion_bias_(padded_ * depth_),
        depthwise_(expansion_bias_ + padded_),
        depthwise_bias_(depthwise_ + padded_ * taps_),
        projection_(depthwise_bias_ + padded_),
        projection_bias_(projection_ + rounded_up(out_channels_, kLanes) * channels_) {}

  int64_t size() const { return projection_bias_ + out_channels_; }
  int64_t depth() const { return depth_; }
  const float* expansion(int64_t channel) const { return memory_ + channel * depth_; }
  const float* expansion_bias(int64_t channel) const { return memory_ + expansion_bias_ + channel; }
  const float* depthwise(int64_t channel) const { return memory_ + depthwise_ + channel * taps_; }
  const float* depthwise_bias(int64_t channel) const { return memory_ + depthwise_bias_ + channel; }
  const float* projection(int64_t channel) const { return memory_ + projection_ + channel * channels_; }
  const float* projection_bias(int64_t channel) const { return memory_ + projection_bias_ + channel; }

  void pack(const BlockWeights& given, float* memory) const {
    if (depth_ > 0) pack_panels(given.weights[0], channels_, depth_, memory);
    pack_panels(given.weights[2], out_channels_, channels_, memory + projection_);
    for (int64_t c = 0; c < channels_; c += kLanes)
      transpose_lines(given.weights[1] + c * taps_, taps_, std::min<int64_t>(channels_ - c, kLanes), taps_,
                      memory + depthwise_ + c * taps_, kLanes);
    pad_bias(given.biases[0], channels_, padded_, memory + expansion_bias_);
    pad_bias(given.biases[1], channels_, padded_, memory + depthwise_bias_);
    pad_bias(given.biases[2], out_channels_, out_channels_, memory + projection_bias_);
  }

 private:
  static void pack_panels(const float* weights, int64_t columns, int64_t depth, float* to) {
    const MatrixColumns packer{weights, depth, 1};
    for (int64_t j = 0; j < columns; j += kColumns) {
      const int64_t count = std::min<int64_t>(kColumns, columns - j);
      packer(to + j * depth, j, count, rounded_up(count, kLanes), 0, depth);
      if (is_half_more(count))
        for (int64_t k = 0; k < depth; ++k)
          std::copy_n(to + j * depth + k * 2 * kLanes + kLanes, kLanes / 2,
                      to + j * depth + k * 2 * kLanes + kLanes + kLanes / 2);
    }
  }

  static void pad_bias(const float* from, int64_t count, int64_t padded, float* to) {
    std::fill_n(to, padded, 0.0f);
    if (from != nullptr) std::copy_n(from, count, to);
  }

  const float* memory_;
  int64_t channels_, out_channels_, depth_, taps_, padded_;
  int64_t expansion_bias_, depthwise_, depthwise_bias_, projection_, projection_bias_;  // where each begins
};

TileFunction product_tile(int64_t height, int64_t width) {
  if (width == kVectors) return tile_of<kVectors>(height);
  if constexpr (kVectors > 2)
    if (width == 2) return tile_of<2>(height);
  return tile_of<1>(height);
}

// A band of one image: rows of the output from top to bottom.
class Band {
 public:
  Band(const BlockShape& of, const BlockData& data, const PackedBlock& packed, int64_t image, int64_t rows_at_once)
      : of_(of),
        wide_(of.depthwise),
        packed_(packed),
        channels_(wide_.groups),
        rows_at_once_(rows_at_once),
        slots_((rows_at_once - 1) * wide_.stride[1] + wide_.kernel[1]),
        row_(kLanes * std::max(wide_.pad[2] + wide_.in[2], (wide_.out[2] - 1) * wide_.stride[2] + wide_.kernel[2])),
        pixels_(rows_at_once * wide_.out[2]),
        ring_(rounded_up(channels_, kLanes) * slots_ * row_ / kLanes),
        narrow_(rounded_up(channels_, kLanes) * pixels_),
        made_(rounded_up(pixels_, kLanes) * kColumns),
        patches_(patch_floats(of)) {
    const Convolution& first = of.expands ? of.expansion : wide_;
    x_ = data.x + image * (of.expands ? first.in_channels : channels_) * first.in_size();
    const int64_t out = image * of.out_channels * wide_.out_size();
    y_ = data.y + out;
    residual_ = data.residual == nullptr ? nullptr : data.residual + out;
    clear_padding();
    if (of.expands) find_offsets();
  }

  void run(int64_t begin, int64_t end) {
    next_ = begin * wide_.stride[1] - wide_.pad[1];
    for (int64_t row = begin; row < end; row += rows_at_once_) {
      const int64_t rows = std::min(rows_at_once_, end - row);
      const int64_t first = row * wide_.stride[1] - wide_.pad[1];
      const int64_t last = first + (rows - 1) * wide_.stride[1] + wide_.kernel[1];
      next_ = std::max(next_, first);
      widen(next_, last);
      for (int64_t c = 0; c < channels_; c += kLanes)
        for (int64_t r = 0; r < rows; ++r) convolve_row(c, first + r * wide_.stride[1], r);
      next_ = last;
      for (int64_t c = 0; c < of_.out_channels; c += kColumns) project(c, row, rows * wide_.out[2]);
    }
  }

 private:
  // Beside the rows in the ring, where nothing else is written.
  void clear_padding() const {
    const int64_t begin = wide_.pad[2] * kLanes, end = begin + wide_.in[2] * kLanes;
    float* const last = ring_.get() + rounded_up(channels_, kLanes) * slots_ * row_ / kLanes;
    for (float* row = ring_.get(); row != last; row += row_) {
      std::fill(row, row + begin, 0.0f);
      std::fill(row + end, row + row_, 0.0f);
    }
  }

  static bool is_pointwise(const Convolution& conv) {
    return conv.taps() == 1 && conv.stride[1] == 1 && conv.stride[2] == 1 && conv.pad[1] == 0 && conv.pad[2] == 0;
  }

  // Pixels of a row of one phase that windows of the expansion read.
  static int64_t phase_length(const Convolution& conv) { return conv.out[2] + (conv.kernel[2] - 1) / conv.stride[2]; }

  static int64_t patch_floats(const BlockShape& of) {
    const Convolution& conv = of.expansion;
    if (!of.expands || is_pointwise(conv)) return 0;
    return conv.in_channels * conv.kernel[1] * std::min(conv.stride[2], conv.kernel[2]) * phase_length(conv);
  }

  // Windows of several pixels read a copy of their rows with padding, in which neighbours are a stride apart.
  void find_offsets() {
    const Convolution& conv = of_.expansion;
    const int64_t phases = std::min(conv.stride[2], conv.kernel[2]), length = phase_length(conv);
    for (int64_t c = 0; c < conv.in_channels; ++c)
      for (int64_t y = 0; y < conv.kernel[1]; ++y)
        for (int64_t x = 0; x < conv.kernel[2]; ++x)
          offsets_.push_back(is_pointwise(conv) ? c * conv.in_size()
                                                : ((c * conv.kernel[1] + y) * phases + x % conv.stride[2]) * length +
                                                      x / conv.stride[2]);
  }

  float* ring(int64_t channel, int64_t row) const {
    const int64_t slot = ((row % slots_) + slots_) % slots_;
    return ring_.get() + (channel / kLanes * slots_ + slot) * row_;
  }

  // Rows of the image that the depthwise convolution reads, zeros above and below it.
  void widen(int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (row < 0 || row >= wide_.in[1])
        for (int64_t c = 0; c < channels_; c += kLanes) std::fill_n(ring(c, row), row_, 0.0f);
      else if (of_.expands)
        expand(row);
      else
        for (int64_t c = 0; c < channels_; c += kLanes)
          transpose_lines(x_ + c * wide_.in_size() + row * wide_.in[2], wide_.in_size(),
                          std::min<int64_t>(channels_ - c, kLanes), wide_.in[2], ring(c, row) + wide_.pad[2] * kLanes,
                          kLanes);
    }
  }

  void expand(int64_t row) {
    const bool direct = is_pointwise(of_.expansion);
    if (!direct) read_patches(row);
    const PixelReads reads{direct ? x_ + row * wide_.in[2] : patches_.get(), offsets_.data(), packed_.depth()};
    const EvenCut cut(wide_.in[2], kRows);
    for (int64_t c = 0; c < channels_; c += kColumns) {
      const int64_t vectors = pieces_of(std::min<int64_t>(kColumns, channels_ - c), kLanes);
      float* const to = ring(c, row) + wide_.pad[2] * kLanes;
      for (int64_t p = 0; p < cut.pieces; ++p)
        pixel_tile(cut.length(p), vectors)(reads, cut.begin(p), packed_.expansion(c), packed_.expansion_bias(c),
                                           of_.bounds[0], to + cut.begin(p) * kLanes, slots_ * row_);
    }
  }

  void read_patches(int64_t row) {
    const Convolution& conv = of_.expansion;
    const int64_t phases = std::min(conv.stride[2], conv.kernel[2]), length = phase_length(conv);
    const Patches patches{x_, 0, {1, conv.in[1], conv.in[2]}, {}, {1, conv.stride[1], conv.stride[2]}, {}};
    const Grid::Piece piece{0, length, 0, 0, row * conv.stride[1], 0};
    float* to = patches_.get();
    for (int64_t c = 0; c < conv.in_channels; ++c)
      for (int64_t y = 0; y < conv.kernel[1]; ++y)
        for (int64_t phase = 0; phase < phases; ++phase, to += length)
          patches.copy(piece, x_ + c * conv.in_size(), {{0, y - conv.pad[1], phase - conv.pad[2]}}, to);
  }

  // A row of the depthwise convolution for one vector of channels; `first` is the row where its windows begin.
  void convolve_row(int64_t channel, int64_t first, int64_t row) {
    rows_.clear();
    for (int64_t y = 0; y < wide_.kernel[1]; ++y) rows_.push_back(ring(channel, first + y));
    const ChannelTaps taps{rows_.data(), wide_.kernel[1], wide_.kernel[2], packed_.depthwise(channel)};
    const Vector bias = load(packed_.depthwise_bias(channel));
    const int64_t stride = wide_.stride[2];
    float* const to = narrow_.get() + channel * pixels_ + row * wide_.out[2] * kLanes;
    const EvenCut cut(wide_.out[2], stride <= 2 ? kRows : 1);
    for (int64_t p = 0; p < cut.pieces; ++p) {
      const int64_t pixel = cut.begin(p), count = cut.length(p);
      channel_tile(count, stride, wide_.kernel[2])(taps, pixel * stride, bias, of_.bounds[1], to + pixel * kLanes);
    }
  }

  // Output channels from `channel` on, of `pixels` from the begin of a row.
  void project(int64_t channel, int64_t row, int64_t pixels) {
    const int64_t count = std::min<int64_t>(kColumns, of_.out_channels - channel), vectors = pieces_of(count, kLanes);
    const EvenCut cut(pixels, kRows);
    for (int64_t p = 0; p < cut.pieces; ++p) {
      const int64_t height = cut.length(p);
      const float *from = narrow_.get() + cut.begin(p) * kLanes, *weights = packed_.projection(channel);
      float* const to = made_.get() + cut.begin(p) * kColumns;
      if (is_half_more(count) && height % 2 == 0 && channels_ <= kDepth)
        pair_tile(height / 2)(channels_, from, pixels_ * kLanes, weights, to);
      else
        for (int64_t k = 0; k < channels_; k += kDepth)  // a sum of all would lose digits
          product_tile(height, vectors)(std::min(kDepth, channels_ - k), from + k * pixels_, pixels_ * kLanes,
                                        weights + k * vectors * kLanes, to, kColumns, k == 0);
    }
    for (int64_t c = 0; c < count; c += kLanes)
      for (int64_t pixel = 0; pixel < pixels; pixel += kLanes)
        write(made_.get() + pixel * kColumns + c, channel + c, std::min<int64_t>(count - c, kLanes),
              row * wide_.out[2] + pixel, std::min<int64_t>(pixels - pixel, kLanes));
  }

  // Writes a square of pixels × channels to the planes of the output.
  void write(const float* from, int64_t channel, int64_t channels, int64_t pixel, int64_t pixels) {
    Vector square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = load(from + i * kColumns);
    transpose(square);
    for (int64_t i = 0; i < channels; ++i) {
      const int64_t at = (channel + i) * wide_.out_size() + pixel;
      Vector value = square[i] + broadcast(*packed_.projection_bias(channel + i));
      value = clip(value, of_.bounds[2].low, of_.bounds[2].high);
      if (residual_ != nullptr) value += load_first(residual_ + at, pixels);
      store_first(y_ + at, value, pixels);
    }
  }

  const BlockShape& of_;
  const Convolution& wide_;
  const PackedBlock& packed_;
  const float *x_, *residual_;
  float* y_;
  int64_t channels_, rows_at_once_, slots_, row_, pixels_;
  int64_t next_ = 0;  // the first row that is not in the ring
  Floats ring_;       // [vector of channels][slot][pixel][kLanes]
  Floats narrow_;     // [vector of channels][pixel][kLanes]
  Floats made_;       // [pixel][kColumns]
  Floats patches_;
  std::vector<int64_t> offsets_;
  std::vector<const float*> rows_;
};

void forward(const BlockShape& of, const BlockData& data, const Parallel& parallel) {
  constexpr int64_t kTasks = 16, kPixelsAtOnce = 56;
  const Convolution& wide = of.depthwise;
  const PackedBlock packed(of, data.packed);
  // A band computes rows again that belong to the one above: few beside its own.
  const int64_t again = std::max<int64_t>(0, wide.kernel[1] - wide.stride[1]);
  const int64_t least = std::max<int64_t>(1, pieces_of(8 * again, wide.stride[1]));
  const int64_t bands = std::max<int64_t>(1, std::min(wide.out[1] / least, kTasks / wide.batch));
  const EvenCut cut(wide.out[1], pieces_of(wide.out[1], bands));
  // Narrow rows go together, so that they are worth another round of the weights.
  const int64_t rows_at_once = std::max<int64_t>(1, std::min(kPixelsAtOnce / wide.out[2], wide.out[1]));
  parallel(wide.batch * cut.pieces, [&](int64_t task) {
    const int64_t band = task % cut.pieces;
    Band(of, data, packed, task / cut.pieces, rows_at_once).run(cut.begin(band), cut.begin(band) + cut.length(band));
  });
}

int64_t packed_size(const BlockShape& of) { return PackedBlock(of, nullptr).size(); }

void pack(const BlockShape& of, const BlockWeights& given, float* to) { PackedBlock(of, to).pack(given, to); }

}  // namespace

const InvertedResiduals kInvertedResiduals = {packed_size, pack, forward};

}  // namespace onnxtrain::ONNXTRAIN_ISA
