// Compiled once for each instruction set. With c = x - mean, r = 1 / the root of (variance + epsilon)
// and averages over the row, the gradient of y = c r scale is
//   dx = r (scale dy - average(scale dy) - c r² average(scale dy c)).
#include "norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "sums.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

constexpr int64_t kElementsOfTask = 16384;  // at least so many for a thread to take

int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// What a sum is divided by: that of nothing is 0, and so is its mean.
double divisor(int64_t count) { return static_cast<double>(std::max<int64_t>(1, count)); }

double mean_of(const float* x, int64_t count) {
  Sums<1> sums;
  sums.add(count, [&](auto way, int64_t i, auto* terms) { terms[0] = way.get(x + i); });
  return sums.total(0) / divisor(count);
}

// The mean of the squares of x - mean.
double mean_square_of(const float* x, int64_t count, float mean) {
  Sums<1> sums;
  sums.add(count, [&](auto way, int64_t i, auto* terms) {
    const auto deviation = way.get(x + i) - mean;
    terms[0] = deviation * deviation;
  });
  return sums.total(0) / divisor(count);
}

float inverse_root(double mean_square, float epsilon) {
  return static_cast<float>(1.0 / std::sqrt(mean_square + static_cast<double>(epsilon)));
}

// ---- rows ----

void write_row(const float* x, float mean, float inverse, const float* scale, const float* bias, int64_t width,
               float* y) {
  if (bias != nullptr)
    for_each(width, [&](auto way, int64_t i) {
      way.put(y + i, (way.get(x + i) - mean) * inverse * way.get(scale + i) + way.get(bias + i));
    });
  else
    for_each(width,
             [&](auto way, int64_t i) { way.put(y + i, (way.get(x + i) - mean) * inverse * way.get(scale + i)); });
}

void normalize_row(const RowNormForward& of, int64_t row) {
  const float* x = of.x + row * of.width;
  float* y = of.y + row * of.width;
  const float mean = of.mean == nullptr ? 0.0f : static_cast<float>(mean_of(x, of.width));
  const float inverse = inverse_root(mean_square_of(x, of.width, mean), of.epsilon);
  write_row(x, mean, inverse, of.scale, of.bias, of.width, y);
  if (of.mean != nullptr) of.mean[row] = mean;
  if (of.inverse != nullptr) of.inverse[row] = inverse;
}

void row_forward(const RowNormForward& of, const Parallel& parallel) {
  const int64_t together = std::max<int64_t>(1, kElementsOfTask / std::max<int64_t>(1, of.width));
  parallel(divide_up(of.rows, together), [&](int64_t task) {
    for (int64_t row = task * together; row < std::min(of.rows, (task + 1) * together); ++row) normalize_row(of, row);
  });
}

constexpr int kRowsAtOnce = 4;
constexpr int64_t kMostTasks = 16;  // each keeps sums of its own for scale and bias

// What the gradient of a row is computed with.
struct RowFactors {
  float mean, inverse, average, slope;
};

// Sums of scale dy and of scale dy (x - mean), for some rows at once.
template <int kRowCount>
void add_row_sums(const RowNormBackward& of, int64_t first, const RowFactors* with, double (*totals)[2]) {
  constexpr int64_t kMost = 8192;  // columns that are added up in single precision
  for (int64_t begin = 0; begin < of.width; begin += kMost) {
    const int64_t end = std::min(of.width, begin + kMost);
    Vector lanes[kRowCount][2] = {};
    float rest[kRowCount][2] = {};
    const auto add = [&](auto way, int64_t i, auto(*sums)[2]) {
      const auto scale = way.get(of.scale + i);
      for (int row = 0; row < kRowCount; ++row) {
        const int64_t at = (first + row) * of.width + i;
        const auto scaled = way.get(of.dy + at) * scale;
        sums[row][0] += scaled;
        sums[row][1] += scaled * (way.get(of.x + at) - with[row].mean);
      }
    };
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) add(ByVector{}, i, lanes);
    for (; i < end; ++i) add(ByElement{}, i, rest);
    for (int row = 0; row < kRowCount; ++row)
      for (int which = 0; which < 2; ++which) totals[row][which] += total_of(lanes[row][which]) + rest[row][which];
  }
}

