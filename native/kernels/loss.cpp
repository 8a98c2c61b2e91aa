// SoftmaxCrossEntropy(scores, labels, weight?) -> loss, statistics, total?
// SoftmaxCrossEntropyGrad(dloss, statistics, scores, labels, weight?, dtotal?) -> dscores
// SoftmaxGrad(dy, y), LogSoftmaxGrad(dy, y): along the last axis.
//
// The classes are axis 1 of the scores. Attributes: has_weight; reduction (0 none, 1 mean, 2 sum);
// has_ignored and ignored, a label that does not count; has_total: the sum of the logarithm of the
// softmax over the classes, at each label, is wanted too, as smoothed labels need it. The statistics
// of each label are the largest score and one over the sum of exp(score - largest): the gradient
// computes the softmax from them.
#include "loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "families.h"

namespace onnxtrain {
namespace {

constexpr int64_t kChunk = 16384;   // elements of scores that one call works on, if a row is not longer
constexpr int64_t kColumns = 1024;  // positions at once where the classes lie apart

enum Reduction { kNone, kMean, kSum };

// A tensor of labels, int64 or int32.
class Labels {
 public:
  explicit Labels(const Tensor& of) : wide_(of.type == kInt64), data_(of.data) {
    require(wide_ || of.type == kInt32, "the labels are not integers");
  }
  int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }

 private:
  bool wide_;
  const void* data_;
};

// The scores as (samples, classes, positions), and how labels count.
struct Problem {
  int64_t samples, classes, positions, count;
  const float* x;
  const float* weight;  // of each class, or none
  bool has_ignored;
  int64_t ignored;

  bool ignores(int64_t label) const { return has_ignored && label == ignored; }

  // What a label counts; 0 if it is ignored.
  float counts(int64_t label) const {
    if (ignores(label)) return 0.0f;
    require(label >= 0 && label < classes, "a label is not the number of a class");
    return weight == nullptr ? 1.0f : weight[label];
  }
};

// Pieces of the scores: some rows in one piece, or some columns of a sample.
struct Pieces {
  int64_t rows, columns, per_sample, count;

  explicit Pieces(const Problem& of) {
    columns = std::min(of.positions, kColumns);
    rows = of.positions == 1 ? std::max<int64_t>(1, kChunk / std::max<int64_t>(1, of.classes)) : 1;
    per_sample = of.positions == 0 ? 0 : (of.positions + columns - 1) / columns;
    count = (of.samples + rows - 1) / rows * per_sample;
  }

  // Calls work(scores, offset into them, label, number of labels) for each row or block of columns.
  template <class Work>
  void each(const Problem& of, int64_t piece, Work work) const {
    const int64_t first = piece / per_sample * rows, last = std::min(of.samples, first + rows);
    const int64_t position = piece % per_sample * columns, width = std::min(columns, of.positions - position);
    const Scores scores{of.classes, width, of.positions};
    for (int64_t sample = first; sample < last; ++sample)
      work(scores, sample * of.classes * of.positions + position, sample * of.positions + position, width);
  }
};

struct CrossEntropy : Kernel {
  bool has_weight, has_ignored, has_total;
  int64_t ignored, reduction;

  explicit CrossEntropy(const Attributes& of)
      : has_weight(of.integer("has_weight", 0) != 0),
        has_ignored(of.integer("has_ignored", 0) != 0),
        has_total(of.integer("has_total", 0) != 0),
        ignored(of.integer("ignored", 0)),
        reduction(of.integer("reduction", kMean)) {
    require(reduction >= kNone && reduction <= kSum, "the reduction is not known");
  }

  Problem problem(const Tensor& scores, const Tensor& labels, const Tensor& weight) const {
    const size_t rank = scores.shape.size();
    require(rank >= 2, "scores have at least two axes, of samples and of classes");
    Shape expected = scores.shape;
    expected.erase(expected.begin() + 1);
    require(labels.shape == expected, "labels have the shape of the scores without the classes");
    Problem made{scores.shape[0], scores.shape[1], 1, labels.elements, scores.floats(), nullptr, has_ignored, ignored};
    made.positions = elements_of(Shape(scores.shape.begin() + 2, scores.shape.end()));
    if (has_weight) {
      require(weight.elements == made.classes, "there is not one weight for each class");
      made.weight = weight.floats();
    }
    return made;
  }
};

struct SoftmaxCrossEntropy : CrossEntropy {
  using CrossEntropy::CrossEntropy;

