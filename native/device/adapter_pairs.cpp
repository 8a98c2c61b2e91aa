// Pairs of low-rank factors, and whether an adapter fits them and a session.
#include <cctype>
#include <cmath>
#include <map>
#include <set>

#include "adapter.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr int kBfloat16Code = 16;
constexpr size_t kLongestName = 200;  // in a message

std::string short_name(const std::string& name) { return quoted(first_characters(name, kLongestName)); }

std::string listed(const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < names.size() && i < 3; ++i) parts.push_back(short_name(names[i]));
  if (names.size() > 3) parts.push_back("...");
  return joined(parts, ", ");
}

// ---- records ----

bool is_text(const Json* value) { return value != nullptr && value->kind == Json::kText && !value->text.empty(); }

bool is_pair(const Json& value) {
  for (const char* key : {"layer", "a", "b", "kind"}) {
    if (!is_text(value.find(key))) return false;
  }
  const std::string& kind = value.find("kind")->text;
  const Json *rank = value.find("rank"), *scale = value.find("scale");
  if (kind != "linear" && kind != "conv") return false;
  if (rank == nullptr || rank->kind != Json::kInteger || rank->text[0] == '-' || rank->text == "0") return false;
  if (scale == nullptr || !scale->is_number()) return false;
  return scale->as_double() > 0 && std::isfinite(scale->as_double());
}

bool are_pairs(const Json& value) {
  if (value.kind != Json::kList || value.list.empty()) return false;
  std::set<std::string> names;
  for (const Json& pair : value.list) {
    if (!is_pair(pair)) return false;
    for (const char* key : {"a", "b"}) {
      if (!names.insert(pair.find(key)->text).second) return false;
    }
  }
  return true;
}

bool is_told(const Json* value) { return value != nullptr && value->kind != Json::kNull; }

// ---- names ----

struct FactorName {
  std::string layer;
  char factor = 0;  // 'A' or 'B'; 0 if it is no name of a factor
};

bool is_word(std::string_view text) {
  for (const char sign : text) {
    const bool is_ascii = static_cast<uint8_t>(sign) < 0x80;
    if (is_ascii && std::isalnum(static_cast<unsigned char>(sign)) == 0 && sign != '_') return false;
  }
  return !text.empty();
}

// Reads `<layer>.lora_A.weight`; PEFT's own name of an adapter may stand before `.weight`.
FactorName factor_name(const std::string& name) {
  constexpr std::string_view kEnd = ".weight", kFactor = ".lora_";
  if (!ends_with(name, kEnd)) return {};
  std::string_view rest = std::string_view(name).substr(0, name.size() - kEnd.size());
  for (int attempt = 0; attempt < 2; ++attempt) {
    const size_t size = rest.size();
    const bool has_letter = size > kFactor.size() + 1 && (rest[size - 1] == 'A' || rest[size - 1] == 'B');
    if (has_letter && ends_with(rest.substr(0, size - 1), kFactor)) {
      const std::string_view layer = rest.substr(0, size - 1 - kFactor.size());
      if (layer.find('\n') == layer.npos) return {std::string(layer), rest[size - 1]};
    }
    const size_t point = rest.rfind('.');
    if (point == rest.npos || !is_word(rest.substr(point + 1))) break;
    rest = rest.substr(0, point);
  }
  return {};
}

// Why tensors of a name are not supported; "" if they are.
std::string reason_for(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != name.npos; };
  if (has("magnitude")) return ": adapters of DoRA, which also scale the base, are not supported";
  if (has(".quant.")) return ": adapters with quantized factors are not supported; export them unquantized";
  if (has("lora_embedding")) return ": factors of embeddings are not supported";
  return "";
}

// ---- types and shapes ----

std::string float_name(const Tensor& tensor, const std::string& name) {
  if (tensor.code == kFloatCode) return "float32";
  if (tensor.code == kFloat16Code) return "float16";
  if (tensor.code == kDoubleCode) return "float64";
  if (tensor.code == kBfloat16Code) return "bfloat16";
  throw AdapterError(quoted(name) + " is " + type_text(tensor.code) +
                     ": factors are floats of 16, 32 or 64 bits. Adapters with quantized factors are not supported; "
                     "export them unquantized");
}

