// Products of matrices: linear layers and their gradients.
#include "compute.h"
#include "families.h"

namespace onnxtrain {
namespace {

// (a, b) or, with has_bias, (a, b, bias) → a' · b' + bias, where ' transposes if transA or transB says so.
// The bias is one row; `a` may have axes before its rows, and then the result has them too. With bf16, factors are
// rounded to bfloat16 where the processor multiplies such.
struct MatMul : Kernel {
  bool trans_a, trans_b, has_bias, bf16;

  explicit MatMul(const Attributes& of)
      : trans_a(of.integer("transA", 0) != 0),
        trans_b(of.integer("transB", 0) != 0),
        has_bias(of.integer("has_bias", 0) != 0),
        bf16(of.integer("bf16", 0) != 0) {}

  void run(Run& run) const override {
    const Tensor a = run.input(0), b = run.input(1), bias = has_bias ? run.input(2) : Tensor{};
    require(a.shape.size() >= 2 && b.shape.size() == 2 && (a.shape.size() == 2 || !trans_a),
            "a product has other factors than matrices");
    const int64_t depth = trans_a ? a.shape[0] : a.shape.back(), columns = b.shape[!trans_b];
    Shape shape(a.shape.begin(), a.shape.end() - 1);
    if (trans_a) shape = {a.shape[1]};
    const int64_t rows = elements_of(shape);
    shape.push_back(columns);
    require(b.shape[trans_b] == depth, "the factors of a product do not fit together");
    require(!has_bias || (bias.shape.size() == 1 && bias.elements == columns), "the bias does not fit the product");
    Tensor c = run.output(0, shape);
    if (c.elements == 0) return;
    const Product product{rows,
                          columns,
                          depth,
                          a.floats(),
                          trans_a ? 1 : depth,
                          trans_a ? rows : 1,
                          b.floats(),
                          trans_b ? 1 : columns,
                          trans_b ? depth : 1,
                          c.floats(),
                          columns,
                          has_bias ? bias.floats() : nullptr,
                          bf16};
    compute().product(product, run.in_parallel());
  }
};

}  // namespace

std::vector<KernelKind> matmul_kernels() { return {kind_of<MatMul>("MatMul", {kFloat})}; }

}  // namespace onnxtrain
