// Compiled once for each instruction set. A channel is read from memory once in a pass: its sums are
// taken and then used while it is in the cache.
//
// There are two layouts of the work. Large planes: one channel after another, plane by plane. Small
// planes: some neighbouring channels at once, whose elements of one sample are a long row. Sums are
// then taken for each place of the row first.
#include "batch_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "sums.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

constexpr int64_t kSmallPlane = 40;
constexpr int64_t kElementsOfTask = 16384;  // at least so many for a thread to take
constexpr int64_t kCached = 1 << 17;        // floats that stay in the second-level cache
constexpr int64_t kRowsPerSum = 64;         // rows that are added up in single precision

int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// What the elements of a channel are computed with.
struct Channel {
  float mean, gain, bias;
};

template <class Value>
inline Value normalized(Value x, const Channel& with) {
  return (x - with.mean) * with.gain + with.bias;
}

Channel channel_of(const BatchNormShape& shape, float mean, float variance, float scale, float bias) {
  return {mean, scale / std::sqrt(variance + shape.epsilon), bias};
}

// ---- large planes ----

// Calls of(pointer offset) for each plane of a channel.
template <class Of>
void for_planes(const BatchNormShape& shape, int64_t channel, Of of) {
  for (int64_t sample = 0; sample < shape.batch; ++sample) of((sample * shape.channels + channel) * shape.plane);
}

double mean_of(const BatchNormShape& shape, const float* x, int64_t channel) {
  Sums<1> sums;
  for_planes(shape, channel, [&](int64_t plane) {
    sums.add(shape.plane, [&](auto way, int64_t i, auto* terms) { terms[0] = way.get(x + plane + i); });
  });
  return sums.total(0) / static_cast<double>(shape.batch * shape.plane);
}

double variance_of(const BatchNormShape& shape, const float* x, int64_t channel, float mean) {
  Sums<1> sums;
  for_planes(shape, channel, [&](int64_t plane) {
    sums.add(shape.plane, [&](auto way, int64_t i, auto* terms) {
      const auto deviation = way.get(x + plane + i) - mean;
      terms[0] = deviation * deviation;
    });
  });
  return sums.total(0) / static_cast<double>(shape.batch * shape.plane);
}

// Mean and variance of a channel that does not stay in the cache: pieces of it are read twice in a
// row, and their statistics are put together.
void statistics_by_piece(const BatchNormShape& shape, const float* x, int64_t channel, double* mean, double* variance) {
  constexpr int64_t kPiece = 4096;
  double count = 0, average = 0, squares = 0;
  for_planes(shape, channel, [&](int64_t plane) {
    for (int64_t begin = 0; begin < shape.plane; begin += kPiece) {
      const BatchNormShape piece{1, 1, std::min(kPiece, shape.plane - begin), 0, false, 0, 0};
      const double size = static_cast<double>(piece.plane);
      const double own = mean_of(piece, x + plane + begin, 0);
      const double spread = variance_of(piece, x + plane + begin, 0, static_cast<float>(own));
      const double apart = own - average;
      squares += spread * size + apart * apart * count * size / (count + size);
      count += size;
      average += apart * size / count;
    }
  });
  *mean = average;
  *variance = squares / count;
}

template <bool kClipped, bool kResidual>
void normalize_channel(const BatchNormShape& shape, const BatchNormForward& of, int64_t channel) {
  double mean, variance;
  if (shape.batch * shape.plane <= kCached) {
    mean = mean_of(shape, of.x, channel);
    variance = variance_of(shape, of.x, channel, static_cast<float>(mean));
  } else {
    statistics_by_piece(shape, of.x, channel, &mean, &variance);
  }
  of.mean[channel] = static_cast<float>(mean);
  of.variance[channel] = static_cast<float>(variance);
  const Channel with = channel_of(shape, of.mean[channel], of.variance[channel], of.scale[channel], of.bias[channel]);
  const float low = shape.low, high = shape.high;
  for_planes(shape, channel, [&](int64_t plane) {
    for_each(shape.plane, [&](auto way, int64_t i) {
      auto y = normalized(way.get(of.x + plane + i), with);
      if (kResidual) y += way.get(of.residual + plane + i);
      if (kClipped) y = clip(y, low, high);
      way.put(of.y + plane + i, y);
    });
  });
}

