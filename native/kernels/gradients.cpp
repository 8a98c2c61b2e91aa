// What happens to the gradients of a step: they are summed, which tells whether they are finite, and
// added to what was accumulated.
#include <cmath>
#include <cstring>

#include "families.h"
#include "optimizers.h"
#include "tensor_list.h"

namespace onnxtrain {
namespace {

// Several tensors of floats.
struct Floats {
  std::vector<const float*> data;
  TensorList list;

  void add(const Tensor& tensor) {
    data.push_back(tensor.floats());
    list.add(tensor.elements);
  }
};

// The sum of each tensor, the same with any number of threads.
std::vector<double> sums_of(const Floats& of, bool squares, const Run& run) {
  const auto sum = squares ? optimizers().sum_of_squares : optimizers().sum;
  struct Part {
    size_t tensor;
    double sum;
  };
  std::vector<std::vector<Part>> parts(of.list.pieces());
  run.parallel(of.list.pieces(), [&](int64_t piece) {
    of.list.in_piece(piece, [&](size_t tensor, int64_t begin, int64_t count) {
      parts[piece].push_back({tensor, sum(of.data[tensor] + begin, count)});
    });
  });
  std::vector<double> sums(of.data.size());
  for (const auto& in_piece : parts)
    for (const Part& part : in_piece) sums[part.tensor] += part.sum;
  return sums;
}

// GradientSum(gradient): the sum of all elements, or of their squares where `squares` is 1, as a
// vector of one. It is one call for each gradient: a single one for all would let onnxruntime
// compute the gradient of the first layer first, and keep what the others are computed from.
struct GradientSum : Kernel {
  bool squares;

  explicit GradientSum(const Attributes& of) : squares(of.integer("squares", 0) != 0) {}

  void run(Run& run) const override {
    require(run.input_count() >= 1, "there is no gradient");
    Floats gradient;
    gradient.add(run.input(0));
    Tensor made = run.output(0, {1});
    *made.floats() = static_cast<float>(sums_of(gradient, squares, run)[0]);
  }
};

// ProductBound(a, b): a bound of the elements of a product of both, as a vector of one: 64 times the product of
// their norms, or the square of that product where `squares` is 1. See late_gradients.py.
struct ProductBound : Kernel {
  static constexpr double kGrowth = 64;
  bool squares;

  explicit ProductBound(const Attributes& of) : squares(of.integer("squares", 0) != 0) {}

  void run(Run& run) const override {
    require(run.input_count() >= 2, "there are fewer than two factors");
    Floats factors;
    for (const int index : {0, 1}) factors.add(run.input(index));
    const std::vector<double> sums = sums_of(factors, true, run);
    // Each sum has to be a float, as where plain operators compute it.
    const double a = static_cast<float>(sums[0]), b = static_cast<float>(sums[1]);
    Tensor made = run.output(0, {1});
    *made.floats() = static_cast<float>(squares ? a * b : kGrowth * std::sqrt(a) * std::sqrt(b));
  }
};

// SumsOfGradients(gradients, so many as the attribute `gradients` says): the same of several, as a vector.
struct SumsOfGradients : Kernel {
  int64_t gradients;
  bool squares;

  explicit SumsOfGradients(const Attributes& of)
      : gradients(of.integer("gradients", 0)), squares(of.integer("squares", 0) != 0) {}

  void run(Run& run) const override {
    require(gradients >= 0 && gradients <= static_cast<int64_t>(run.input_count()), "there are fewer inputs than tensors");
    Floats tensors;
    for (int64_t index = 0; index < gradients; ++index) tensors.add(run.input(index));
    const std::vector<double> sums = sums_of(tensors, squares, run);
    float* made = run.output(0, {gradients}).floats();
    for (int64_t index = 0; index < gradients; ++index) made[index] = static_cast<float>(sums[index]);
  }
};

// FiniteCheck(sums, loss?, statistics): `sums` and `statistics` are their numbers, has_loss is 1
// where there is a loss. Outputs: the sums of gradients, with the loss and one sum of all statistics
// behind; whether all of these are finite; and, where that is asked for, the sums alone.
// FiniteSums is the same for sums that are vectors, `vectors` of them, whose numbers `order` puts in order.
struct FiniteCheck : Kernel {
  int64_t vectors, statistics;
  bool has_loss, are_single;
  std::vector<int64_t> order;

  explicit FiniteCheck(const Attributes& of, bool single = true)
      : vectors(of.integer(single ? "sums" : "vectors", 0)),
        statistics(of.integer("statistics", 0)),
        has_loss(of.integer("has_loss", 0) != 0),
        are_single(single) {
    if (!single) order = of.integers("order");
  }

