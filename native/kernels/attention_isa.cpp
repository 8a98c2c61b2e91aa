// Attention in blocks of queries × keys that stay in the cache. Compiled once for each instruction set.
//
// Scores are computed with queries side by side, Sᵀ = K · Qᵀ: a vector holds the scores of one key for
// several queries. So the maxima and sums of the softmax are element-wise, and products read K and V
// as they lie, one number at a time for all queries of a vector. Only the queries of a block, and what
// is computed for them, are transposed.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "attention_products.h"
#include "transpose.h"
#include "vector_math.h"

namespace onnxtrain::ONNXTRAIN_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
void copy_rows(const float* from, int64_t from_stride, int64_t rows, int64_t columns, Matrix to, float factor = 1) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) to.row(i)[j] = from[i * from_stride + j] * factor;
}

// Reads rows of keys or values, which may lie in columns.
void read_rows(const Heads<const float>& of, const float* head, int64_t first, int64_t rows, int64_t columns,
               Matrix to) {
  const float* from = head + first * of.row_stride;
  if (of.element_stride == 1)
    copy_rows(from, of.row_stride, rows, columns, to);
  else if (of.row_stride == 1)
    transpose(from, of.element_stride, columns, rows, to.data, to.stride);
  else
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) to.row(i)[j] = from[i * of.row_stride + j * of.element_stride];
}

void write_rows(Matrix from, int64_t rows, int64_t columns, const Heads<float>& of, float* head, int64_t first) {
  float* to = head + first * of.row_stride;
  if (of.element_stride == 1)
    copy_rows(from.data, from.stride, rows, columns, {to, of.row_stride});
  else if (of.row_stride == 1)
    transpose(from.data, from.stride, rows, columns, to, of.element_stride);
  else
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) to[i * of.row_stride + j * of.element_stride] = from.row(i)[j];
}

// ---- exponentials ------------------------------------------------------------------------------

// Scores are kept times log₂ e, so that exponentials are powers of two: one multiplication less for
// each, and the whole part of an exponent is subtracted without an error.
constexpr float kLog2E = 1.44269504f;

// 2ˣ of what is not positive, or NaN. Below 2⁻¹²⁵ it is zero.
inline Vector power_of_two(Vector x) {
  // Adding 1.5 · 2²³ rounds to an integer, which then stands in the low bits.
  const Vector shift = broadcast(12582912.0f), lowest = broadcast(-125.0f);
  const Vector limited = vmax(x, lowest);
  const Vector shifted = as_rounded(limited + shift);
  const Vector rest = limited - as_rounded(shifted - shift);
  Vector p = broadcast(0.000153458124f);
  p = p * rest + 0.00133999309f;
  p = p * rest + 0.00961848907f;
  p = p * rest + 0.0555032864f;
  p = p * rest + 0.240226462f;
  p = p * rest + 0.693147182f;
  p = p * rest + 1.0f;
  const Vector found = from_bits(added(bits_of(p), as_exponent(bits_of(shifted))));
  return x < lowest ? Vector{} : x == x ? found : x;  // the bits of a NaN are not a number's
}

// The longest side of a matrix beside those of a block.
int64_t longest(const Attention& of) { return std::max({of.size, of.value_size, kBlock}); }

// Which queries and keys are in work.
struct Block {
  int64_t batch, head, query, queries, key, keys;
};

// ---- masks -------------------------------------------------------------------------------------

// The mask of a block, keys × queries: numbers to add, or 1 where a score is kept and 0 where not.
class BlockMask {
 public:
  BlockMask(const Mask& mask, Matrix place) : mask_(mask), place_(place) {}

  bool exists() const { return mask_.exists(); }

  // Whether the mask hides all of a block, so that no probability is above zero.
  bool hides_all(const Block& at) const {
    if (mask_.added != nullptr) {
      const float* from = mask_.added + start(at);
      return all(at, [from](int64_t place) { return from[place] == -kInfinity; });
    }
    const uint8_t* from = mask_.flags + start(at);
    const bool hide = mask_.flags_hide;
    return mask_.hidden == -kInfinity && all(at, [from, hide](int64_t place) { return (from[place] != 0) == hide; });
  }

  void read(const Block& at) const {
    if (mask_.added != nullptr) {
      const float* from = mask_.added + start(at);
      if (mask_.key_stride == 1 && mask_.query_stride != 0)
        transpose(from, mask_.query_stride, at.queries, at.keys, place_.data, place_.stride);
      else
        fill(at, [from](int64_t place) { return from[place]; });
      return;
    }
    const uint8_t* from = mask_.flags + start(at);
    const bool hide = mask_.flags_hide;
    fill(at, [from, hide](int64_t place) { return (from[place] != 0) == hide ? 0.0f : 1.0f; });
  }

