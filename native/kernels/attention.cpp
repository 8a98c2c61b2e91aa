// Attention forward and backward: what tensors mean, and that they fit together.
#include "attention.h"

#include <cmath>
#include <limits>

#include "families.h"

namespace onnxtrain {
namespace {

// Which axis of a tensor is the batch, the heads, the rows and the elements of a row; -1 where there
// is none, which is one of size 1.
struct Axes {
  int64_t of[4];

  static Axes read(const Attributes& from, const char* name) {
    const std::vector<int64_t> given = from.integers(name);
    if (given.empty()) return {{0, 1, 2, 3}};
    require(given.size() == 4, "an attribute of axes has another number than four");
    for (const int64_t axis : given) require(axis >= -1 && axis < 4, "an axis of attention is not from -1 to 3");
    return {{given[0], given[1], given[2], given[3]}};
  }

  void check(const Tensor& tensor, bool in_rows) const {
    const int64_t rank = static_cast<int64_t>(tensor.shape.size());
    int64_t seen = 0;
    for (const int64_t axis : of)
      if (axis >= 0) {
        require((seen >> axis & 1) == 0, "an axis of attention is named twice");
        seen |= int64_t{1} << axis;
      }
    require(rank <= 4 && seen == (int64_t{1} << rank) - 1, "the axes of attention are not those of its tensors");
    require(!in_rows || of[3] == rank - 1, "the elements of a row of attention do not lie side by side");
  }

  int64_t size(const Tensor& tensor, int which) const { return of[which] < 0 ? 1 : tensor.shape[of[which]]; }

  int64_t stride(const Tensor& tensor, int which) const {
    int64_t product = 1;
    for (size_t axis = tensor.shape.size(); of[which] >= 0 && static_cast<int64_t>(--axis) > of[which];)
      product *= tensor.shape[axis];
    return product;
  }

  template <class T>
  Heads<T> view(const Tensor& tensor, T* data) const {
    return {data, stride(tensor, 0), stride(tensor, 1), stride(tensor, 2), stride(tensor, 3)};
  }

  Shape shape(const int64_t (&sizes)[4]) const {
    Shape made;
    for (int which = 0; which < 4; ++which)
      if (of[which] >= static_cast<int64_t>(made.size())) made.resize(of[which] + 1);
    for (int which = 0; which < 4; ++which)
      if (of[which] >= 0)
        made[of[which]] = sizes[which];
      else
        require(sizes[which] == 1, "an axis of attention that the result lacks is longer than 1");
    return made;
  }
};

// What forward and backward have in common.
struct AttentionKernel : Kernel {
  float scale, hidden;
  bool masked, flags_hide, blind_are_zero, bf16;
  std::vector<int64_t> divides;  // for each further input, whether it divides the scale or multiplies it
  Axes q_axes, k_axes, v_axes, o_axes;

  explicit AttentionKernel(const Attributes& of)
      : scale(of.number("scale", 1)),
        hidden(of.number("hidden", -std::numeric_limits<float>::infinity())),
        masked(of.integer("has_mask", 0) != 0),
        flags_hide(of.integer("mask_hides", 0) != 0),
        blind_are_zero(of.integer("blind_are_zero", 0) != 0),
        bf16(of.integer("bf16", 0) != 0),
        divides(of.integers("divides")),
        q_axes(Axes::read(of, "q_axes")),
        k_axes(Axes::read(of, "k_axes")),
        v_axes(Axes::read(of, "v_axes")),
        o_axes(Axes::read(of, "o_axes")) {}

  // `next` is the first input behind those of the kernel: the mask, and factors of the scale.
  Attention read(const Run& run, const Tensor& q, const Tensor& k, const Tensor& v, size_t next) const {
    q_axes.check(q, true);
    k_axes.check(k, false);
    v_axes.check(v, false);
    Attention made{};
    made.batch = q_axes.size(q, 0);
    made.heads = q_axes.size(q, 1);
    made.key_heads = k_axes.size(k, 1);
    made.queries = q_axes.size(q, 2);
    made.keys = k_axes.size(k, 2);
    made.size = q_axes.size(q, 3);
    made.value_size = v_axes.size(v, 3);
    made.blind_are_zero = blind_are_zero;
    made.bf16 = bf16 && attention().has_bf16();
    require(k_axes.size(k, 0) == made.batch && v_axes.size(v, 0) == made.batch,
            "queries, keys and values differ in their batch");
    require(v_axes.size(v, 1) == made.key_heads, "keys and values differ in their heads");
    require(v_axes.size(v, 2) == made.keys, "there are not as many values as keys");
    require(k_axes.size(k, 3) == made.size, "queries and keys differ in their size");
    require(made.key_heads > 0 ? made.heads % made.key_heads == 0 : made.heads == 0,
            "the heads of queries are no multiple of those of keys");
    made.q = q_axes.view(q, q.floats());
    made.k = k_axes.view(k, k.floats());
    made.v = v_axes.view(v, v.floats());
    if (masked) read_mask(run.input(next++), static_cast<int64_t>(q.shape.size()), made);
    made.scale = scale;
    for (const int64_t divide : divides) {
      const Tensor factor = run.input(next++);
      require(factor.exists() && factor.elements == 1, "a factor of the scale of attention is not one number");
      made.scale = divide != 0 ? made.scale / *factor.floats() : made.scale * *factor.floats();
    }
    return made;
  }

