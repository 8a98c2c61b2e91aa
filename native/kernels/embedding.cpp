// EmbeddingGrad(indices, dy, shape of the table): the rows of dy added up where the indices say that
// they came from. Negative indices count from the end.
#include "embedding.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "families.h"

namespace onnxtrain {
namespace {

constexpr int64_t kColumns = 256;     // of a piece of the table
constexpr int64_t kElements = 65536;  // of a piece, about

// The positions of the indices, ordered by the row that they name, and where each row that occurs
// begins among them.
struct Occurrences {
  std::vector<int64_t> positions;
  std::vector<int64_t> rows, starts;  // one more start than rows

  Occurrences(const Tensor& indices, int64_t size) : positions(indices.elements) {
    require(indices.type == kInt64 || indices.type == kInt32, "the indices are not integers");
    std::vector<int64_t> row(indices.elements);
    for (int64_t i = 0; i < indices.elements; ++i) {
      const int64_t given = indices.type == kInt64 ? static_cast<const int64_t*>(indices.data)[i]
                                                   : static_cast<const int32_t*>(indices.data)[i];
      require(given >= -size && given < size, "an index is out of the range of the table");
      row[i] = given < 0 ? given + size : given;
    }
    std::iota(positions.begin(), positions.end(), int64_t{0});
    std::sort(positions.begin(), positions.end(),
              [&](int64_t a, int64_t b) { return row[a] != row[b] ? row[a] < row[b] : a < b; });
    for (size_t i = 0; i < positions.size(); ++i)
      if (i == 0 || row[positions[i]] != rows.back()) {
        rows.push_back(row[positions[i]]);
        starts.push_back(static_cast<int64_t>(i));
      }
    starts.push_back(indices.elements);
  }
};

// Writes the columns [column, column + count) of the rows [first, last).
void fill(const Occurrences& found, const float* dy, float* table, int64_t width, int64_t first, int64_t last,
          int64_t column, int64_t count) {
  size_t next = std::lower_bound(found.rows.begin(), found.rows.end(), first) - found.rows.begin();
  for (int64_t row = first; row < last; ++row) {
    float* to = table + row * width + column;
    if (next == found.rows.size() || found.rows[next] != row) {
      std::memset(to, 0, count * sizeof(float));
      continue;
    }
    const int64_t start = found.starts[next], many = found.starts[next + 1] - start;
    embedding().sum_rows(dy + column, found.positions.data() + start, many, width, count, to);
    ++next;
  }
}

struct EmbeddingGrad : Kernel {
  explicit EmbeddingGrad(const Attributes&) {}
  void run(Run& run) const override {
    require(run.input_count() >= 3, "indices, gradient or shape are missing");
    const Tensor indices = run.input(0), dy = run.input(1), vector = run.input(2);
    require(vector.shape.size() == 1 && vector.elements >= 1 && vector.elements <= 64, "a shape is a vector of int64");
    const Shape shape(vector.integers(), vector.integers() + vector.elements);
    elements_of(shape);
    const int64_t size = shape[0], width = elements_of(Shape(shape.begin() + 1, shape.end()));
    require(width == 0 ? dy.elements == 0 : dy.elements % width == 0 && dy.elements / width == indices.elements,
            "the gradient does not have one row for each index");
    const float* from = dy.floats();
    const Occurrences found(indices, size);
    Tensor table = run.output(0, shape);
    if (table.elements == 0) return;
    float* to = table.floats();
    // Columns are divided too, since one row may occur more often than all others together.
    const int64_t blocks = (width + kColumns - 1) / kColumns;
    const int64_t rows = std::max<int64_t>(1, kElements / std::min(width, kColumns));
    run.parallel((size + rows - 1) / rows * blocks, [&](int64_t piece) {
      const int64_t first = piece / blocks * rows, column = piece % blocks * kColumns;
      fill(found, from, to, width, first, std::min(size, first + rows), column, std::min(kColumns, width - column));
    });
  }
};

}  // namespace

std::vector<KernelKind> embedding_kernels() { return {kind_of<EmbeddingGrad>("EmbeddingGrad", {kFloat})}; }

}  // namespace onnxtrain