  // The scores of key j with the mask, at the given vector of queries.
  Vector apply(Vector scores, int64_t j, int64_t query) const {
    const Vector own = load(place_.row(j) + query);
    return mask_.added != nullptr ? scores + as_score(own) : own != 0.0f ? scores : as_score(broadcast(mask_.hidden));
  }

  // The gradient that reaches a score: none if the mask has replaced it.
  Vector pass(Vector gradient, int64_t j, int64_t query) const {
    return mask_.added != nullptr || load(place_.row(j) + query) != 0.0f ? gradient : Vector{};
  }

 private:
  // Numbers of a mask as scores; the lowest float, by which some masks hide, does not become infinite.
  static Vector as_score(Vector given) {
    const Vector scaled = vmax(given * kLog2E, broadcast(-std::numeric_limits<float>::max()));
    return given == -kInfinity ? given : scaled;
  }

  int64_t start(const Block& at) const {
    return at.batch * mask_.batch_stride + at.head * mask_.head_stride + at.query * mask_.query_stride +
           at.key * mask_.key_stride;
  }

  // The last queries come first, which see most where a query sees what is before it.
  template <class Hidden>
  bool all(const Block& at, const Hidden& hidden) const {
    const int64_t queries = mask_.query_stride == 0 ? 1 : at.queries, keys = mask_.key_stride == 0 ? 1 : at.keys;
    for (int64_t i = queries; i-- > 0;) {
      const int64_t row = i * mask_.query_stride;
      int kept = 0;
      if (mask_.key_stride == 1)
        for (int64_t j = 0; j < keys; ++j) kept |= !hidden(row + j);
      else
        for (int64_t j = 0; j < keys; ++j) kept |= !hidden(row + j * mask_.key_stride);
      if (kept != 0) return false;
    }
    return true;
  }

  template <class Value>
  void fill(const Block& at, const Value& value) const {
    for (int64_t j = 0; j < at.keys; ++j)
      if (mask_.query_stride == 0)
        std::fill_n(place_.row(j), at.queries, value(j * mask_.key_stride));
      else
        for (int64_t i = 0; i < at.queries; ++i)
          place_.row(j)[i] = value(i * mask_.query_stride + j * mask_.key_stride);
  }

  const Mask& mask_;
  Matrix place_;
};

// ---- forward -----------------------------------------------------------------------------------

// One block of queries on its way over all keys.
class Forward {
 public:
  explicit Forward(const Attention& of)
      : of_(of),
        memory_(floats(of)),
        queries_(memory_.matrix(of.size, kBlock)),
        keys_(memory_.matrix(kBlock, of.size)),
        values_(memory_.matrix(kBlock, tall(of.value_size), of.value_size)),
        scores_(memory_.matrix(kBlock, kBlock)),
        mixed_(memory_.matrix(tall(of.value_size), kBlock)),
        largest_(memory_.take(kBlock)),
        sums_(memory_.take(kBlock)),
        factors_(memory_.take(kBlock)),
        mask_(of.mask, of.mask.exists() ? memory_.matrix(kBlock, kBlock) : Matrix{}),
        products_(of.bf16, longest(of), memory_) {}

  void run(Block at, const Heads<float>& o, const RowStatistics& kept) {
    const int64_t group = of_.heads / of_.key_heads;
    const float* q = of_.q.head(at.batch, at.head) + at.query * of_.q.row_stride;
    transpose(q, of_.q.row_stride, at.queries, of_.size, queries_.data, kBlock, of_.scale * kLog2E);
    std::fill_n(largest_, kBlock, -kInfinity);
    std::fill_n(sums_, kBlock, 0.0f);
    std::fill_n(mixed_.data, tall(of_.value_size) * kBlock, 0.0f);
    const float* k = of_.k.head(at.batch, at.head / group);
    const float* v = of_.v.head(at.batch, at.head / group);
    for (at.key = 0; at.key < of_.keys; at.key += kBlock) {
      at.keys = std::min(kBlock, of_.keys - at.key);
      if (mask_.exists() && mask_.hides_all(at)) continue;
      add_keys(at, k, v);
    }
    finish(at, o, kept);
  }

 private:
  static int64_t floats(const Attention& of) {
    return kBlock * (2 * of.size + 2 * tall(of.value_size) + 2 * kBlock + 3) + Products::floats(of.bf16, longest(of));
  }

