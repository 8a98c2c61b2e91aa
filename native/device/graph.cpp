#include "graph.h"

#include <mutex>
#include <set>

#include "files.h"
#include "kernels.h"
#include "model_layout.h"
#include "session_types.h"
#include "signature.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr size_t kManyNodes = 3000;
constexpr int kErrorsOnly = 3, kNoOptimization = 0;
constexpr int kModelGraph = 7, kModelFunction = 25, kGraphInitializer = 5, kGraphOutput = 12;
constexpr int kFunctionName = 1, kFunctionDomain = 10;
constexpr const char* kFunctions = "ai.onnxtrain";  // the domain of functions that kernels stand in for

// The message of an initializer with other elements, of the same type and shape.
std::string with_elements(WireReader& reader, std::string_view message, const Tensor& tensor) {
  constexpr int kDims = 1, kType = 2, kName = 8, kRaw = 9;
  std::string made;
  reader.each(message, "initializer", [&](const WireField& field) {
    if (field.number == kDims || field.number == kType || field.number == kName) {
      made += message.substr(field.start, field.end - field.start);
    }
  });
  return made + bytes_field(kRaw, tensor.data.view());
}

}  // namespace

Graph::Graph(ModelFile model, std::shared_ptr<Settings> settings, std::shared_ptr<TrainingState> state)
    : model_(std::move(model)), settings_(std::move(settings)), state_(std::move(state)), base_files_(model_.path) {
  if (model_.is_ort) take_interface();
  std::set<std::string> seen;
  for (const std::string& name : model_.metadata.gradients) {
    if (model_.is_ort) break;  // such a file cannot be changed
    if (!ends_with(name, kGradient) || model_.input(name) != nullptr || model_.output(name) != nullptr) continue;
    const std::string parameter = name.substr(0, name.size() - std::string_view(kGradient).size());
    if (model_.input(parameter + kBuffer) != nullptr && seen.insert(name).second) gradients_.push_back(name);
  }
}

const Held<OrtSession>& Graph::session() {
  if (is_current()) return session_;
  session_ = nullptr;  // frees the memory of the old one first
  // A file in the ORT format has no functions that kernels could stand in for.
  const bool has_kernels = settings_->native && !model_.is_ort && !model_.metadata.kernels.empty();
  if (has_kernels) {
    try {
      session_ = new_session(true);
    } catch (const ModelError&) {
      session_ = nullptr;  // what is wrong with the graph itself is raised below
    }
  }
  if (session_ == nullptr) session_ = new_session(false);
  version_ = state_->frozen_version;
  return session_;
}

Held<OrtSessionOptions> Graph::new_options() const {
  const RuntimePointer& runtime = state_->runtime;
  const OrtApi* api = runtime->api;
  const Held<OrtSessionOptions> options = training_options();
  if (settings_->threads > 0) {
    runtime->check(ONNXTRAIN_CALL(api, SetIntraOpNumThreads)(options.get(), settings_->threads));
  }
  if (settings_->has_memory_limit) {
    runtime->check(ONNXTRAIN_CALL(api, AddSessionConfigEntry)(options.get(), "session.use_env_allocators", "1"));
  }
  return options;
}

// The user's own options, or those that are good for training.
Held<OrtSessionOptions> Graph::training_options() const {
  const RuntimePointer& runtime = state_->runtime;
  const OrtApi* api = runtime->api;
  OrtSessionOptions* made = nullptr;
  if (settings_->options != nullptr) {
    runtime->check(ONNXTRAIN_CALL(api, CloneSessionOptions)(settings_->options.get(), &made));
    return hold(runtime, made);
  }
  runtime->check(ONNXTRAIN_CALL(api, CreateSessionOptions)(&made));
  Held<OrtSessionOptions> options = hold(runtime, made);
  runtime->check(ONNXTRAIN_CALL(api, SetSessionLogSeverityLevel)(made, kErrorsOnly));
  // A plan of the memory made beforehand takes up to twice as much.
  runtime->check(ONNXTRAIN_CALL(api, DisableMemPattern)(made));
  const bool has_kernels = settings_->native && !served_functions(model_.metadata.kernels).empty();
  if (model_.node_count > kManyNodes && has_kernels) {
    // Each pass of the optimiser walks all nodes, and kernels stand where it would fuse.
    runtime->check(ONNXTRAIN_CALL(api, SetSessionGraphOptimizationLevel)(made, kNoOptimization));
  }
  for (const ValueType& value : model_.inputs) {
    if (model_.input(value.name + kGradient) == nullptr) continue;
    // The training and the optimizer graph take turns. Threads of the optimizer that spin, in case more
    // work comes, keep those of the other from theirs.
    runtime->check(ONNXTRAIN_CALL(api, AddSessionConfigEntry)(made, "session.force_spinning_stop", "1"));
    break;
  }
  return options;
}