template <int kRowCount>
void find_factors(const RowNormBackward& of, int64_t first, RowFactors* with) {
  for (int row = 0; row < kRowCount; ++row) {
    const int64_t own = first + row;
    with[row].mean = of.mean == nullptr ? 0.0f : of.mean[own];
    with[row].inverse = of.inverse != nullptr
                            ? of.inverse[own]
                            : inverse_root(mean_square_of(of.x + own * of.width, of.width, 0.0f), of.epsilon);
  }
  double totals[kRowCount][2] = {};
  add_row_sums<kRowCount>(of, first, with, totals);
  const double width = static_cast<double>(of.width);
  for (int row = 0; row < kRowCount; ++row) {
    const double inverse = with[row].inverse;
    with[row].average = of.mean == nullptr ? 0.0f : static_cast<float>(totals[row][0] / width);
    with[row].slope = static_cast<float>(totals[row][1] / width * inverse * inverse);
  }
}

// Writes dx of some rows and adds what they have for scale and bias.
template <int kRowCount>
void differentiate_rows(const RowNormBackward& of, int64_t first, float* dscale, float* dbias) {
  RowFactors with[kRowCount];
  find_factors<kRowCount>(of, first, with);
  for_each(of.width, [&](auto way, int64_t i) {
    using Value = typename decltype(way)::Value;
    const Value scale = way.get(of.scale + i);
    Value scale_sum = way.get(dscale + i), bias_sum = way.get(dbias + i);
    for (int row = 0; row < kRowCount; ++row) {
      const int64_t at = (first + row) * of.width + i;
      const Value dy = way.get(of.dy + at), deviation = way.get(of.x + at) - with[row].mean;
      scale_sum += dy * deviation * with[row].inverse;
      bias_sum += dy;
      way.put(of.dx + at, (dy * scale - with[row].average - deviation * with[row].slope) * with[row].inverse);
    }
    way.put(dscale + i, scale_sum);
    way.put(dbias + i, bias_sum);
  });
}

// Writes the output of a row once more.
void normalize_again(const RowNormBackward& of, int64_t row) {
  write_row(of.x + row * of.width, of.mean[row], of.inverse[row], of.scale, of.bias, of.width, of.y + row * of.width);
}

// Sums for scale and bias over some rows: in single precision over a few dozen, then in double.
void differentiate_task(const RowNormBackward& of, int64_t begin, int64_t end, double* sums) {
  constexpr int64_t kRowsPerSum = 64;
  std::vector<float> single(2 * of.width);
  float *dscale = single.data(), *dbias = dscale + of.width;
  for (int64_t row = begin; row < end && of.y != nullptr; ++row) normalize_again(of, row);
  for (int64_t row = begin; row < end;) {
    std::fill(single.begin(), single.end(), 0.0f);
    const int64_t until = std::min(end, row + kRowsPerSum);
    for (; row + kRowsAtOnce <= until; row += kRowsAtOnce) differentiate_rows<kRowsAtOnce>(of, row, dscale, dbias);
    for (; row < until; ++row) differentiate_rows<1>(of, row, dscale, dbias);
    for (int64_t i = 0; i < 2 * of.width; ++i) sums[i] += static_cast<double>(single[i]);
  }
}

void row_backward(const RowNormBackward& of, const Parallel& parallel) {
  const int64_t least = divide_up(kElementsOfTask, std::max<int64_t>(1, of.width));
  const int64_t together = std::max(least, divide_up(of.rows, kMostTasks));
  const int64_t tasks = divide_up(of.rows, together);
  std::vector<double> sums(2 * of.width * std::max<int64_t>(1, tasks));
  parallel(tasks, [&](int64_t task) {
    const int64_t begin = task * together, end = std::min(of.rows, begin + together);
    differentiate_task(of, begin, end, sums.data() + 2 * of.width * task);
  });
  // A row of one element is its own mean, whatever it is: no rounding is left of its gradient.
  if (of.width == 1 && of.mean != nullptr) std::fill_n(of.dx, of.rows, 0.0f);
  for (int64_t task = 1; task < tasks; ++task)
    for (int64_t i = 0; i < 2 * of.width; ++i) sums[i] += sums[2 * of.width * task + i];
  for (int64_t i = 0; i < of.width; ++i) {
    if (of.dscale != nullptr) of.dscale[i] = static_cast<float>(sums[i]);
    if (of.dbias != nullptr) of.dbias[i] = static_cast<float>(sums[of.width + i]);
  }
}

// ---- groups of channels ----

// Calls of(sample, group, offset of its first element) for each group of each sample.
template <class Of>
void for_groups(const GroupNormShape& shape, const Parallel& parallel, Of of) {
  const int64_t size = shape.channels * shape.plane, count = shape.samples * shape.groups;
  const int64_t together = std::max<int64_t>(1, kElementsOfTask / std::max<int64_t>(1, size));
  parallel(divide_up(count, together), [&](int64_t task) {
    for (int64_t each = task * together; each < std::min(count, (task + 1) * together); ++each)
      of(each / shape.groups, each % shape.groups, each * size);
  });
}