  void run(Run& run) const override {
    require(run.input_count() >= (has_weight ? 3u : 2u), "scores or labels are missing");
    const Tensor scores = run.input(0), labels = run.input(1);
    const Problem of = problem(scores, labels, has_weight ? run.input(2) : Tensor());
    const Labels label(labels);
    Tensor saved;
    std::vector<float> own;
    if (run.output_count() > 1)
      saved = run.output(1, {2, of.count});
    else
      own.resize(2 * of.count);
    float* largest = saved.exists() ? saved.floats() : own.data();
    if (has_total) require(run.output_count() > 2, "the output of the total is missing");
    Tensor total = has_total ? run.output(2, labels.shape) : Tensor();
    if (reduction == kNone) {
      Tensor loss = run.output(0, labels.shape);
      terms(run, of, label, largest, has_total ? total.floats() : nullptr, loss.floats());
      return;
    }
    std::vector<float> each(of.count);
    terms(run, of, label, largest, has_total ? total.floats() : nullptr, each.data());
    Tensor loss = run.output(0, {});
    loss.floats()[0] = reduced(of, label, each);
  }

 private:
  void terms(const Run& run, const Problem& of, const Labels& label, float* largest, float* total, float* loss) const {
    float* inverse = largest + of.count;
    const Pieces pieces(of);
    run.parallel(pieces.count, [&](int64_t piece) {
      pieces.each(of, piece, [&](const Scores& scores, int64_t from, int64_t first, int64_t width) {
        softmax().statistics(scores, of.x + from, largest + first, inverse + first);
        if (total != nullptr) softmax().sums(scores, of.x + from, largest + first, total + first);
        for (int64_t i = 0; i < width; ++i) {
          const float counts = of.counts(label[first + i]);
          const float sum = inverse[first + i];
          if (total != nullptr) total[first + i] -= static_cast<float>(of.classes) * std::log(sum);
          inverse[first + i] = 1.0f / sum;
          const bool is_ignored = of.ignores(label[first + i]);
          const float right = is_ignored ? 0.0f : of.x[from + label[first + i] * scores.stride + i];
          loss[first + i] = is_ignored ? 0.0f : counts * (largest[first + i] - right + std::log(sum));
        }
      });
    });
  }

  float reduced(const Problem& of, const Labels& label, const std::vector<float>& each) const {
    double sum = 0.0, total = 0.0;
    for (int64_t i = 0; i < of.count; ++i) {
      sum += each[i];
      total += of.counts(label[i]);
    }
    return static_cast<float>(reduction == kSum ? sum : sum / total);
  }
};

struct SoftmaxCrossEntropyGrad : CrossEntropy {
  using CrossEntropy::CrossEntropy;

  void run(Run& run) const override {
    const size_t known = 4 + (has_weight ? 1 : 0);
    require(run.input_count() >= known + (has_total ? 1 : 0), "the gradient of a cross entropy needs more inputs");
    const Tensor dloss = run.input(0), saved = run.input(1), scores = run.input(2), labels = run.input(3);
    const Problem of = problem(scores, labels, has_weight ? run.input(4) : Tensor());
    const Labels label(labels);
    require(saved.elements == 2 * of.count, "what the cross entropy saved has another size");
    require(dloss.elements == (reduction == kNone ? of.count : 1),
            "the gradient of the loss has another size than the loss");
    const float* largest = saved.floats();
    const std::vector<float> factor = factors(of, label, dloss.floats());
    const Tensor dtotal = has_total ? run.input(known) : Tensor();
    require(!has_total || dtotal.elements == of.count, "the gradient of the total has another size than the labels");
    const std::vector<float> nothing(has_total ? 0 : of.count);
    const float* offset = has_total ? dtotal.floats() : nothing.data();
    Tensor dscores = run.output(0, scores.shape);
    float* dx = dscores.floats();
    const Pieces pieces(of);
    run.parallel(pieces.count, [&](int64_t piece) {
      pieces.each(of, piece, [&](const Scores& part, int64_t from, int64_t first, int64_t width) {
        gradient(of, part, label, first, width, largest, factor.data(), offset, of.x + from, dx + from);
      });
    });
  }