template <bool kClipped>
void differentiate_channel(const BatchNormShape& shape, const BatchNormBackward& of, int64_t channel) {
  const float inverse = 1.0f / std::sqrt(of.variance[channel] + shape.epsilon);
  const float bias = kClipped ? of.bias[channel] : 0.0f;
  const Channel with = channel_of(shape, of.mean[channel], of.variance[channel], of.scale[channel], bias);
  const float low = shape.low, high = shape.high;
  Sums<2> sums;
  for_planes(shape, channel, [&](int64_t plane) {
    sums.add(shape.plane, [&](auto way, int64_t i, auto* terms) {
      const auto x = way.get(of.x + plane + i);
      auto dy = way.get(of.dy + plane + i);
      if (kClipped) dy = pass_between(normalized(x, with), low, high, dy);
      terms[0] = dy;
      terms[1] = dy * (x - with.mean);
    });
  });
  const double count = static_cast<double>(shape.batch * shape.plane);
  const double sum = sums.total(0), dot = sums.total(1);
  of.dbias[channel] = static_cast<float>(sum);
  of.dscale[channel] = static_cast<float>(dot * inverse);
  const float average = of.of_batch ? static_cast<float>(sum / count) : 0.0f;
  const float slope = of.of_batch ? static_cast<float>(dot * inverse * inverse / count) : 0.0f;
  for_planes(shape, channel, [&](int64_t plane) {
    for_each(shape.plane, [&](auto way, int64_t i) {
      const auto x = way.get(of.x + plane + i);
      auto dy = way.get(of.dy + plane + i);
      if (kClipped) dy = pass_between(normalized(x, with), low, high, dy);
      way.put(of.dx + plane + i, (dy - average - (x - with.mean) * slope) * with.gain);
    });
  });
}

// ---- small planes: rows of several channels ----

// Some neighbouring channels.
struct Block {
  int64_t first, channels, row, offset, stride;  // a row has their elements of one sample

  Block(const BatchNormShape& shape, int64_t from, int64_t count)
      : first(from),
        channels(count),
        row(count * shape.plane),
        offset(from * shape.plane),
        stride(shape.channels * shape.plane) {}
};

// Sums over the samples, for each place of a row, and then for each channel.
class RowSums {
 public:
  explicit RowSums(int64_t row) : single_(row), sums_(row) {}

  // Calls add(sample, row of sums) for each sample.
  template <class Add>
  void over(int64_t samples, Add add) {
    std::fill(sums_.begin(), sums_.end(), 0.0);
    for (int64_t begin = 0; begin < samples; begin += kRowsPerSum) {
      std::fill(single_.begin(), single_.end(), 0.0f);
      const int64_t end = std::min(samples, begin + kRowsPerSum);
      for (int64_t sample = begin; sample < end; ++sample) add(sample, single_.data());
      for (size_t i = 0; i < sums_.size(); ++i) sums_[i] += single_[i];
    }
  }

  double channel(int64_t which, int64_t plane) const {
    double total = 0;
    for (int64_t i = which * plane; i < (which + 1) * plane; ++i) total += sums_[i];
    return total;
  }

  // One step of `over` for a caller that keeps two sums.
  float* single() { return single_.data(); }
  void settle() {
    for (size_t i = 0; i < sums_.size(); ++i) sums_[i] += single_[i];
    std::fill(single_.begin(), single_.end(), 0.0f);
  }

 private:
  std::vector<float> single_;
  std::vector<double> sums_;
};

// A value of each channel, repeated for each place of the row.
class Row {
 public:
  explicit Row(int64_t size) : values_(size) {}
  void set(int64_t channel, int64_t plane, float value) {
    std::fill_n(values_.begin() + channel * plane, plane, value);
  }
  const float* data() const { return values_.data(); }

 private:
  std::vector<float> values_;
};