void require_pair(const Pair& pair, const Dims& a, const Dims& b, const std::string& source) {
  const std::string layer = source + ": the factors of " + short_name(pair.layer);
  const bool is_linear = pair.kind == "linear";
  if (a.size() != b.size() || (is_linear ? a.size() != 2 : a.size() < 3)) {
    throw AdapterError(layer + " have the shapes " + list_text(a) + " and " + list_text(b) + ", which no " + pair.kind +
                       " layer has");
  }
  bool multiply = std::to_string(a[pair.rank_axis_of_a()]) == pair.rank.text &&
                  std::to_string(b[pair.rank_axis_of_b()]) == pair.rank.text;
  for (size_t i = 2; i < b.size(); ++i) multiply = multiply && b[i] == 1;
  if (multiply) return;
  throw AdapterError(layer + ", of shapes " + list_text(a) + " and " + list_text(b) + ", do not multiply at rank " +
                     pair.rank.text);
}

// Compares a tensor with the one that trains; along the axis, if it has one, a factor is as long as its rank.
void require_slot(const std::string& name, const Tensor& tensor, const Tensor& slot, const size_t* axis) {
  const std::string kind = float_name(tensor, name), wanted = float_name(slot, name);
  if (kind != wanted) {
    throw AdapterError(quoted(name) + " is " + kind + " in the adapter and " + wanted +
                       " in the session: convert it with Adapter.astype(" + quoted(wanted) + ")");
  }
  if (tensor.dims == slot.dims) return;
  std::string what = "it is of another model";
  if (axis != nullptr && tensor.dims.size() == slot.dims.size() && tensor.dims[*axis] != slot.dims[*axis]) {
    const std::string rank = std::to_string(tensor.dims[*axis]);
    what = "its rank is " + rank + " instead of " + std::to_string(slot.dims[*axis]) + ": prepare with rank=" + rank;
  }
  throw AdapterError(quoted(name) + " has the shape " + list_text(tensor.dims) + " in the adapter, and " +
                     list_text(slot.dims) + " in the session: " + what);
}

// The names of one mapping that another has not.
std::vector<std::string> names_without(const Named<Tensor>& tensors, const Named<Tensor>& others) {
  std::vector<std::string> found;
  for (const auto& item : tensors) {
    if (others.find(item.first) == nullptr) found.push_back(item.first);
  }
  return found;
}

void require_names(const Named<Tensor>& tensors, const Named<Tensor>& trained) {
  const std::vector<std::string> unknown = names_without(tensors, trained), missing = names_without(trained, tensors);
  if (!unknown.empty()) {
    throw AdapterError("the session has no slot for " + std::to_string(unknown.size()) + " of the " +
                       std::to_string(tensors.size()) + " tensors of the adapter: " + listed(unknown) +
                       ". Its slots are called " + listed(names_without(trained, {})) +
                       ". Rename the tensors with Adapter.renamed, or choose the layers that the adapter was trained "
                       "on");
  }
  if (missing.empty()) return;
  throw AdapterError("the adapter lacks " + std::to_string(missing.size()) + " of the " +
                     std::to_string(trained.size()) + " factors that the session trains: " + listed(missing) +
                     ". Train the same layers (layers=...), or set the others with load_parameters");
}

}  // namespace

Factors read_factors(const Json* lora, const Json* base) {
  Factors made;
  if (is_told(lora) && !are_pairs(*lora)) {
    throw Error("lora is a list of pairs of factors, each with layer, a, b, rank, scale and kind, not " +
                shown(*lora, 300));
  }
  if (is_told(base)) {
    if (base->kind != Json::kText || !is_hexadecimal(base->text, 32)) {
      throw Error("base is 32 hexadecimal digits, not " + shown(*base, 300));
    }
    made.base = base->text;
  }
  if (!is_told(lora)) return made;
  for (const Json& pair : lora->list) {
    const auto text = [&](const char* key) { return pair.find(key)->text; };
    made.pairs.push_back({text("layer"), text("a"), text("b"), *pair.find("rank"), *pair.find("scale"), text("kind")});
  }
  return made;
}

