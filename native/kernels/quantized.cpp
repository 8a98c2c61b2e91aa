// NBitsProduct(x, bytes, scales[, zero points]): x · Wᵀ, where W has N rows and K columns of small integers; see
// quantized.h. It is onnxruntime's MatMulNBits, which keeps a second copy of the weights in an order of its own. Zero
// points are packed like the weights, or floats, and half of the range where there are none.
//
// QuantizedProductGrad(dy, bytes, scales, zero points): dy · W, its gradient. Zero points are bytes, one for each
// scale, or floats.
#include "quantized.h"

#include <vector>

#include "families.h"

namespace onnxtrain {
namespace {

struct QuantizedKernel : Kernel {
  int64_t rows, columns, block, bits;

  explicit QuantizedKernel(const Attributes& of)
      : rows(of.integer("N", 0)),
        columns(of.integer("K", 0)),
        block(of.integer("block_size", 0)),
        bits(of.integer("bits", 0)) {}

  int64_t blocks() const { return (columns + block - 1) / block; }

  // The weights of inputs 1 and 2, without zero points.
  QuantizedMatrix weights(Run& run) const {
    constexpr int64_t kMost = int64_t{1} << 30;
    require(run.input_count() >= 3, "the weights of a quantized product are missing");
    require(bits == 2 || bits == 4 || bits == 8, "a quantized product has numbers of 2, 4 or 8 bits");
    require(rows > 0 && rows < kMost && columns > 0 && columns < kMost && block > 0 && block < kMost && block % 16 == 0,
            "the sizes of a quantized product do not fit together");
    const Tensor bytes = run.input(1), scales = run.input(2);
    require(bytes.type == kUint8 && bytes.elements == rows * (blocks() * block * bits / 8),
            "the bytes of a quantized product do not fit its sizes");
    require(scales.elements == rows * blocks(),
            "a quantized product does not have one scale and zero point for each block");
    return {rows, columns, block, bits, static_cast<const uint8_t*>(bytes.data), scales.floats(), nullptr, nullptr};
  }

  // The result, as wide as it says.
  static Tensor output(Run& run, const Tensor& like, int64_t width) {
    Shape shape(like.shape.begin(), like.shape.end() - 1);
    shape.push_back(width);
    return run.output(0, shape);
  }
};

struct NBitsProduct : QuantizedKernel {
  bool bf16;

  // The level is the least accuracy that a node asks for: 3 is that of bfloat16, and 4 of integers of 8 bits.
  explicit NBitsProduct(const Attributes& of) : QuantizedKernel(of), bf16(of.integer("accuracy_level", 0) >= 3) {}

  void run(Run& run) const override {
    QuantizedMatrix matrix = weights(run);
    const Tensor x = run.input(0);
    require(!x.shape.empty() && x.shape.back() == columns,
            "the matrix does not have one column for each of the weights");
    std::vector<uint8_t> zeros;
    if (run.input_count() > 3 && run.input(3).type == kFloat) {
      require(run.input(3).elements == rows * blocks(),
              "a quantized product does not have one scale and zero point for each block");
      matrix.float_zeros = run.input(3).floats();
    } else {
      zeros = run.input_count() > 3 ? unpacked(run.input(3))
                                    : std::vector<uint8_t>(static_cast<size_t>(rows * blocks()), 1 << (bits - 1));
      matrix.zeros = zeros.data();
    }
    Tensor y = output(run, x, rows);
    if (y.elements == 0) return;
    quantized().transposed(x.floats(), x.elements / columns, matrix, y.floats(), bf16, run.in_parallel());
  }

  // Zero points that begin a byte with each row, one in a byte.
  std::vector<uint8_t> unpacked(const Tensor& packed) const {
    const int64_t in_byte = 8 / bits, line = (blocks() + in_byte - 1) / in_byte;
    require(packed.type == kUint8 && packed.elements == rows * line,
            "a quantized product does not have one scale and zero point for each block");
    const uint8_t* bytes = static_cast<const uint8_t*>(packed.data);
    std::vector<uint8_t> made;
    made.reserve(static_cast<size_t>(rows * blocks()));
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < blocks(); ++i)
        made.push_back(
            static_cast<uint8_t>(bytes[row * line + i / in_byte] >> (i % in_byte * bits) & ((1 << bits) - 1)));
    return made;
  }
};

struct QuantizedProductGrad : QuantizedKernel {
  using QuantizedKernel::QuantizedKernel;

  void run(Run& run) const override {
    QuantizedMatrix matrix = weights(run);
    require(run.input_count() >= 4, "the weights of a quantized product are missing");
    const Tensor dy = run.input(0), zeros = run.input(3);
    require(!dy.shape.empty() && dy.shape.back() == rows,
            "the gradient does not have one column for each row of weights");
    require(zeros.elements == rows * blocks(),
            "a quantized product does not have one scale and zero point for each block");
    require(zeros.type == kUint8 || zeros.type == kFloat, "zero points are bytes or floats");
    if (zeros.type == kUint8)
      matrix.zeros = static_cast<const uint8_t*>(zeros.data);
    else
      matrix.float_zeros = zeros.floats();
    Tensor dx = output(run, dy, columns);
    if (dx.elements == 0) return;
    quantized().product(dy.floats(), dy.elements / rows, matrix, dx.floats(), run.in_parallel());
  }
};

}  // namespace

std::vector<KernelKind> quantized_kernels() {
  return {kind_of<NBitsProduct>("NBitsProduct", {kFloat}),
          kind_of<QuantizedProductGrad>("QuantizedProductGrad", {kFloat})};
}

}  // namespace onnxtrain
