// Over the last axes of x, from the attribute axis on:
//   LayerNorm(x, scale, bias if has_bias=1) -> y, mean, inverse deviation
//   LayerNormGrad(dy, x, scale, mean, inverse deviation) -> dx, dscale, dbias
//   LayerNormOnce has one more output, an empty tensor in place of a copy of y; with it,
//   LayerNormGradAgain(..., empty, bias if has_bias=1) -> dx, dscale, dbias, y computes y once more
//   RMSNorm(x, scale) -> y, an empty tensor in place of the deviation, and RMSNormGrad(dy, x, scale) -> dx, dscale
// Over groups of channels, with the attributes groups (0: each channel is one) and per_channel (whether
// scale and bias have one number for each channel, not for each group):
//   GroupNorm(x, scale, bias) -> y, and GroupNormGrad(dy, x, scale) -> dx, dscale, dbias
// All have the attribute epsilon. Outputs at the end may be left out.
#include "norm.h"

#include <algorithm>

#include "families.h"

namespace onnxtrain {
namespace {

// An output, or nothing where nobody reads it.
float* output_if_read(Run& run, size_t index, const Shape& shape) {
  return index < run.output_count() ? run.output(index, shape).floats() : nullptr;
}

// Rows of x, and their width.
struct Rows {
  int64_t count = 1, width = 1;
  Shape statistics;  // of a number for each row, with the axes of x

  Rows(const Tensor& x, int64_t axis) : statistics(x.shape) {
    const int64_t rank = static_cast<int64_t>(x.shape.size());
    require(rank >= 1 && axis >= -rank && axis < rank, "the axis is out of range");
    const int64_t first = axis < 0 ? axis + rank : axis;
    for (int64_t each = 0; each < rank; ++each) {
      (each < first ? count : width) *= x.shape[each];
      if (each >= first) statistics[each] = 1;
    }
  }
  const float* along(const Tensor& given) const {
    require(given.elements == width, "scale or bias have another size than the rows");
    return given.floats();
  }
  const float* across(const Tensor& given) const {
    require(given.elements == count, "mean or deviation have another size than there are rows");
    return given.floats();
  }
};

struct RowNorm : Kernel {
  float epsilon;
  int64_t axis;
  bool has_mean;
  RowNorm(const Attributes& of, bool with_mean)
      : epsilon(of.number("epsilon", 1e-5f)), axis(of.integer("axis", -1)), has_mean(with_mean) {}
};

struct LayerNorm : RowNorm {
  bool has_bias;
  explicit LayerNorm(const Attributes& of, bool with_mean = true)
      : RowNorm(of, with_mean), has_bias(of.integer("has_bias", 0) != 0) {}
  void run(Run& run) const override {
    require(run.input_count() >= (has_bias ? 3u : 2u), "normalization needs x, a scale and perhaps a bias");
    const Tensor x = run.input(0), scale = run.input(1);
    const Rows rows(x, axis);
    const float* bias = has_bias ? rows.along(run.input(2)) : nullptr;
    RowNormForward of{rows.count, rows.width, epsilon, x.floats(), rows.along(scale), bias, nullptr, nullptr, nullptr};
    of.y = run.output(0, x.shape).floats();
    std::vector<float> unread;
    if (has_mean) {
      of.mean = output_if_read(run, 1, rows.statistics);
      of.inverse = output_if_read(run, 2, rows.statistics);
      if (of.mean == nullptr && x.elements == 0) return;
      if (of.mean == nullptr) unread.resize(rows.count), of.mean = unread.data();
    } else if (run.output_count() > 1) {
      run.output(1, {0});  // RMSNormGrad computes the deviation again
    }
    if (has_mean && run.output_count() > 3) run.output(3, {0});
    norm().row_forward(of, run.in_parallel());
  }
};

struct LayerNormGrad : RowNorm {
  explicit LayerNormGrad(const Attributes& of, bool with_mean = true) : RowNorm(of, with_mean) {}
  void run(Run& run) const override { norm().row_backward(prepared(run), run.in_parallel()); }