  void run(Run& run) const override {
    require(vectors >= 0 && statistics >= 0, "the number of tensors is negative");
    const int64_t given = static_cast<int64_t>(run.input_count());
    require(vectors <= given && statistics <= given - vectors - has_loss, "there are fewer inputs than tensors");
    std::vector<float> found;
    for (int64_t index = 0; index < vectors; ++index) {
      const Tensor some = run.input(index);
      require(!are_single || some.elements == 1, "a sum or the loss is not a single number");
      found.insert(found.end(), some.floats(), some.floats() + some.elements);
    }
    if (!are_single) found = in_order(found);
    const int64_t sums = static_cast<int64_t>(found.size());
    if (has_loss) {
      const Tensor loss = run.input(vectors);
      require(loss.elements == 1, "a sum or the loss is not a single number");
      found.push_back(*loss.floats());
    }
    if (statistics > 0) {
      Floats tensors;
      for (int64_t index = 0; index < statistics; ++index) tensors.add(run.input(vectors + has_loss + index));
      double total = 0;
      for (const double sum : sums_of(tensors, false, run)) total += sum;
      found.push_back(static_cast<float>(total));
    }
    const bool are_finite = std::all_of(found.begin(), found.end(), [](float sum) { return std::isfinite(sum); });
    put(run, 0, found, static_cast<int64_t>(found.size()));
    Tensor passed = run.output(1, {1});
    require(passed.type == kBool, "the second output is a flag");
    *static_cast<uint8_t*>(passed.data) = are_finite;
    if (run.output_count() > 2) put(run, 2, found, sums);
  }

 private:
  std::vector<float> in_order(const std::vector<float>& given) const {
    require(order.size() == given.size(), "the order has another length than there are sums");
    std::vector<float> found;
    for (const int64_t place : order) {
      require(place >= 0 && place < static_cast<int64_t>(given.size()), "the order names a sum that is not there");
      found.push_back(given[place]);
    }
    return found;
  }
  static void put(Run& run, size_t index, const std::vector<float>& values, int64_t count) {
    Tensor made = run.output(index, {count});
    std::copy(values.begin(), values.begin() + count, made.floats());
  }
};

struct FiniteSums : FiniteCheck {
  explicit FiniteSums(const Attributes& of) : FiniteCheck(of, false) {}
};

// AccumulateGradients(reset, then for each of `gradients` tensors what was accumulated and the
// gradient): each output is their sum, or, where reset is true, the gradient. It may be the memory
// of either.
struct AccumulateGradients : Kernel {
  int64_t gradients;

  explicit AccumulateGradients(const Attributes& of) : gradients(of.integer("gradients", 0)) {}

  bool checks_sharing() const override { return true; }
  void run(Run& run) const override {
    const int64_t inputs = static_cast<int64_t>(run.input_count()), outputs = static_cast<int64_t>(run.output_count());
    require(gradients >= 0 && gradients <= inputs / 2 && 1 + 2 * gradients <= inputs && gradients <= outputs,
            "there are fewer inputs or outputs than tensors");
    const Tensor reset = run.input(0);
    require(reset.type == kBool && reset.elements == 1, "reset is a single flag");
    const bool overwrite = *static_cast<const uint8_t*>(reset.data) != 0;
    Floats before, added;
    std::vector<float*> totals;
    Ranges ranges;
    for (int64_t index = 0; index < gradients; ++index) {
      const Tensor old = run.input(1 + 2 * index), gradient = run.input(2 + 2 * index);
      require(old.elements == gradient.elements, "a gradient has another size than what it is added to");
      before.add(old);
      added.add(gradient);
      totals.push_back(run.output(index, gradient.shape).floats());
      ranges.add({old.floats(), gradient.floats()}, {totals.back()}, old.elements);
    }
    ranges.require_apart();
    run.parallel(added.list.pieces(), [&](int64_t piece) {
      added.list.in_piece(piece, [&](size_t tensor, int64_t begin, int64_t count) {
        const float* gradient = added.data[tensor] + begin;
        float* total = totals[tensor] + begin;
        if (!overwrite)
          optimizers().add(before.data[tensor] + begin, gradient, total, count);
        else if (total != gradient)
          std::memcpy(total, gradient, count * sizeof(float));
      });
    });
  }
};

}  // namespace

std::vector<KernelKind> gradient_kernels() {
  return {
      kind_of<GradientSum>("GradientSum", {kFloat}),
      kind_of<ProductBound>("ProductBound", {kFloat}),
      kind_of<SumsOfGradients>("SumsOfGradients", {kFloat}),
      kind_of<FiniteCheck>("FiniteCheck", {kFloat, kBool, kFloat}),
      kind_of<FiniteSums>("FiniteSums", {kFloat, kBool, kFloat}),
      kind_of<AccumulateGradients>("AccumulateGradients", {kFloat}),
  };
}

}  // namespace onnxtrain
