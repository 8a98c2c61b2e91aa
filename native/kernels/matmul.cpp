// Products of matrices: linear layers and their gradients.
#include <algorithm>

#include "compute.h"
#include "families.h"

namespace onnxtrain {
namespace {

// (a, b) or (a, b, bias) → a' · b' + bias, where ' transposes if transA or transB says so. `a` may have
// axes before its rows, and so has the result; the bias, with has_bias, is one row.
struct MatMul : Kernel {
  bool trans_a, trans_b, has_bias;

  explicit MatMul(const Attributes& of)
      : trans_a(of.integer("transA", 0) != 0), trans_b(of.integer("transB", 0) != 0), has_bias(of.integer("has_bias", 0) != 0) {}

  void run(Run& run) const override {
    const Tensor a = run.input(0), b = run.input(1), bias = has_bias ? run.input(2) : Tensor{};
    require(a.shape.size() == 2 && b.shape.size() == 2, "a product has other factors than matrices");
    const int64_t rows = a.shape[trans_a], depth = a.shape[!trans_a], columns = b.shape[!trans_b];
    require(b.shape[trans_b] == depth, "the factors of a product do not fit together");
    require(!has_bias || (bias.shape.size() == 1 && bias.elements == columns), "the bias does not fit the product");
    Tensor c = run.output(0, {rows, columns});
    if (c.elements == 0) return;
    if (has_bias) repeat(bias.floats(), rows, columns, c.floats(), run);
    const Product product{rows, columns, depth,
                          a.floats(), trans_a ? 1 : depth, trans_a ? rows : 1,
                          b.floats(), trans_b ? 1 : columns, trans_b ? depth : 1,
                          c.floats(), columns, has_bias};
    compute().product(product, run.in_parallel());
  }

  static void repeat(const float* row, int64_t rows, int64_t columns, float* to, const Run& run) {
    constexpr int64_t kRows = 64;
    run.parallel((rows + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t i = task * kRows; i < std::min(rows, (task + 1) * kRows); ++i) std::copy_n(row, columns, to + i * columns);
    });
  }
};

}  // namespace

std::vector<KernelKind> matmul_kernels() { return {kind_of<MatMul>("MatMul", {kFloat})}; }

}  // namespace onnxtrain