 private:
  // The derivative of the loss by the term of each label.
  std::vector<float> factors(const Problem& of, const Labels& label, const float* dloss) const {
    std::vector<float> made(of.count);
    double total = 0.0;
    for (int64_t i = 0; i < of.count; ++i) total += made[i] = of.counts(label[i]);
    const float all = reduction == kNone || of.count == 0 ? 1.0f : dloss[0];
    const float shared = reduction == kMean && total != 0.0 ? static_cast<float>(all / total) : all;
    for (int64_t i = 0; i < of.count; ++i) made[i] *= reduction == kNone ? dloss[i] : shared;
    return made;
  }

  // With a, the factor of a term, and b, that of the total: dx = softmax · (a - b · classes) + b, less a
  // at the label.
  static void gradient(const Problem& of, const Scores& part, const Labels& label, int64_t first, int64_t width,
                       const float* largest, const float* factor, const float* offset, const float* x, float* dx) {
    const float* inverse = largest + of.count + first;
    factor += first;
    offset += first;
    const auto is_zero = [](float each) { return each == 0.0f; };
    // As those of ignored labels are.
    if (std::all_of(factor, factor + width, is_zero) && std::all_of(offset, offset + width, is_zero)) {
      for (int64_t c = 0; c < part.classes; ++c) std::fill_n(dx + c * part.stride, width, 0.0f);
      return;
    }
    float scale[kColumns] = {};
    for (int64_t i = 0; i < width; ++i)
      scale[i] = (factor[i] - offset[i] * static_cast<float>(part.classes)) * inverse[i];
    softmax().scaled(part, x, largest + first, scale, offset, dx);
    // The factor of an ignored label is not zero but NaN where the gradient of the loss is not finite.
    for (int64_t i = 0; i < width; ++i)
      if (!of.ignores(label[first + i])) dx[label[first + i] * part.stride + i] -= factor[i];
  }
};

template <void (*Softmax::*of_row)(const float*, const float*, float*, int64_t)>
struct RowGradient : Kernel {
  explicit RowGradient(const Attributes&) {}
  void run(Run& run) const override {
    require(run.input_count() >= 2, "the gradient of a softmax needs two inputs");
    const Tensor dy = run.input(0), y = run.input(1);
    require(!dy.shape.empty() && dy.shape == y.shape, "the gradient has another shape than the softmax");
    const float *from = dy.floats(), *other = y.floats();
    Tensor dx = run.output(0, dy.shape);
    if (dx.elements == 0) return;
    float* to = dx.floats();
    const int64_t classes = dy.shape.back(), rows = dy.elements / classes;
    const int64_t some = std::max<int64_t>(1, kChunk / classes);
    run.parallel((rows + some - 1) / some, [&](int64_t chunk) {
      for (int64_t row = chunk * some; row < std::min(rows, (chunk + 1) * some); ++row)
        (softmax().*of_row)(from + row * classes, other + row * classes, to + row * classes, classes);
    });
  }
};

}  // namespace

std::vector<KernelKind> loss_kernels() {
  return {
      kind_of<SoftmaxCrossEntropy>("SoftmaxCrossEntropy", {kFloat}),
      kind_of<SoftmaxCrossEntropyGrad>("SoftmaxCrossEntropyGrad", {kFloat}),
      kind_of<RowGradient<&Softmax::softmax_grad>>("SoftmaxGrad", {kFloat}, true),
      kind_of<RowGradient<&Softmax::log_softmax_grad>>("LogSoftmaxGrad", {kFloat}, true),
  };
}

}  // namespace onnxtrain