template <bool kClipped, bool kResidual>
void normalize_block(const BatchNormShape& shape, const BatchNormForward& of, const Block& block) {
  const double count = static_cast<double>(shape.batch * shape.plane);
  RowSums sums(block.row);
  Row mean(block.row), gain(block.row), bias(block.row);
  const float* x = of.x + block.offset;
  sums.over(shape.batch, [&](int64_t sample, float* sum) {
    const float* row = x + sample * block.stride;
    for_each(block.row, [&](auto way, int64_t i) { way.put(sum + i, way.get(sum + i) + way.get(row + i)); });
  });
  for (int64_t c = 0; c < block.channels; ++c) {
    of.mean[block.first + c] = static_cast<float>(sums.channel(c, shape.plane) / count);
    mean.set(c, shape.plane, of.mean[block.first + c]);
  }
  sums.over(shape.batch, [&](int64_t sample, float* sum) {
    const float* row = x + sample * block.stride;
    for_each(block.row, [&](auto way, int64_t i) {
      const auto deviation = way.get(row + i) - way.get(mean.data() + i);
      way.put(sum + i, way.get(sum + i) + deviation * deviation);
    });
  });
  for (int64_t c = 0; c < block.channels; ++c) {
    const int64_t own = block.first + c;
    of.variance[own] = static_cast<float>(sums.channel(c, shape.plane) / count);
    gain.set(c, shape.plane, channel_of(shape, 0, of.variance[own], of.scale[own], 0).gain);
    bias.set(c, shape.plane, of.bias[own]);
  }
  const float low = shape.low, high = shape.high;
  for (int64_t sample = 0; sample < shape.batch; ++sample) {
    const float* row = x + sample * block.stride;
    float* y = of.y + block.offset + sample * block.stride;
    const float* residual = kResidual ? of.residual + block.offset + sample * block.stride : nullptr;
    for_each(block.row, [&](auto way, int64_t i) {
      auto made = (way.get(row + i) - way.get(mean.data() + i)) * way.get(gain.data() + i) + way.get(bias.data() + i);
      if (kResidual) made += way.get(residual + i);
      if (kClipped) made = clip(made, low, high);
      way.put(y + i, made);
    });
  }
}

template <bool kClipped>
void differentiate_block(const BatchNormShape& shape, const BatchNormBackward& of, const Block& block) {
  const double count = static_cast<double>(shape.batch * shape.plane);
  Row mean(block.row), gain(block.row), bias(kClipped ? block.row : 0), average(block.row), slope(block.row);
  for (int64_t c = 0; c < block.channels; ++c) {
    const int64_t own = block.first + c;
    mean.set(c, shape.plane, of.mean[own]);
    gain.set(c, shape.plane, channel_of(shape, 0, of.variance[own], of.scale[own], 0).gain);
    if (kClipped) bias.set(c, shape.plane, of.bias[own]);
  }
  const float low = shape.low, high = shape.high;
  // What the gradient is before the bounds, and x less its mean.
  const auto read = [&](auto way, int64_t sample, int64_t i, auto* dy, auto* deviation) {
    const int64_t at = block.offset + sample * block.stride + i;
    *deviation = way.get(of.x + at) - way.get(mean.data() + i);
    *dy = way.get(of.dy + at);
    if (kClipped) *dy = pass_between(*deviation * way.get(gain.data() + i) + way.get(bias.data() + i), low, high, *dy);
  };
  RowSums sums(block.row), dots(block.row);
  for (int64_t sample = 0; sample < shape.batch; ++sample) {
    float *sum = sums.single(), *dot = dots.single();
    for_each(block.row, [&](auto way, int64_t i) {
      typename decltype(way)::Value dy, deviation;
      read(way, sample, i, &dy, &deviation);
      way.put(sum + i, way.get(sum + i) + dy);
      way.put(dot + i, way.get(dot + i) + dy * deviation);
    });
    if ((sample + 1) % kRowsPerSum == 0 || sample + 1 == shape.batch) sums.settle(), dots.settle();
  }
  for (int64_t c = 0; c < block.channels; ++c) {
    const int64_t own = block.first + c;
    const double inverse = 1.0f / std::sqrt(of.variance[own] + shape.epsilon);
    const double sum = sums.channel(c, shape.plane), dot = dots.channel(c, shape.plane);
    of.dbias[own] = static_cast<float>(sum);
    of.dscale[own] = static_cast<float>(dot * inverse);
    average.set(c, shape.plane, of.of_batch ? static_cast<float>(sum / count) : 0.0f);
    slope.set(c, shape.plane, of.of_batch ? static_cast<float>(dot * inverse * inverse / count) : 0.0f);
  }
  for (int64_t sample = 0; sample < shape.batch; ++sample) {
    float* dx = of.dx + block.offset + sample * block.stride;
    for_each(block.row, [&](auto way, int64_t i) {
      typename decltype(way)::Value dy, deviation;
      read(way, sample, i, &dy, &deviation);
      const auto inner = dy - way.get(average.data() + i) - deviation * way.get(slope.data() + i);
      way.put(dx + i, inner * way.get(gain.data() + i));
    });
  }
}