  void add_keys(const Block& at, const float* k, const float* v) {
    const int64_t across = wide(at.queries);
    read_rows(of_.k, k, at.key, at.keys, of_.size, keys_);
    read_rows(of_.v, v, at.key, at.keys, of_.value_size, values_);
    products_.multiply<Before::cleared>(tall(at.keys), across, of_.size, Left<false>{keys_.data, keys_.stride},
                                        queries_, scores_);
    if (mask_.exists()) mask_.read(at);
    for (int64_t query = 0; query < across; query += kLanes) soften(at, query);
    products_.multiply<Before::scaled>(tall(of_.value_size), across, at.keys, Left<true>{values_.data, values_.stride},
                                       scores_, mixed_, factors_);
  }

  // Turns the scores of a vector of queries into exponentials, relative to the largest so far.
  void soften(const Block& at, int64_t query) {
    const Vector before = load(largest_ + query);
    Vector largest = before;
    for (int64_t j = 0; j < at.keys; ++j) {
      float* place = scores_.row(j) + query;
      Vector own = load(place);
      if (mask_.exists()) store(place, own = mask_.apply(own, j, query));
      largest = vmax(own, largest);
    }
    // While all keys are hidden, exponentials are zero, not NaN.
    const Vector base = largest == -kInfinity ? Vector{} : largest;
    Vector sum{};
    for (int64_t j = 0; j < at.keys; ++j) {
      float* place = scores_.row(j) + query;
      const Vector own = power_of_two(load(place) - base);
      store(place, own);
      sum += own;
    }
    const Vector factor = power_of_two(before - base);
    store(factors_ + query, factor);
    store(sums_ + query, load(sums_ + query) * factor + sum);
    store(largest_ + query, largest);
  }

  void finish(const Block& at, const Heads<float>& o, const RowStatistics& kept) {
    float* statistics = factors_;
    // The sum over no keys at all is zero; where all keys are hidden it is NaN, as a softmax is.
    if (of_.keys == 0) std::fill_n(sums_, kBlock, 1.0f);
    for (int64_t query = 0; query < kBlock; query += kLanes) {
      const Vector sum = load(sums_ + query);
      const Vector one_over = of_.blind_are_zero ? (sum > 0.0f ? 1.0f / sum : Vector{}) : 1.0f / sum;
      store(statistics + query, one_over);
      for (int64_t d = 0; d < of_.value_size; ++d) {
        float* place = mixed_.row(d) + query;
        const Vector result = load(place) * one_over;
        store(place, of_.blind_are_zero ? (sum > 0.0f ? result : Vector{}) : result);
      }
    }
    float* to = o.head(at.batch, at.head) + at.query * o.row_stride;
    transpose(mixed_.data, kBlock, of_.value_size, at.queries, to, o.row_stride);
    const int64_t row = (at.batch * of_.heads + at.head) * of_.queries + at.query;
    std::copy_n(largest_, at.queries, kept.largest + row);
    std::copy_n(statistics, at.queries, kept.one_over_sum + row);
  }

  const Attention& of_;
  Memory memory_;
  Matrix queries_, keys_, values_, scores_, mixed_;
  float *largest_, *sums_, *factors_;
  BlockMask mask_;
  Products products_;
};

void forward(const Attention& of, const Heads<float>& o, const RowStatistics& kept, const Parallel& parallel) {
  const int64_t blocks = pieces_of(of.queries, kBlock);
  parallel(of.batch * of.heads * blocks, [&](int64_t task) {
    const int64_t query = task % blocks * kBlock, head = task / blocks;
    Forward(of).run({head / of.heads, head % of.heads, query, std::min(kBlock, of.queries - query), 0, 0}, o, kept);
  });
}

// ---- backward ----------------------------------------------------------------------------------

// The gradients of a run of keys and values, and what they contribute to those of all queries that
// read them.
class Backward {
 public:
  Backward(const Attention& of, const AttentionGradients& gradients, const RowStatistics& kept, int64_t keys)
      : of_(of),
        to_(gradients),
        kept_(kept),
        memory_(floats(of, keys)),
        queries_(memory_.matrix(kBlock, wide(of.size), of.size)),
        across_(memory_.matrix(of.size, kBlock)),
        d_outputs_(memory_.matrix(kBlock, wide(of.value_size), of.value_size)),
        d_across_(memory_.matrix(of.value_size, kBlock)),
        keys_(memory_.matrix(kBlock, tall(of.size), of.size)),
        values_(memory_.matrix(kBlock, of.value_size)),
        scores_(memory_.matrix(kBlock, kBlock)),
        d_scores_(memory_.matrix(kBlock, kBlock)),
        d_queries_(memory_.matrix(tall(of.size), kBlock)),
        d_keys_(memory_.matrix(tall(keys), wide(of.size), 0)),
        d_values_(memory_.matrix(tall(keys), wide(of.value_size), 0)),
        largest_(memory_.take(kBlock)),
        one_over_sum_(memory_.take(kBlock)),
        delta_(memory_.take(kBlock)),
        mask_(of.mask, of.mask.exists() ? memory_.matrix(kBlock, kBlock) : Matrix{}),
        products_(of.bf16, longest(of), memory_) {}