// The elements of a tensor of the base of low-rank factors, which all graphs share.
Bytes Graph::base_data(const ExternalTensor& tensor) {
  if (model_.path.empty()) {
    throw ModelError(name() + " was given as bytes, and takes its base from the file " + quoted(model_.metadata.base) +
                     " beside it: give the path of the graph");
  }
  const std::string place =
      beside(model_.path, tensor.location) + ":" + std::to_string(tensor.offset) + ":" + std::to_string(tensor.length);
  const auto found = state_->base.find(place);
  if (found != state_->base.end()) return found->second;
  return state_->base[place] = base_files_.read(tensor);
}

// Asks onnxruntime for what a file in the ORT format does not tell us.
void Graph::take_interface() {
  session_ = new_session(false);
  version_ = state_->frozen_version;
  const SessionInterface found =
      interface_of(state_->runtime, session_.get(), {kMetadataKey, kFactorsKey, kFingerprintKey});
  take_values(model_, found.inputs, found.outputs);
  for (const auto& [key, text] : found.metadata) {
    if (key == kMetadataKey) {
      read_metadata(model_, text);
    } else {
      model_.properties[key] = text;
    }
  }
}

// The graph with the values that constants have now.
std::string Graph::graph_with_constants(WireReader& reader, std::string_view graph,
                                        const std::set<std::string>& changed) const {
  std::string made;
  reader.each(graph, "graph", [&](const WireField& field) {
    std::string name;
    if (field.number == kGraphInitializer) {
      name = reader.last_text(reader.pick(field.data, "initializer", {8}), 8, "initializer.name");
    }
    if (changed.count(name) > 0) {
      made += bytes_field(kGraphInitializer, with_elements(reader, field.data, *state_->frozen.find(name)));
    } else {
      made += graph.substr(field.start, field.end - field.start);
    }
  });
  return made;
}

// What onnxruntime is given. It would check the bodies of functions that kernels stand in for, a third of the
// time that it loads, so they are left out.
std::string Graph::source(bool with_kernels) const {
  std::set<std::string> changed;
  for (const std::string& name : state_->changed_constants) {
    if (model_.initializers.find(name) != nullptr && model_.external.find(name) == nullptr) changed.insert(name);
  }
  const std::string_view data = model_.data.view();
  if (model_.is_ort) return std::string(data);
  const std::set<std::string> served =
      with_kernels ? served_functions(model_.metadata.kernels) : std::set<std::string>();
  WireReader reader(model_.name);
  const auto is_served = [&](std::string_view function) {
    const WireFields named = reader.pick(function, "function", {kFunctionName, kFunctionDomain});
    return reader.last_text(named, kFunctionDomain, "function.domain") == kFunctions &&
           served.count(reader.last_text(named, kFunctionName, "function.name")) > 0;
  };
  std::string made;
  reader.each(data, "model", [&](const WireField& part) {
    if (part.number == kModelFunction && !served.empty() && is_served(part.data)) return;
    if (part.number == kModelGraph && !changed.empty()) {
      made += bytes_field(kModelGraph, graph_with_constants(reader, part.data, changed));
    } else {
      made += data.substr(part.start, part.end - part.start);
    }
  });
  // A message that occurs twice is one with the entries of both, by the rules of protobuf.
  std::string outputs;
  for (const std::string& name : gradients_) {
    const std::string parameter = name.substr(0, name.size() - std::string_view(kGradient).size());
    outputs += bytes_field(kGraphOutput, value_info(name, *model_.input(parameter + kBuffer)));
  }
  if (!outputs.empty()) made += bytes_field(kModelGraph, outputs);
  return made;
}

Held<OrtSession> Graph::new_session(bool with_kernels) {
  const RuntimePointer& runtime = state_->runtime;
  const Held<OrtSessionOptions> options = new_options();
  std::vector<const char*> names;
  std::vector<const OrtValue*> values;
  constants_.clear();
  for (const auto& item : model_.external) {
    if (model_.is_in_base(item.second)) {
      const Bytes data = base_data(item.second);
      constants_.push_back(value_over(runtime, data.data, data.size, item.second.code, item.second.dims));
      names.push_back(item.first.c_str());
      values.push_back(constants_.back().get());
      continue;
    }
    const Tensor* held = state_->frozen.find(item.first);
    if (held == nullptr) {
      throw ModelError(name() + " takes the frozen parameter " + quoted(item.first) +
                       " from the checkpoint, which does not have it: they do not belong together");
    }
    constants_.push_back(value_over(runtime, held->data.data, held->data.size, held->code, held->dims));
    names.push_back(item.first.c_str());
    values.push_back(constants_.back().get());
  }
  try {
    if (!names.empty()) {
      const auto add = ONNXTRAIN_CALL(runtime->api, AddExternalInitializers);
      runtime->check(add(options.get(), names.data(), values.data(), names.size()));
    }
    if (with_kernels) register_kernels(runtime, options.get(), model_.metadata.kernels);
    const std::string bytes = source(with_kernels);
    OrtSession* made = nullptr;
    const auto create = ONNXTRAIN_CALL(runtime->api, CreateSessionFromArray);
    runtime->check(create(settings_->env, bytes.data(), bytes.size(), options.get(), &made));
    return hold(runtime, made);
  } catch (const Error& error) {
    throw ModelError("onnxruntime does not load " + name() + ": " + error.what());
  }
}

}  // namespace onnxtrain::device
