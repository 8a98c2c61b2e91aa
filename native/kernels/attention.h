// Attention that keeps no scores: softmax(scale · Q · Kᵀ + mask) · V, and its gradients.
#pragma once

#include <cstdint>

#include "isa.h"
#include "parallel.h"

namespace onnxtrain {

// A tensor (batch, head, row, element). The elements of queries and outputs lie side by side.
template <class T>
struct Heads {
  T* data;
  int64_t batch_stride, head_stride, row_stride, element_stride = 1;

  T* head(int64_t batch, int64_t head) const { return data + batch * batch_stride + head * head_stride; }
};

// What is added to the scores, or which of them are replaced. A stride of 0 repeats a value.
struct Mask {
  const float* added = nullptr;
  const uint8_t* flags = nullptr;  // for each score, whether it is kept or hidden
  bool flags_hide = false;
  float hidden = 0;  // the score where it is hidden
  int64_t batch_stride = 0, head_stride = 0, query_stride = 0, key_stride = 0;

  bool exists() const { return added != nullptr || flags != nullptr; }
};

struct Attention {
  int64_t batch, heads, key_heads;  // a head of keys may serve several heads of queries
  int64_t queries, keys, size, value_size;
  float scale;
  bool bf16;            // round what is multiplied to bfloat16 where the processor has instructions for it
  bool blind_are_zero;  // the output of a query that sees no key: zero, or else NaN
  Heads<const float> q, k, v;
  Mask mask;
};

struct AttentionGradients {
  bool zeros_stay;  // a row of zeros in d_o has no gradients, whatever was computed from it
  Heads<const float> o, d_o;
  Heads<float> d_q, d_k, d_v;
};

// The rows of queries that have their largest score and one over the sum of exponentials kept:
// batch · heads · queries numbers each.
struct RowStatistics {
  float* largest;
  float* one_over_sum;
};

struct AttentionCompute {
  bool (*has_bf16)();
  void (*forward)(const Attention&, const Heads<float>& o, const RowStatistics& kept, const Parallel&);
  void (*backward)(const Attention&, const AttentionGradients&, const RowStatistics& kept, const Parallel&);
};

ONNXTRAIN_TABLE(AttentionCompute, kAttention, attention)

}  // namespace onnxtrain
