#include "signature.h"

#include <algorithm>
#include <set>

#include "files.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr int64_t kFormat = 1;
constexpr const char* kBaseData = "base.data";

bool removed_suffix(const std::string& name, std::string_view suffix, std::string& rest) {
  if (!ends_with(name, suffix)) return false;
  rest = name.substr(0, name.size() - suffix.size());
  return true;
}

// The parameter that a name such as "w.momentum0" is a state of; "" if it is none.
std::string parameter_of_momentum(const std::string& name) {
  const size_t at = name.rfind(kMomentum);
  if (at == name.npos) return "";
  const std::string number = name.substr(at + std::string_view(kMomentum).size());
  const bool is_number = !number.empty() && number.size() < 5 && number.find_first_not_of("0123456789") == number.npos;
  return is_number ? name.substr(0, at) : "";
}

void check_type(const ModelFile& model, const TrainingState& state, const std::string& name, int code,
                const ValueType* declared, const Dims* dims) {
  const Tensor& held = *state.tensor(name);
  const bool has_shape = dims != nullptr || (declared != nullptr && declared->has_shape);
  const bool is_same_shape =
      dims != nullptr ? *dims == held.dims : !has_shape || (declared->is_fixed() && declared->sizes() == held.dims);
  if (code == held.code && (state.nominal || is_same_shape)) return;
  std::vector<std::string> shown;
  if (declared != nullptr) {
    for (const Dimension& dim : declared->dims) {
      const std::string symbol = dim.symbol.empty() ? "None" : quoted(dim.symbol);
      shown.push_back(dim.is_number() ? std::to_string(dim.size) : symbol);
    }
  }
  const std::string shape = dims != nullptr ? list_text(*dims) : "[" + joined(shown, ", ") + "]";
  throw CheckpointError("the parameter " + quoted(name) + " is " + type_text(code) + " " + shape + " in " + model.name +
                        " and " + type_text(held.code) + " " + list_text(state.nominal ? Dims() : held.dims) +
                        " in the checkpoint: they do not belong together");
}

// Size and CRC-32 of the file of a base; of one of another size, the size alone.
std::pair<uint64_t, uint32_t> digest_of_base(const std::string& path, const std::string& model, uint64_t size) {
  constexpr uint64_t kPiece = 1 << 22;
  try {
    const OpenFile file(path);
    require_beside(path, model);
    uint32_t crc = 0;
    for (uint64_t start = 0; file.size == size && start < size; start += kPiece) {
      crc = crc32(file.read(start, std::min(kPiece, size - start)), crc);
    }
    return {file.size, crc};
  } catch (const OsError& error) {
    throw ModelError("cannot read the model " + path + ": " + error.what());
  }
}

// Refuses a graph that trains what the checkpoint does not.
void check_trainable(const ModelFile& model, const TrainingState& state, std::vector<std::string> names) {
  names.insert(names.end(), model.metadata.trainable.begin(), model.metadata.trainable.end());
  for (const std::string& name : names) {
    if (state.is_trainable(name)) continue;
    throw CheckpointError(model.name + " trains " + quoted(name) + ", which the checkpoint " +
                          (state.has(name) ? "has as frozen" : "does not have") + ": they do not belong together");
  }
}

}  // namespace

