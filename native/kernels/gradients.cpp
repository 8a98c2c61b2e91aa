// What happens to all gradients of a step at once: they are summed, which tells whether they are
// finite, or added to what was accumulated.
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

// GradientSums(gradients, loss?, statistics): `gradients` and `statistics` are their numbers,
// has_loss is 1 where there is a loss, and `squares` is 1 to sum the squares of gradients. Outputs:
// the sum of each gradient, with the loss and one sum of all statistics behind; whether all of these
// are finite; and, where that is asked for, the sums of the gradients alone.
struct GradientSums : Kernel {
  int64_t gradients, statistics;
  bool has_loss, squares;

  explicit GradientSums(const Attributes& of)
      : gradients(of.integer("gradients", 0)),
        statistics(of.integer("statistics", 0)),
        has_loss(of.integer("has_loss", 0) != 0),
        squares(of.integer("squares", 0) != 0) {}

  void run(Run& run) const override {
    require(gradients >= 0 && statistics >= 0, "the number of tensors is negative");
    const int64_t given = static_cast<int64_t>(run.input_count());
    require(gradients <= given && statistics <= given - gradients - has_loss, "there are fewer inputs than tensors");
    std::vector<float> found;
    for (const double sum : sums_of(tensors(run, 0, gradients), squares, run)) found.push_back(static_cast<float>(sum));
    if (has_loss) {
      const Tensor loss = run.input(gradients);
      require(loss.elements == 1, "the loss is not a single number");
      found.push_back(*loss.floats());
    }
    if (statistics > 0) {
      double total = 0;
      for (const double sum : sums_of(tensors(run, gradients + has_loss, statistics), false, run)) total += sum;
      found.push_back(static_cast<float>(total));
    }
    const bool are_finite = std::all_of(found.begin(), found.end(), [](float sum) { return std::isfinite(sum); });
    put(run, 0, found, static_cast<int64_t>(found.size()));
    Tensor passed = run.output(1, {1});
    require(passed.type == kBool, "the second output is a flag");
    *static_cast<uint8_t*>(passed.data) = are_finite;
    if (run.output_count() > 2) put(run, 2, found, gradients);
  }

 private:
  static Floats tensors(const Run& run, int64_t first, int64_t count) {
    Floats made;
    for (int64_t index = first; index < first + count; ++index) made.add(run.input(index));
    return made;
  }

  static void put(Run& run, size_t index, const std::vector<float>& values, int64_t count) {
    Tensor made = run.output(index, {count});
    std::copy(values.begin(), values.begin() + count, made.floats());
  }
};

// AccumulateGradients(reset, then for each of `gradients` tensors what was accumulated and the
// gradient): each output is their sum, or, where reset is true, the gradient. It may be the memory
// of either.
struct AccumulateGradients : Kernel {
  int64_t gradients;

  explicit AccumulateGradients(const Attributes& of) : gradients(of.integer("gradients", 0)) {}

  void run(Run& run) const override {
    const int64_t inputs = static_cast<int64_t>(run.input_count()), outputs = static_cast<int64_t>(run.output_count());
    require(gradients >= 0 && gradients <= inputs / 2 && 1 + 2 * gradients <= inputs && gradients <= outputs, "there are fewer inputs or outputs than tensors");
    const Tensor reset = run.input(0);
    require(reset.type == kBool && reset.elements == 1, "reset is a single flag");
    const bool overwrite = *static_cast<const uint8_t*>(reset.data) != 0;
    Floats before, added;
    std::vector<float*> totals;
    for (int64_t index = 0; index < gradients; ++index) {
      const Tensor old = run.input(1 + 2 * index), gradient = run.input(2 + 2 * index);
      require(old.elements == gradient.elements, "a gradient has another size than what it is added to");
      before.add(old);
      added.add(gradient);
      totals.push_back(run.output(index, gradient.shape).floats());
      for (const float* in : {old.floats(), gradient.floats()})
        require(!overlap_in_part(totals.back(), in, old.elements), "an output overlaps a part of an input");
    }
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
  return {kind_of<GradientSums>("GradientSums", {kFloat, kBool, kFloat}), kind_of<AccumulateGradients>("AccumulateGradients", {kFloat})};
}

}  // namespace onnxtrain