  // A mask is broadcast to the scores, whose axes are those of the queries, in order.
  void read_mask(const Tensor& mask, int64_t rank, Attention& of) const {
    require(mask.exists(), "the mask is missing");
    const int64_t sizes[4] = {of.batch, of.heads, of.queries, of.keys};
    int64_t* strides[4] = {&of.mask.batch_stride, &of.mask.head_stride, &of.mask.query_stride, &of.mask.key_stride};
    int64_t stride = 1;
    for (int64_t axis = static_cast<int64_t>(mask.shape.size()); axis-- > 0;) {
      const int64_t size = mask.shape[axis], from_last = static_cast<int64_t>(mask.shape.size()) - axis;
      int which = from_last <= 2 ? 4 - static_cast<int>(from_last) : -1;
      if (from_last == 3) which = rank == 3 && q_axes.of[1] < 0 ? 0 : 1;
      if (from_last == 4) which = 0;
      require(size == 1 || (from_last <= rank && which >= 0 && size == sizes[which]),
              "the mask does not fit the scores");
      if (size != 1) *strides[which] = stride;
      stride *= size;
    }
    if (mask.type == kBool)
      of.mask.flags = static_cast<const uint8_t*>(mask.data);
    else
      of.mask.added = mask.floats();
    of.mask.flags_hide = flags_hide;
    of.mask.hidden = hidden;
    // An empty mask has no address; it is of no score.
    static const uint8_t none = 0;
    if (mask.elements == 0 && mask.type == kBool) of.mask.flags = &none;
  }

  // Largest scores and one over sums of exponentials: what a row needs to compute its probabilities again.
  static RowStatistics rows(const Attention& of, float* data) {
    return {data, data + of.batch * of.heads * of.queries};
  }
};

// (q, k, v, mask, factors of the scale) → (o, statistics of the rows).
//
// Attributes: the constant part of the scale, and `divides` for its other factors; has_mask; for a mask
// of flags, `mask_hides` where true hides, and `hidden`, the score of what is hidden; blind_are_zero;
// the axes of q, k, v and o.
struct AttentionForward : AttentionKernel {
  using AttentionKernel::AttentionKernel;

  void run(Run& run) const override {
    const Tensor q = run.input(0), k = run.input(1), v = run.input(2);
    const Attention of = read(run, q, k, v, 3);
    Tensor o = run.output(0, o_axes.shape({of.batch, of.heads, of.queries, of.value_size}));
    o_axes.check(o, true);
    Tensor kept = run.output(1, {2, of.batch, of.heads, of.queries});
    // What only the plain form of the backward pass reads.
    for (size_t unused = 2; unused < run.output_count(); ++unused) run.output(unused, {0});
    if (kept.elements > 0)
      attention().forward(of, o_axes.view(o, o.floats()), rows(of, kept.floats()), run.in_parallel());
  }
};

// (do, q, k, v, o, statistics of the rows, mask, factors of the scale) → (dq, dk, dv). Further attribute:
// zeros_stay, if a row of zeros in do shall have no gradients even if its output is not finite.
struct AttentionBackward : AttentionKernel {
  bool zeros_stay;

  explicit AttentionBackward(const Attributes& of)
      : AttentionKernel(of), zeros_stay(of.integer("zeros_stay", 0) != 0) {}

  void run(Run& run) const override {
    const Tensor d_o = run.input(0), q = run.input(1), k = run.input(2), v = run.input(3), o = run.input(4),
                 kept = run.input(5);
    const Attention of = read(run, q, k, v, 6);
    const Shape expected = o_axes.shape({of.batch, of.heads, of.queries, of.value_size});
    require(o.shape == expected && d_o.shape == expected,
            "the output of attention and its gradient have other shapes than they should");
    o_axes.check(o, true);
    require(kept.shape == Shape{2, of.batch, of.heads, of.queries},
            "what attention has kept has another shape than it should");
    Tensor d_q = run.output(0, q.shape), d_k = run.output(1, k.shape), d_v = run.output(2, v.shape);
    if (of.batch == 0 || of.key_heads == 0) return;
    const AttentionGradients gradients{zeros_stay,
                                       o_axes.view(o, o.floats()),
                                       o_axes.view(d_o, d_o.floats()),
                                       q_axes.view(d_q, d_q.floats()),
                                       k_axes.view(d_k, d_k.floats()),
                                       v_axes.view(d_v, d_v.floats())};
    attention().backward(of, gradients, rows(of, const_cast<float*>(kept.floats())), run.in_parallel());
  }
};

}  // namespace

std::vector<KernelKind> attention_kernels() {
  return {kind_of<AttentionForward>("Attention", {kFloat}),
          kind_of<AttentionForward>("AttentionOrZero", {kFloat, kFloat, kBool, kFloat}),
          kind_of<AttentionBackward>("AttentionGrad", {kFloat})};
}

}  // namespace onnxtrain