GraphSignature signature_of(const ModelFile& model, const TrainingState& state, GraphKind kind) {
  GraphSignature made;
  std::set<std::string> known;
  std::string rest;
  for (const ValueType& value : model.inputs) {
    if (removed_suffix(value.name, kBuffer, rest) && model.input(rest) != nullptr) {
      made.trained.push_back(rest);
      known.insert(value.name);
    }
    if (state.has(value.name)) {
      made.parameters.push_back(value);
      known.insert(value.name);
    }
    made.has_seed |= value.name == kRandomSeed;
  }
  known.insert({kLazyReset, kRandomSeed});
  if (kind == GraphKind::kFusedStep) {
    known.insert({kStep, kLearningRate});
    for (const ValueType& value : proximal_of(model, state)) known.insert(value.name);
    for (const ValueType& value : model.inputs) {
      const std::string parameter = parameter_of_momentum(value.name);
      if (!parameter.empty() && state.has(parameter) && model.input(parameter) != nullptr) known.insert(value.name);
    }
  }
  std::set<std::string> results;
  for (const ValueType& value : model.outputs) {
    if (!removed_suffix(value.name, kUpdated, rest) || known.count(rest) == 0) continue;
    made.updated.push_back(rest);
    results.insert(value.name);
  }
  for (const std::string& name : made.trained) results.insert(name + kAccumulated);
  const ValueType *flag = model.output(kUpdatedFlag), *sums = model.output(kFiniteCheck);
  if (flag != nullptr && sums != nullptr) {
    made.check = {*flag, *sums};
    results.insert({kUpdatedFlag, kFiniteCheck});
  }
  for (const ValueType& value : model.inputs) {
    if (known.count(value.name) == 0) made.inputs.push_back(value);
  }
  for (const ValueType& value : model.outputs) {
    if (results.count(value.name) == 0) made.outputs.push_back(value);
  }
  return made;
}

std::map<std::string, std::vector<ValueType>> momentums_of(const ModelFile& model) {
  std::map<std::string, std::vector<ValueType>> found;
  for (const ValueType& value : model.inputs) {
    const std::string parameter = parameter_of_momentum(value.name);
    if (!parameter.empty()) found[parameter].push_back(value);
  }
  for (auto& [parameter, values] : found) {
    const size_t prefix = parameter.size() + std::string_view(kMomentum).size();
    std::stable_sort(values.begin(), values.end(), [&](const ValueType& a, const ValueType& b) {
      return std::stoi(a.name.substr(prefix)) < std::stoi(b.name.substr(prefix));
    });
  }
  return found;
}

std::vector<ValueType> proximal_of(const ModelFile& model, const TrainingState& state) {
  std::vector<ValueType> found;
  if (model.input(kProximalMu) == nullptr) return found;
  std::string parameter;
  for (const ValueType& value : model.inputs) {
    const bool is_reference = removed_suffix(value.name, kReference, parameter) && state.has(parameter);
    if (is_reference || value.name == kProximalMu) found.push_back(value);
  }
  return found;
}

std::string check_generation(const ModelFile& model, const TrainingState& state, const std::string& earlier) {
  const GraphMetadata& about = model.metadata;
  if (about.format != kFormat) {
    throw ModelError(model.name + " is of format " + std::to_string(about.format) +
                     ", and this version of onnxtrain knows format " + std::to_string(kFormat) + ": use a newer one");
  }
  const bool is_held = state.generation.has_value();
  const std::string expected = is_held ? state.generation->identifier : earlier;
  if (about.generation.empty() || expected.empty()) return about.generation.empty() ? earlier : about.generation;
  if (about.generation != expected) {
    throw CheckpointError(model.name + " is of generation " + about.generation.substr(0, 8) + ", and " +
                          (is_held ? "the checkpoint is" : "the other graphs are") + " of " + expected.substr(0, 8) +
                          ": they do not belong together. Use files that one run of prepare wrote. A checkpoint can "
                          "be taken to other graphs with `state.generation = None`.");
  }
  if (!is_held) return about.generation;
  bool is_listed = false, is_format_listed = false;
  const std::pair<uint64_t, uint32_t> digest = {model.data.size, crc32(model.data.view())};
  for (const auto& [name, listed] : state.generation->files) {
    if (!ends_with(name, model.is_ort ? ".ort" : ".onnx")) continue;
    is_format_listed = true;
    is_listed |= listed == digest;
  }
  // A program may convert graphs to the ORT format by itself.
  if (is_format_listed && !is_listed) {
    throw ModelError(model.name +
                     " is damaged: its size or checksum is not the one that the checkpoint has for it. Copy it anew. "
                     "If you changed it on purpose, set `state.generation = None`.");
  }
  return about.generation;
}