Json record_of(const Factors& factors) {
  Json list = Json::of_kind(Json::kList);
  for (const Pair& pair : factors.pairs) {
    Json made = Json::of_object();
    made.set("layer", Json::of_text(pair.layer));
    made.set("a", Json::of_text(pair.a));
    made.set("b", Json::of_text(pair.b));
    made.set("rank", pair.rank);
    made.set("scale", pair.scale);
    made.set("kind", Json::of_text(pair.kind));
    if (pair.rank.text != "0") list.list.push_back(std::move(made));
  }
  Json record = Json::of_object();
  record.set("lora", std::move(list));
  if (!factors.base.empty()) record.set("base", Json::of_text(factors.base));
  return record;
}

std::vector<Pair> pairs_by_name(const Named<Tensor>& tensors, const std::string& source) {
  Named<std::map<char, std::string>> layers;
  for (const auto& item : tensors) {
    const std::string& name = item.first;
    const FactorName found = factor_name(name);
    const std::string reason = reason_for(name);
    if (!reason.empty() || (found.factor == 0 && name.find("lora_") != name.npos)) {
      throw AdapterError(source + ": " + short_name(name) +
                         " is not a factor of LoRA, which ends in .lora_A.weight or .lora_B.weight" + reason);
    }
    if (found.factor == 0) continue;
    if (!layers[found.layer].emplace(found.factor, name).second) {
      throw AdapterError(source + ": " + short_name(name) + " is there twice in two spellings");
    }
  }
  std::vector<Pair> pairs;
  for (const auto& [layer, names] : layers) {
    for (const char factor : {'A', 'B'}) {
      if (names.count(factor) > 0) continue;
      throw AdapterError(source + ": " + short_name(layer) + " has no factor lora_" + factor);
    }
    const Dims& dims = tensors.find(names.at('A'))->dims;
    const bool is_linear = dims.size() == 2;
    const Json rank = Json::of_integer(dims[is_linear ? 1 : 0]);
    pairs.push_back({layer, names.at('A'), names.at('B'), rank, Json::of_float(1), is_linear ? "linear" : "conv"});
  }
  return pairs;
}

void require_float_types(const Named<Tensor>& tensors) {
  for (const auto& [name, tensor] : tensors) float_name(tensor, name);
}

void require_consistent(const Adapter& adapter, const std::string& source) {
  for (const Pair& pair : adapter.factors.pairs) {
    for (const std::string& name : {pair.a, pair.b}) {
      if (adapter.tensors.find(name) != nullptr) continue;
      throw AdapterError(source + ": the factor " + short_name(name) + " is not there");
    }
  }
  for (const Pair& pair : adapter.factors.pairs) {
    require_pair(pair, adapter.tensors.find(pair.a)->dims, adapter.tensors.find(pair.b)->dims, source);
  }
  if (adapter.tensors.size() == 0) throw AdapterError(source + ": it has no factors");
}

void require_fits(const Adapter& adapter, const Named<Tensor>& trained, const std::string& base) {
  const std::string& own = adapter.factors.base;
  if (!own.empty() && !base.empty() && own != base) {
    throw AdapterError("the adapter was trained on another base than that of the session: its fingerprint is " +
                       own.substr(0, 12) + "..., not " + base.substr(0, 12) +
                       ".... Train it on this base, or apply it to its own");
  }
  require_names(adapter.tensors, trained);
  std::map<std::string, size_t> axes;
  for (const Pair& pair : adapter.factors.pairs) {
    axes[pair.a] = pair.rank_axis_of_a();
    axes[pair.b] = pair.rank_axis_of_b();
  }
  for (const auto& [name, tensor] : adapter.tensors) {
    const auto axis = axes.find(name);
    require_slot(name, tensor, *trained.find(name), axis == axes.end() ? nullptr : &axis->second);
  }
}

}  // namespace onnxtrain::device
