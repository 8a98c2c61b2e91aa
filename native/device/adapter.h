// Adapters: what fine-tuning with LoRA changed, in `.onnx_adapter` files, which are ONNX Runtime's own.
// docs/format.md specifies them.
#pragma once

#include <string>
#include <vector>

#include "checkpoint.h"
#include "json.h"

namespace onnxtrain::device {

// The two factors of a layer, by the names of their slots. `scale` is what B was multiplied by: 1 where a
// file does not tell. Both numbers are as they are in files.
struct Pair {
  std::string layer, a, b;
  Json rank, scale;
  std::string kind;  // "linear" or "conv"

  // The axis of A, and of B, that is as long as the rank.
  size_t rank_axis_of_a() const { return kind == "conv" ? 0 : 1; }
  size_t rank_axis_of_b() const { return kind == "conv" ? 1 : 0; }
};

// The pairs of a model, and the fingerprint of its base, "" if it is not told.
struct Factors {
  std::vector<Pair> pairs;
  std::string base;
};

// B holds the scale already. Tensors that belong to no pair replace those of the base whole.
struct Adapter {
  Named<Tensor> tensors;
  Factors factors;
};

// ---- pairs ----

// Reads `lora` and `base` of a record that may come from anyone; null where they are not told. An Error says
// what is wrong, without the name of the record.
Factors read_factors(const Json* lora, const Json* base);
Json record_of(const Factors& factors);
// Finds the pairs by the names that PEFT and Olive give them: `<layer>.lora_A.weight`.
std::vector<Pair> pairs_by_name(const Named<Tensor>& tensors, const std::string& source);

// ---- adapters ----

// Refuses tensors that are no floats.
void require_float_types(const Named<Tensor>& tensors);
// Refuses pairs that are not there, or whose shapes do not fit each other.
void require_consistent(const Adapter& adapter, const std::string& source);
// Refuses an adapter that has not just the tensors that a session trains, or one of another base.
void require_fits(const Adapter& adapter, const Named<Tensor>& trained, const std::string& base);

// ---- files ----

Adapter read_adapter(const std::string& path);
// Replaces the file as a whole or not at all.
void write_adapter(const std::string& path, const Adapter& adapter);

}  // namespace onnxtrain::device