// ---- both ----

// Cuts the channels into tasks, which depend on the sizes alone.
template <class Channelwise, class Blockwise>
void for_channels(const BatchNormShape& shape, const Parallel& parallel, Channelwise channelwise, Blockwise blockwise) {
  const int64_t size = std::max<int64_t>(1, shape.batch * shape.plane);
  const bool small = shape.plane < kSmallPlane;
  int64_t together = std::max<int64_t>(1, kElementsOfTask / size);
  if (small) {
    const int64_t row = std::max<int64_t>(64, std::min<int64_t>(1024, kCached / 2 / std::max<int64_t>(1, shape.batch)));
    together = std::max<int64_t>(1, row / std::max<int64_t>(1, shape.plane));
  }
  parallel(divide_up(shape.channels, together), [&](int64_t task) {
    const int64_t first = task * together, last = std::min(shape.channels, first + together);
    if (small) return blockwise(Block(shape, first, last - first));
    for (int64_t channel = first; channel < last; ++channel) channelwise(channel);
  });
}

template <bool kClipped, bool kResidual>
void forward_of(const BatchNormShape& shape, const BatchNormForward& of, const Parallel& parallel) {
  for_channels(
      shape, parallel, [&](int64_t channel) { normalize_channel<kClipped, kResidual>(shape, of, channel); },
      [&](const Block& block) { normalize_block<kClipped, kResidual>(shape, of, block); });
}

template <bool kClipped>
void backward_of(const BatchNormShape& shape, const BatchNormBackward& of, const Parallel& parallel) {
  for_channels(
      shape, parallel, [&](int64_t channel) { differentiate_channel<kClipped>(shape, of, channel); },
      [&](const Block& block) { differentiate_block<kClipped>(shape, of, block); });
}

template <bool kClipped>
void apply_channel(const BatchNormShape& shape, const Channel& with, const float* x, float* y) {
  const float low = shape.low, high = shape.high;
  for_each(shape.plane, [&](auto way, int64_t i) {
    auto made = normalized(way.get(x + i), with);
    if (kClipped) made = clip(made, low, high);
    way.put(y + i, made);
  });
}

void apply(const BatchNormShape& shape, const BatchNormForward& of, const Parallel& parallel) {
  const int64_t planes = shape.batch * shape.channels;
  const int64_t together = std::max<int64_t>(1, kElementsOfTask / std::max<int64_t>(1, shape.plane));
  parallel(divide_up(planes, together), [&](int64_t task) {
    for (int64_t plane = task * together; plane < std::min(planes, (task + 1) * together); ++plane) {
      const int64_t channel = plane % shape.channels, at = plane * shape.plane;
      const Channel with =
          channel_of(shape, of.mean[channel], of.variance[channel], of.scale[channel], of.bias[channel]);
      (shape.clipped ? apply_channel<true> : apply_channel<false>)(shape, with, of.x + at, of.y + at);
    }
  });
}

void forward(const BatchNormShape& shape, const BatchNormForward& of, const Parallel& parallel) {
  if (of.residual != nullptr)
    (shape.clipped ? forward_of<true, true> : forward_of<false, true>)(shape, of, parallel);
  else
    (shape.clipped ? forward_of<true, false> : forward_of<false, false>)(shape, of, parallel);
}

void backward(const BatchNormShape& shape, const BatchNormBackward& of, const Parallel& parallel) {
  (shape.clipped ? backward_of<true> : backward_of<false>)(shape, of, parallel);
}

}  // namespace

const BatchNormTable kBatchNorm = {forward, backward, apply};

}  // namespace onnxtrain::ONNXTRAIN_ISA