// The place of a channel's scale and bias.
int64_t place_of(const GroupNormShape& shape, int64_t group, int64_t channel) {
  return shape.per_channel ? group * shape.channels + channel : group;
}

struct GroupStatistics {
  float mean, inverse;

  GroupStatistics(const GroupNormShape& shape, const float* x) {
    const int64_t size = shape.channels * shape.plane;
    mean = static_cast<float>(mean_of(x, size));
    inverse = inverse_root(mean_square_of(x, size, mean), shape.epsilon);
  }
};

void normalize_group(const GroupNormShape& shape, const GroupNormForward& of, int64_t group, int64_t offset) {
  const GroupStatistics with(shape, of.x + offset);
  for (int64_t channel = 0; channel < shape.channels; ++channel) {
    const int64_t place = place_of(shape, group, channel), at = offset + channel * shape.plane;
    const float gain = of.scale[place] * with.inverse, bias = of.bias[place], mean = with.mean;
    for_each(shape.plane,
             [&](auto way, int64_t i) { way.put(of.y + at + i, (way.get(of.x + at + i) - mean) * gain + bias); });
  }
}

void group_forward(const GroupNormShape& shape, const GroupNormForward& of, const Parallel& parallel) {
  for_groups(shape, parallel,
             [&](int64_t, int64_t group, int64_t offset) { normalize_group(shape, of, group, offset); });
}

// Writes dx of a group, and what it has for scale and bias, one number for each channel.
void differentiate_group(const GroupNormShape& shape, const GroupNormBackward& of, int64_t group, int64_t offset,
                         float* dscale, float* dbias) {
  const GroupStatistics with(shape, of.x + offset);
  const float mean = with.mean, inverse = with.inverse;
  double average = 0, slope = 0;
  for (int64_t channel = 0; channel < shape.channels; ++channel) {
    const float *x = of.x + offset + channel * shape.plane, *dy = of.dy + offset + channel * shape.plane;
    Sums<2> sums;
    sums.add(shape.plane, [&](auto way, int64_t i, auto* terms) {
      terms[0] = way.get(dy + i);
      terms[1] = terms[0] * (way.get(x + i) - mean);
    });
    const double scale = of.scale[place_of(shape, group, channel)];
    average += scale * sums.total(0);
    slope += scale * sums.total(1);
    dbias[channel] = static_cast<float>(sums.total(0));
    dscale[channel] = static_cast<float>(sums.total(1) * inverse);
  }
  const double size = static_cast<double>(shape.channels * shape.plane);
  const float base = static_cast<float>(average / size * inverse);
  const float tilt = static_cast<float>(slope / size * inverse * inverse * inverse);
  for (int64_t channel = 0; channel < shape.channels; ++channel) {
    const int64_t at = offset + channel * shape.plane;
    const float gain = of.scale[place_of(shape, group, channel)] * inverse;
    for_each(shape.plane, [&](auto way, int64_t i) {
      const auto deviation = way.get(of.x + at + i) - mean;
      way.put(of.dx + at + i, way.get(of.dy + at + i) * gain - base - deviation * tilt);
    });
  }
}

// Adds up the parts of all samples, for each channel or each group.
void add_samples(const GroupNormShape& shape, const std::vector<float>& parts, float* to) {
  const int64_t channels = shape.groups * shape.channels, outputs = shape.per_channel ? channels : shape.groups;
  std::vector<double> sums(outputs);
  for (int64_t sample = 0; sample < shape.samples; ++sample)
    for (int64_t channel = 0; channel < channels; ++channel)
      sums[shape.per_channel ? channel : channel / shape.channels] += parts[sample * channels + channel];
  std::copy(sums.begin(), sums.end(), to);
}

void group_backward(const GroupNormShape& shape, const GroupNormBackward& of, const Parallel& parallel) {
  const int64_t channels = shape.groups * shape.channels;
  std::vector<float> dscale(shape.samples * channels), dbias(shape.samples * channels);
  for_groups(shape, parallel, [&](int64_t sample, int64_t group, int64_t offset) {
    const int64_t first = sample * channels + group * shape.channels;
    differentiate_group(shape, of, group, offset, dscale.data() + first, dbias.data() + first);
  });
  if (of.dscale != nullptr) add_samples(shape, dscale, of.dscale);
  if (of.dbias != nullptr) add_samples(shape, dbias, of.dbias);
}

}  // namespace

const NormTable kNorm = {row_forward, row_backward, group_forward, group_backward};

}  // namespace onnxtrain::ONNXTRAIN_ISA