  RowNormBackward prepared(Run& run) const {
    require(run.input_count() >= (has_mean ? 5u : 3u),
            has_mean ? "LayerNormGrad needs 5 inputs" : "RMSNormGrad needs 3 inputs");
    const Tensor dy = run.input(0), x = run.input(1), scale = run.input(2);
    const Rows rows(x, axis);
    require(dy.shape == x.shape, "the gradient has another shape than the input");
    RowNormBackward of{};
    of.rows = rows.count, of.width = rows.width, of.epsilon = epsilon;
    of.dy = dy.floats(), of.x = x.floats(), of.scale = rows.along(scale);
    const Tensor mean = has_mean ? run.input(3) : Tensor(), inverse = has_mean ? run.input(4) : Tensor();
    if (has_mean) of.mean = rows.across(mean), of.inverse = rows.across(inverse);
    of.dx = run.output(0, x.shape).floats();
    of.dscale = output_if_read(run, 1, scale.shape);
    if (has_mean) of.dbias = output_if_read(run, 2, scale.shape);
    return of;
  }
};

struct LayerNormGradAgain : LayerNormGrad {
  bool has_bias;
  explicit LayerNormGradAgain(const Attributes& of) : LayerNormGrad(of), has_bias(of.integer("has_bias", 0) != 0) {}
  void run(Run& run) const override {
    require(run.input_count() >= (has_bias ? 7u : 6u) && run.output_count() >= 4,
            "LayerNormGradAgain needs 6 inputs, a bias if there is one, and 4 outputs");
    const Tensor x = run.input(1), bias = has_bias ? run.input(6) : Tensor();
    RowNormBackward of = prepared(run);
    of.bias = has_bias ? Rows(x, axis).along(bias) : nullptr;
    of.y = run.output(3, x.shape).floats();
    norm().row_backward(of, run.in_parallel());
  }
};

struct RMSNorm : LayerNorm {
  explicit RMSNorm(const Attributes& of) : LayerNorm(of, false) {}
};

struct RMSNormGrad : LayerNormGrad {
  explicit RMSNormGrad(const Attributes& of) : LayerNormGrad(of, false) {}
};

struct Groups : Kernel {
  float epsilon;
  int64_t groups;
  bool per_channel;
  explicit Groups(const Attributes& of)
      : epsilon(of.number("epsilon", 1e-5f)),
        groups(of.integer("groups", 0)),
        per_channel(of.integer("per_channel", 1) != 0) {}

  GroupNormShape shape_of(const Tensor& x) const {
    require(x.shape.size() >= 2, "normalization over channels needs a batch and channels");
    const int64_t channels = x.shape[1], count = groups == 0 ? channels : groups;
    require(count >= 0 && count <= channels && (count == 0 || channels % count == 0),
            "the groups do not divide the channels");
    int64_t plane = 1;
    for (size_t axis = 2; axis < x.shape.size(); ++axis) plane *= x.shape[axis];
    return {x.shape[0], count, count == 0 ? 0 : channels / count, plane, epsilon, per_channel};
  }
  const float* factors(const Tensor& given, const GroupNormShape& shape) const {
    const int64_t expected = per_channel ? shape.groups * shape.channels : shape.groups;
    require(given.elements == expected, "scale or bias have another size than the channels or groups");
    return given.floats();
  }
};

struct GroupNorm : Groups {
  using Groups::Groups;
  void run(Run& run) const override {
    require(run.input_count() >= 3, "GroupNorm needs 3 inputs");
    const Tensor x = run.input(0), scale = run.input(1), bias = run.input(2);
    const GroupNormShape shape = shape_of(x);
    const GroupNormForward of{x.floats(), factors(scale, shape), factors(bias, shape), run.output(0, x.shape).floats()};
    if (x.elements > 0) norm().group_forward(shape, of, run.in_parallel());
  }
};

struct GroupNormGrad : Groups {
  using Groups::Groups;
  void run(Run& run) const override {
    require(run.input_count() >= 3, "GroupNormGrad needs 3 inputs");
    const Tensor dy = run.input(0), x = run.input(1), scale = run.input(2);
    const GroupNormShape shape = shape_of(x);
    require(dy.shape == x.shape, "the gradient has another shape than the input");
    GroupNormBackward of{dy.floats(), x.floats(), factors(scale, shape), nullptr, nullptr, nullptr};
    of.dx = run.output(0, x.shape).floats();
    of.dscale = output_if_read(run, 1, scale.shape);
    of.dbias = output_if_read(run, 2, scale.shape);
    if (x.elements > 0) return norm().group_backward(shape, of, run.in_parallel());
    for (float* sums : {of.dscale, of.dbias})
      if (sums != nullptr) std::fill_n(sums, scale.elements, 0.0f);
  }
};

}  // namespace

std::vector<KernelKind> norm_kernels() {
  return {kind_of<LayerNorm>("LayerNorm", {kFloat}),     kind_of<LayerNormGrad>("LayerNormGrad", {kFloat}),
          kind_of<LayerNorm>("LayerNormOnce", {kFloat}), kind_of<LayerNormGradAgain>("LayerNormGradAgain", {kFloat}),
          kind_of<RMSNorm>("RMSNorm", {kFloat}),         kind_of<RMSNormGrad>("RMSNormGrad", {kFloat}),
          kind_of<GroupNorm>("GroupNorm", {kFloat}),     kind_of<GroupNormGrad>("GroupNormGrad", {kFloat})};
}

}  // namespace onnxtrain
