// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "convolution.h"
#include "product.h"

namespace onnxtrain::ONNXTRAIN_ISA {

void product(const Product& of, const Parallel& parallel) {
  multiply(MatrixRows{of.a, of.a_row, of.a_depth}, MatrixColumns{of.b, of.b_column, of.b_depth},
           MatrixStore{of.c, of.c_row}, of.rows, of.columns, of.depth, of.add, parallel, of.bf16 && has_bf16());
}

const Compute kCompute = {product, convolve, convolve_weight_gradient, convolve_input_gradient};

}  // namespace onnxtrain::ONNXTRAIN_ISA