  // All queries that read the keys [first, last) of one head.
  void run(int64_t batch, int64_t key_head, int64_t first, int64_t last) {
    const int64_t group = of_.heads / of_.key_heads;
    for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head)
      for (int64_t query = 0; query < of_.queries; query += kBlock) {
        Block at{batch, head, query, std::min(kBlock, of_.queries - query), first, 0};
        read_queries(at);
        for (; at.key < last; at.key += kBlock) {
          at.keys = std::min(kBlock, last - at.key);
          if (mask_.exists() && !blind_ && mask_.hides_all(at)) continue;
          add_keys(at, key_head, at.key - first);
        }
        float* to = to_.d_q.head(batch, head) + query * to_.d_q.row_stride;
        transpose(d_queries_.data, kBlock, of_.size, at.queries, to, to_.d_q.row_stride, of_.scale);
      }
    write_rows(d_keys_, last - first, of_.size, to_.d_k, to_.d_k.head(batch, key_head), first);
    write_rows(d_values_, last - first, of_.value_size, to_.d_v, to_.d_v.head(batch, key_head), first);
  }

 private:
  static int64_t floats(const Attention& of, int64_t keys) {
    return (kBlock + tall(keys)) * (wide(of.size) + wide(of.value_size)) +
           kBlock * (of.size + 2 * of.value_size + 2 * tall(of.size) + 3 * kBlock + 3) +
           Products::floats(of.bf16, longest(of));
  }

  void read_queries(const Block& at) {
    const float* q = of_.q.head(at.batch, at.head) + at.query * of_.q.row_stride;
    const float* o = to_.o.head(at.batch, at.head) + at.query * to_.o.row_stride;
    const float* d_o = to_.d_o.head(at.batch, at.head) + at.query * to_.d_o.row_stride;
    copy_rows(q, of_.q.row_stride, at.queries, of_.size, queries_, of_.scale);
    transpose(q, of_.q.row_stride, at.queries, of_.size, across_.data, kBlock, of_.scale * kLog2E);
    copy_rows(d_o, to_.d_o.row_stride, at.queries, of_.value_size, d_outputs_);
    transpose(d_o, to_.d_o.row_stride, at.queries, of_.value_size, d_across_.data, kBlock);
    std::fill_n(d_queries_.data, tall(of_.size) * kBlock, 0.0f);
    const int64_t row = (at.batch * of_.heads + at.head) * of_.queries + at.query;
    std::copy_n(kept_.largest + row, at.queries, largest_);
    std::copy_n(kept_.one_over_sum + row, at.queries, one_over_sum_);
    blind_ = false;
    for (int64_t i = 0; i < at.queries; ++i) {
      if (to_.zeros_stay && is_zero(d_o + i * to_.d_o.row_stride)) {
        leave_out(i);
        continue;
      }
      float product = 0;
      for (int64_t d = 0; d < of_.value_size; ++d)
        product += o[i * to_.o.row_stride + d] * d_o[i * to_.d_o.row_stride + d];
      delta_[i] = product;
      blind_ |= largest_[i] == -kInfinity && !of_.blind_are_zero;
    }
    for (int64_t i = at.queries; i < kBlock; ++i) largest_[i] = one_over_sum_[i] = delta_[i] = 0;
  }

  bool is_zero(const float* row) const {
    return std::all_of(row, row + of_.value_size, [](float value) { return value == 0; });
  }

  // Lets all that is computed for a query be zero.
  void leave_out(int64_t i) {
    largest_[i] = std::numeric_limits<float>::max();
    one_over_sum_[i] = delta_[i] = 0;
    for (int64_t d = 0; d < of_.size; ++d) queries_.row(i)[d] = across_.row(d)[i] = 0;
  }

  void add_keys(const Block& at, int64_t key_head, int64_t row) {
    const int64_t across = wide(at.queries), down = tall(at.keys);
    read_rows(of_.k, of_.k.head(at.batch, key_head), at.key, at.keys, of_.size, keys_);
    read_rows(of_.v, of_.v.head(at.batch, key_head), at.key, at.keys, of_.value_size, values_);
    products_.multiply<Before::cleared>(down, across, of_.size, Left<false>{keys_.data, keys_.stride}, across_,
                                        scores_);
    products_.multiply<Before::cleared>(down, across, of_.value_size, Left<false>{values_.data, values_.stride},
                                        d_across_, d_scores_);
    if (mask_.exists()) mask_.read(at);
    for (int64_t query = 0; query < across; query += kLanes) differentiate(at, query);
    products_.multiply<Before::kept>(down, wide(of_.value_size), at.queries, Left<false>{scores_.data, kBlock},
                                     d_outputs_, Matrix{d_values_.row(row), d_values_.stride});
    products_.multiply<Before::kept>(down, wide(of_.size), at.queries, Left<false>{d_scores_.data, kBlock}, queries_,
                                     Matrix{d_keys_.row(row), d_keys_.stride});
    products_.multiply<Before::kept>(tall(of_.size), across, at.keys, Left<true>{keys_.data, keys_.stride}, d_scores_,
                                     d_queries_);
  }

  // Scores become probabilities, and the gradients of probabilities those of scores.
  void differentiate(const Block& at, int64_t query) {
    const Vector largest = load(largest_ + query), factor = load(one_over_sum_ + query), delta = load(delta_ + query);
    for (int64_t j = 0; j < at.keys; ++j) {
      float* score = scores_.row(j) + query;
      float* gradient = d_scores_.row(j) + query;
      const Vector masked = mask_.exists() ? mask_.apply(load(score), j, query) : load(score);
      Vector probability = power_of_two(masked - largest) * factor;
      if (of_.blind_are_zero) probability = factor > 0.0f ? probability : Vector{};
      // A single key has the probability 1, whatever its score is: no rounding is left of that gradient.
      const Vector found = probability * (load(gradient) - (of_.keys == 1 ? load(gradient) : delta));
      store(score, probability);
      store(gradient, mask_.exists() ? mask_.pass(found, j, query) : found);
    }
  }

  const Attention& of_;
  const AttentionGradients& to_;
  const RowStatistics& kept_;
  Memory memory_;
  Matrix queries_, across_, d_outputs_, d_across_, keys_, values_, scores_, d_scores_, d_queries_, d_keys_, d_values_;
  float *largest_, *one_over_sum_, *delta_;
  BlockMask mask_;
  Products products_;
  bool blind_ = false;  // whether a query of the block sees no key, which makes gradients NaN
};