void check_base(const ModelFile& model, TrainingState& state) {
  const std::string& base = model.metadata.base;
  if (base.empty() || model.path.empty()) return;
  const std::string path = beside(model.path, base);
  if (!is_file(path)) {
    throw ModelError(model.name + " takes its base from " + quoted(name_of(path)) +
                     " beside it, which is not there: copy it too");
  }
  if (!state.generation.has_value() || state.checked_bases.count(path) > 0) return;
  const auto listed = state.generation->files.find(kBaseData);
  if (listed == state.generation->files.end()) return;
  if (digest_of_base(path, model.path, listed->second.first) != listed->second) {
    throw ModelError(path +
                     " is damaged, or belongs to other graphs: its size or checksum is not the one that the checkpoint "
                     "has for it. Copy it anew. If you changed it on purpose, set `state.generation = None`.");
  }
  state.checked_bases.insert(path);
}

void check_belongs(const ModelFile& model, const TrainingState& state, const GraphSignature& signature) {
  const GraphMetadata& about = model.metadata;
  const std::vector<std::string> stored = model.stored();
  for (const auto* names : {&about.trainable, &about.frozen, &about.statistics, &stored}) {
    for (const std::string& name : *names) {
      if (state.has(name)) continue;
      throw CheckpointError(model.name + " has the parameter " + quoted(name) +
                            ", and the checkpoint does not: they do not belong together");
    }
  }
  std::vector<std::string> constants;
  for (const auto& item : model.initializers) constants.push_back(item.first);
  constants.insert(constants.end(), about.frozen.begin(), about.frozen.end());
  for (const std::string& name : constants) {
    if (!state.is_trainable(name)) continue;
    throw CheckpointError(quoted(name) + " is a constant in " + model.name +
                          ", and the checkpoint has it as a parameter that trains: they do not belong together");
  }
  std::vector<std::string> trained;
  for (const std::string& name : signature.trained) {
    const auto is_named = [&](const ValueType& value) { return value.name == name; };
    if (std::none_of(signature.inputs.begin(), signature.inputs.end(), is_named)) trained.push_back(name);
  }
  check_trainable(model, state, trained);
  for (const ValueType& value : signature.parameters) check_type(model, state, value.name, value.code, &value, nullptr);
  for (const std::string& name : stored) {
    const ExternalTensor& tensor = *model.external.find(name);
    check_type(model, state, name, tensor.code, nullptr, &tensor.dims);
  }
}

void check_trains(const ModelFile& model, const TrainingState& state, const GraphSignature& signature) {
  const std::set<std::string> trained(signature.trained.begin(), signature.trained.end());
  for (const auto& item : state.trainable) {
    if (trained.count(item.first) > 0) continue;
    throw CheckpointError("the checkpoint has " + quoted(item.first) + " as a parameter that trains, and " +
                          model.name + " has no gradient of it: they do not belong together");
  }
}

void check_updates(const ModelFile& model, const TrainingState& state) {
  for (const char* number : {kLearningRate, kStep}) {
    if (model.input(number) != nullptr) continue;
    throw ModelError(model.name + " is not an optimizer graph: it has no input " + quoted(number));
  }
  for (const auto& item : state.trainable) {
    const ValueType* input = model.input(item.first);
    if (input == nullptr || model.output(item.first + kUpdated) == nullptr) {
      throw CheckpointError(model.name + " does not update " + quoted(item.first) +
                            ", which the checkpoint has as a parameter that trains: they do not belong together");
    }
    check_type(model, state, item.first, input->code, input, nullptr);
  }
  std::vector<std::string> moments;
  for (const ValueType& value : model.inputs) {
    const std::string parameter = parameter_of_momentum(value.name);
    if (!parameter.empty() && state.has(parameter)) moments.push_back(parameter);
  }
  check_trainable(model, state, moments);
}

}  // namespace onnxtrain::device
