// Products whose factors are rounded to bfloat16; sums and results are float32.
#pragma once

#include "compute.h"

namespace onnxtrain {

struct RoundedProduct {
  // Whether the instruction set may have it; the processor is asked too.
  bool exists;
  void (*multiply)(const Product&, const Parallel&);
};

ONNXTRAIN_TABLE(RoundedProduct, kRoundedProduct, rounded_product)

// Whether this processor multiplies bfloat16.
bool multiplies_bfloat16();

}  // namespace onnxtrain