// Where keys are cut into several runs, each has its own part of the gradients of queries; their sum.
void add_parts(const Attention& of, const float* parts, int64_t count, const Heads<float>& to,
               const Parallel& parallel) {
  const int64_t head_size = of.queries * of.size, whole = of.batch * of.heads * head_size;
  parallel(of.batch * of.heads, [&](int64_t index) {
    float* head = to.head(index / of.heads, index % of.heads);
    for (int64_t row = 0; row < of.queries; ++row)
      for (int64_t d = 0; d < of.size; ++d) {
        float sum = 0;
        for (int64_t part = 0; part < count; ++part) sum += parts[part * whole + index * head_size + row * of.size + d];
        head[row * to.row_stride + d] = sum;
      }
  });
}

void backward(const Attention& of, const AttentionGradients& gradients, const RowStatistics& kept,
              const Parallel& parallel) {
  constexpr int64_t kTasks = 16, kLeastKeys = 2 * kBlock;
  if (of.keys == 0) return add_parts(of, nullptr, 0, gradients.d_q, parallel);
  const int64_t heads = of.batch * of.key_heads;
  const int64_t cuts = std::max<int64_t>(1, std::min(pieces_of(kTasks, heads), of.keys / kLeastKeys));
  const int64_t keys = pieces_of(pieces_of(of.keys, cuts), kBlock) * kBlock, runs = pieces_of(of.keys, keys);
  const int64_t whole = of.batch * of.heads * of.queries * of.size;
  const std::unique_ptr<float[]> parts(runs > 1 ? new float[static_cast<size_t>(runs * whole)] : nullptr);
  parallel(heads * runs, [&](int64_t task) {
    const int64_t head = task / runs, run = task % runs, first = run * keys, last = std::min(first + keys, of.keys);
    AttentionGradients own = gradients;
    if (runs > 1) own.d_q = {parts.get() + run * whole, of.heads * of.queries * of.size, of.queries * of.size, of.size};
    Backward(of, own, kept, last - first).run(head / of.key_heads, head % of.key_heads, first, last);
  });
  if (runs > 1) add_parts(of, parts.get(), runs, gradients.d_q, parallel);
}

}  // namespace

const AttentionCompute kAttention = {[] { return has_bf16(); }, forward, backward};

}  // namespace onnxtrain::ONNXTRAIN_ISA
