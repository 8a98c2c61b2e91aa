#include "export_model.h"

#include <algorithm>

#include "export_store.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

std::string all_quoted(const std::vector<std::string>& names) {
  std::vector<std::string> made;
  for (const std::string& name : names) made.push_back(quoted(name));
  return joined(made, ", ");
}

void check_names(const std::vector<std::string>& names, const ModelParts& parts) {
  if (names.empty()) throw ArgumentError("graph_output_names is empty: name at least one value");
  if (Names(names.begin(), names.end()).size() != names.size()) {
    throw ArgumentError("graph_output_names has a name twice: " + all_quoted(names));
  }
  const Names known = parts.value_names();
  std::vector<std::string> unknown, outputs;
  for (const std::string& name : names) {
    if (known.count(name) == 0) unknown.push_back(name);
  }
  if (unknown.empty()) return;
  for (const auto& item : parts.outputs) outputs.push_back(item.first);
  throw ArgumentError(parts.source + " has no value " + all_quoted(unknown) + "; its outputs are " +
                      all_quoted(outputs));
}

// Refuses a place where the model cannot be, or that training reads.
void check_target(const std::string& path, const ModelFile& model) {
  require_writable(path);
  const std::string name = name_of(path);
  if (name.size() > 4 && ends_with(name, ".ort")) {  // onnxruntime tells the formats apart by the name
    throw ArgumentError(quoted(name) +
                        " would not be loaded: the name of a file in the ORT format, and of no other, ends in .ort; "
                        "say format='ort', or choose another name");
  }
  if (model.path.empty()) return;
  Names read = {name_of(model.path)};
  if (!model.metadata.checkpoint.empty()) read.insert(model.metadata.checkpoint);
  for (const auto& item : model.external) read.insert(item.second.location);
  for (const std::string& file : read) {
    if (is_same_file(beside(model.path, file), path)) {
      throw ArgumentError(path + " is what training reads: export to another file");
    }
  }
}

}  // namespace

void export_model(const ModelFile& model, const Values& values, const Inference& inference, const std::string& given,
                  const ExportRequest& request) {
  const std::string path = tidy_path(given);
  check_target(path, model);
  ModelParts parts = take_apart(model);
  check_names(request.names, parts);
  for (const auto& [key, value] : request.about) parts.properties[key] = value;
  fold(model, parts, request.names, values, inference);
  const ModelLayout layout = Cut(model, parts, request.names, values).layout(inference);
  if (layout.tensor_size() >= request.external_data_threshold) {
    store_with_data(path, [&](const std::string& location) { return layout.file(location); }, layout.external_data());
  } else {
    store_model(path, layout.file());
  }
}

bool is_parameter(const ModelFile& model, const Values& values, const std::string& name) {
  const auto has = [&](const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  return values(name) != nullptr || has(model.metadata.trainable) || has(model.metadata.statistics);
}

Cut::Cut(const ModelFile& model, const ModelParts& parts, const std::vector<std::string>& outputs, const Values& values)
    : model_(model),
      parts_(parts),
      outputs_(outputs),
      values_(values),
      reader_(model.name),
      files_(model.path),
      needed_(find_needed(parts, outputs)) {
  const Names known = parts.value_names();
  std::vector<std::string> lost;
  std::set_difference(needed_.values.begin(), needed_.values.end(), known.begin(), known.end(),
                      std::back_inserter(lost));
  if (lost.empty()) return;
  lost.resize(std::min<size_t>(lost.size(), 8));
  throw ModelError(model.name + ": nothing in the graph makes " + all_quoted(lost) + ", which it reads");
}

ModelLayout Cut::layout(const Inference& inference) { return filled(output_types(inference)); }

ModelLayout Cut::untyped_layout() {
  Types types;
  for (const std::string& name : outputs_) types.push_back(bytes_field(1, name));
  return filled(std::move(types));
}

ModelLayout Cut::filled(Types outputs) {
  std::vector<std::string> inputs;
  std::vector<std::string_view> copied;
  std::vector<StoredTensor> tensors;
  Names replaced;
  for (const auto& [name, data] : parts_.inputs) {
    if (!needed_.has(name)) continue;
    if (!is_parameter(model_, values_, name)) {
      inputs.emplace_back(data);
      continue;
    }
    const Tensor* value = values_(name);
    if (value == nullptr) {
      throw CheckpointError("there is no value for the parameter " + quoted(name) + " of " + model_.name +
                            ": load the checkpoint that belongs to the model");
    }
    tensors.push_back(checked_tensor(name, *value, read_value_type(reader_, data, "input")));
    replaced.insert(name);
  }
  for (const auto& [name, data] : parts_.initializers) {
    if (!needed_.has(name) || replaced.count(name) > 0) continue;
    const ExternalTensor* external = model_.external.find(name);
    if (const Tensor* value = values_(name)) {
      const auto [code, dims] = read_tensor_type(reader_, data, name);
      tensors.push_back(checked_tensor(name, *value, type_of(code, dims)));
    } else if (external != nullptr) {
      tensors.push_back(from_file(*external));
    } else {
      copied.push_back(data);
    }
  }
  for (const auto& [name, value] : parts_.computed) {
    if (needed_.has(name)) tensors.push_back({name, value});
  }
  ModelLayout made = assembled(outputs_, std::move(inputs), std::move(outputs));
  made.copied = std::move(copied);
  made.tensors = std::move(tensors);
  return made;
}

ModelLayout Cut::assembled(const std::vector<std::string>& names, std::vector<std::string> inputs,
                           Types outputs) const {
  ModelLayout made;
  made.head = parts_.head;
  made.properties = {parts_.properties.begin(), parts_.properties.end()};
  for (const auto& [domain, data] : parts_.opsets) {
    if (needed_.domains.count(domain) > 0) made.opsets.push_back(data);
  }
  made.functions = needed_.functions;
  made.graph_head = parts_.graph_head;
  made.inputs = std::move(inputs);
  made.outputs = std::move(outputs);
  Names inner;
  for (const Node* node : needed_.nodes) {
    made.nodes.push_back(node->data);
    inner.insert(node->outputs.begin(), node->outputs.end());
  }
  for (const std::string& name : names) inner.erase(name);
  for (const auto& [name, data] : parts_.value_infos) {
    if (inner.count(name) > 0) made.value_infos.push_back(data);
  }
  for (const auto& [name, data] : parts_.quantization) {
    if (needed_.has(name)) made.quantization.push_back(data);
  }
  for (const auto& [name, data] : parts_.sparse) {
    if (needed_.has(name)) made.sparse.push_back(data);
  }
  return made;
}

StoredTensor Cut::from_file(const ExternalTensor& tensor) {
  if (model_.path.empty()) {
    throw ModelError(model_.name + ": initializer " + quoted(tensor.name) + " is in the file " +
                     quoted(tensor.location) +
                     ", which a model in memory has not: give its value, or read the model from its path");
  }
  return {tensor.name, {tensor.code, tensor.dims, files_.read(tensor), {}}};
}

}  // namespace onnxtrain::device
