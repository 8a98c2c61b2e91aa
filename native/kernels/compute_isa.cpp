// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "convolution.h"
#include "product.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

template <class PackA>
void multiply_matrices(const PackA& a, const Product& of, const Parallel& parallel) {
  const MatrixColumns b{of.b, of.b_column, of.b_depth};
  const bool rounded = of.bf16 && has_bf16();
  // Gradients of weights: sums over all samples, of which each task takes some.
  const bool deep = of.depth >= 1024 && of.depth >= 2 * std::max(of.rows, of.columns);
  if (deep && of.bias == nullptr && of.c_row == of.columns)
    return multiply_deep(a, b, of.c, of.rows, of.columns, of.depth, parallel, rounded);
  multiply(a, b, MatrixStore{of.c, of.c_row, of.bias}, of.rows, of.columns, of.depth, false, parallel, rounded);
}

}  // namespace

void product(const Product& of, const Parallel& parallel) {
  const bool in_tiles = of.bf16 && has_amx();  // which hold rows
  if (of.a_row == 1 && of.a_depth != 1 && !in_tiles)
    multiply_matrices(MatrixLines{of.a, of.a_depth}, of, parallel);
  else
    multiply_matrices(MatrixRows{of.a, of.a_row, of.a_depth}, of, parallel);
}

const Compute kCompute = {product, convolve, convolve_weight_gradient, convolve_input_gradient};

}  // namespace onnxtrain::ONNXTRAIN_ISA
