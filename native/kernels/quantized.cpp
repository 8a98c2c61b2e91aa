// QuantizedProductGrad(dy, bytes, scales, zero points): dy · W, the gradient of a product with Wᵀ, where W has N rows
// and K columns of small integers; see quantized.h. Zero points are bytes, one for each scale, or floats.
#include "quantized.h"

#include "families.h"

namespace onnxtrain {
namespace {

struct QuantizedProductGrad : Kernel {
  int64_t rows, columns, block, bits;

  explicit QuantizedProductGrad(const Attributes& of)
      : rows(of.integer("N", 0)),
        columns(of.integer("K", 0)),
        block(of.integer("block_size", 0)),
        bits(of.integer("bits", 0)) {}

  void run(Run& run) const override {
    constexpr int64_t kMost = int64_t{1} << 30;
    require(run.input_count() >= 4, "the weights of a quantized product are missing");
    require(bits == 2 || bits == 4 || bits == 8, "a quantized product has numbers of 2, 4 or 8 bits");
    require(rows > 0 && rows < kMost && columns > 0 && columns < kMost && block > 0 && block < kMost && block % 16 == 0,
            "the sizes of a quantized product do not fit together");
    const Tensor dy = run.input(0), bytes = run.input(1), scales = run.input(2), zeros = run.input(3);
    const int64_t blocks = (columns + block - 1) / block;
    require(!dy.shape.empty() && dy.shape.back() == rows, "the gradient does not have one column for each row of weights");
    require(bytes.type == kUint8 && bytes.elements == rows * (blocks * block * bits / 8),
            "the bytes of a quantized product do not fit its sizes");
    require(scales.elements == rows * blocks && zeros.elements == rows * blocks,
            "a quantized product does not have one scale and zero point for each block");
    require(zeros.type == kUint8 || zeros.type == kFloat, "zero points are bytes or floats");
    Shape shape(dy.shape.begin(), dy.shape.end() - 1);
    const int64_t count = elements_of(shape);
    shape.push_back(columns);
    Tensor dx = run.output(0, shape);
    if (dx.elements == 0) return;
    const bool whole = zeros.type == kUint8;
    const QuantizedMatrix weights{rows,
                                  columns,
                                  block,
                                  bits,
                                  static_cast<const uint8_t*>(bytes.data),
                                  scales.floats(),
                                  whole ? static_cast<const uint8_t*>(zeros.data) : nullptr,
                                  whole ? nullptr : zeros.floats()};
    quantized().product(dy.floats(), count, weights, dx.floats(), run.in_parallel());
  }
};

}  // namespace

std::vector<KernelKind> quantized_kernels() {
  return {kind_of<QuantizedProductGrad>("QuantizedProductGrad", {kFloat})};
}

}  // namespace onnxtrain
