// Rotary positions. With a and b for the halves of the last axis of x, and the attribute sign of 1 or -1:
//   Rotary(x, cos, sin) -> x cos + (sign b, a) sin
//   RotaryGrad(dy, cos, sin) -> dx
// The angles have a number for each of the last axis; of other axes they have all, one, or none.
#include <algorithm>

#include "families.h"

namespace onnxtrain {
namespace {

constexpr int64_t kElementsOfTask = 16384;

// A table of angles, and how far to go in it from one place of x to the next.
struct Table {
  const float* data;
  std::vector<int64_t> steps;  // for each axis of x but the last

  Table(const Tensor& given, const Shape& x) : data(given.floats()), steps(x.size() - 1, 0) {
    const size_t rank = given.shape.size();
    require(rank >= 1 && rank <= x.size() && given.shape.back() == x.back(), "the angles do not fit the rows");
    int64_t step = x.back();
    for (size_t before = 1; before < rank; ++before) {
      const int64_t size = given.shape[rank - 1 - before];
      const size_t axis = x.size() - 1 - before;
      require(size == 1 || size == x[axis], "the angles do not fit the rows");
      if (size != 1) steps[axis] = step;
      step *= size;
    }
  }

  const float* of_row(int64_t row, const Shape& x) const {
    int64_t offset = 0;
    for (size_t axis = steps.size(); axis-- > 0;) {
      offset += row % x[axis] * steps[axis];
      row /= x[axis];
    }
    return data + offset;
  }
};

struct Rotary : Kernel {
  float sign;
  bool is_gradient;

  explicit Rotary(const Attributes& of, bool gradient = false)
      : sign(of.integer("sign", 1) < 0 ? -1.0f : 1.0f), is_gradient(gradient) {}

  void run(Run& run) const override {
    require(run.input_count() >= 3, "a rotation needs 3 inputs");
    const Tensor x = run.input(0);
    require(!x.shape.empty() && x.shape.back() % 2 == 0, "rows have no halves");
    const float* from = x.floats();
    float* to = run.output(0, x.shape).floats();
    if (x.elements == 0) return;
    const Table cos(run.input(1), x.shape), sin(run.input(2), x.shape);
    const int64_t width = x.shape.back(), rows = x.elements / width;
    const int64_t together = std::max<int64_t>(1, kElementsOfTask / width);
    run.parallel((rows + together - 1) / together, [&](int64_t task) {
      const int64_t end = std::min(rows, (task + 1) * together);
      for (int64_t row = task * together; row < end; ++row)
        turn(from + row * width, cos.of_row(row, x.shape), sin.of_row(row, x.shape), to + row * width, width / 2);
    });
  }

 private:
  // A row may be turned in place: both elements of a pair are read before one is written.
  void turn(const float* x, const float* c, const float* s, float* y, int64_t half) const {
    if (!is_gradient)
      for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        y[i] = a * c[i] + sign * b * s[i];
        y[i + half] = b * c[i + half] + a * s[i + half];
      }
    else
      for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        y[i] = a * c[i] + b * s[i + half];
        y[i + half] = b * c[i + half] + sign * a * s[i];
      }
  }
};

struct RotaryGrad : Rotary {
  explicit RotaryGrad(const Attributes& of) : Rotary(of, true) {}
};

}  // namespace

std::vector<KernelKind> rotary_kernels() {
  return {kind_of<Rotary>("Rotary", {kFloat}, true), kind_of<RotaryGrad>("RotaryGrad", {kFloat}, true)};
}

}  // namespace onnxtrain
