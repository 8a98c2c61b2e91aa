#include "session.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "export_model.h"
#include "inputs.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

TrainingSession::TrainingSession(const RuntimePointer& runtime, const Settings& settings,
                                 std::shared_ptr<TrainingState> state, GraphFiles files)
    : runtime_(runtime), settings_(std::make_shared<Settings>(settings)), state_(std::move(state)) {
  const Lock lock(state_->lock);
  if (state_->runtime == nullptr) state_->runtime = runtime;
  reset_flag_ = new_variable(runtime, kBoolCode, {1});
  seed_ = new_variable(runtime, kUint32Code, {2});
  train_ = executor(std::move(*files.train), GraphKind::kTraining);
  check_trains(train_.graph->model(), *state_, train_.signature);
  for (const std::string& name : train_.signature.trained) {
    if (!state_->is_trainable(name)) differentiated_inputs_.push_back(name);
  }
  if (files.eval.has_value()) eval_ = executor(std::move(*files.eval), GraphKind::kEvaluation);
  list_parameters();
  open_optimizer(files);
}

std::shared_ptr<Graph> TrainingSession::open(ModelFile model) {
  auto graph = std::make_shared<Graph>(std::move(model), settings_, state_);
  generation_ = check_generation(graph->model(), *state_, generation_);
  check_base(graph->model(), *state_);
  return graph;
}

TrainingSession::Executor TrainingSession::executor(ModelFile model, GraphKind kind) {
  Executor made;
  made.graph = open(std::move(model));
  made.signature = signature_of(made.graph->model(), *state_, kind);
  check_belongs(made.graph->model(), *state_, made.signature);
  const ModelFile& file = made.graph->model();
  for (const auto& item : state_->frozen) {
    // Frozen parameters inside of a file in the ORT format cannot change.
    if (file.is_ort && file.input(item.first) == nullptr) state_->baked[item.first] = file.name;
  }
  return made;
}

// ---- steps ----

Variables TrainingSession::parameters_of(const GraphSignature& signature) {
  Variables made;
  for (const ValueType& value : signature.parameters) made[value.name] = state_->variable(value.name);
  if (signature.has_seed) made[kRandomSeed] = seed_;
  return made;
}

std::vector<Held<OrtValue>> TrainingSession::checked(const Executor& executor, const Inputs& inputs) const {
  state_->require_values();
  return prepared(runtime_, executor.signature.inputs, inputs);
}

Outputs TrainingSession::run(Executor& executor, Binding& binding, const std::vector<Held<OrtValue>>& values,
                             const OrtRunOptions* options, const Outputs& given) {
  const bool has_seed = executor.signature.has_seed;
  if (has_seed) state_->random.next(seed_->as<uint32_t>());
  Outputs made;
  try {
    made = binding.run(values, options, given);
  } catch (...) {
    if (has_seed) state_->random.take_back();
    throw;
  }
  if (!binding.passed()) {
    state_->skipped_batches += 1;
    if (has_seed) state_->random.take_back();
  }
  return made;
}

Binding& TrainingSession::train_binding() {
  std::unique_ptr<Binding>& chosen = reset_ ? train_from_zero_ : train_.binding;
  if (chosen != nullptr) return *chosen;
  const GraphSignature& signature = train_.signature;
  const std::vector<std::string>& gradients = train_.graph->gradients();
  const std::set<std::string> direct(gradients.begin(), gradients.end());
  Variables state = parameters_of(signature), results;
  for (const std::string& name : signature.trained) {
    if (!state_->is_trainable(name)) continue;
    const VariablePointer& gradient = state_->gradient(name);
    state[name + kBuffer] = gradient;
    results[name + kAccumulated] = gradient;
    if (reset_ && direct.count(name + kGradient) > 0) results[name + kGradient] = gradient;
  }
  state[kLazyReset] = reset_flag_;
  for (const std::string& name : signature.updated) results[name + kUpdated] = state_->variable(name);
  std::vector<ValueType> inputs = signature.inputs, outputs = signature.outputs;
  for (const std::string& name : differentiated_inputs_) {
    const ValueType* made = train_.graph->model().output(name + kAccumulated);
    if (made == nullptr) {
      throw ModelError(train_.graph->name() + " has a buffer for the gradient of its input " + quoted(name) +
                       ", and no output for it: prepare the model anew");
    }
    inputs.push_back(*train_.graph->model().input(name + kBuffer));
    outputs.push_back(*made);
  }
  chosen = std::make_unique<Binding>(train_.graph, runtime_, std::move(state), std::move(results), std::move(inputs),
                                     outputs, signature.check);
  return *chosen;
}

// What the gradient of an input is added to, in the shape that the input has.
Held<OrtValue> TrainingSession::input_buffer(const std::string& name, const std::vector<Held<OrtValue>>& values) const {
  size_t index = 0;
  while (train_.signature.inputs[index].name != name) ++index;
  const ValueShape given = shape_of(runtime_, values[index].get());
  const auto earlier = input_gradients_.find(name);
  if (earlier != input_gradients_.end() && shape_of(runtime_, earlier->second.get()).dims == given.dims) {
    return earlier->second;
  }
  Held<OrtValue> made = new_value(runtime_, given.code, given.dims);
  const auto size = static_cast<size_t>(data_size(given.code, given.dims));
  if (size > 0) std::memset(data_of(runtime_, made.get()), 0, size);
  return made;
}

Held<OrtValue> TrainingSession::input_gradient(const std::string& name) const {
  const auto found = input_gradients_.find(name);
  return found == input_gradients_.end() ? nullptr : found->second;
}

Outputs TrainingSession::train_step(const Inputs& inputs, const OrtRunOptions* options, const Outputs& given) {
  const Lock lock(state_->lock);
  std::vector<Held<OrtValue>> values = checked(train_, inputs);
  std::vector<Held<OrtValue>> buffers;
  for (const std::string& name : differentiated_inputs_) buffers.push_back(input_buffer(name, values));
  values.insert(values.end(), buffers.begin(), buffers.end());
  *reset_flag_->as<bool>() = reset_;
  Binding& binding = train_binding();
  Outputs made = run(train_, binding, values, options, given);
  const size_t count = train_.signature.outputs.size();
  if (binding.passed()) {
    for (size_t i = 0; i < differentiated_inputs_.size(); ++i) {
      input_gradients_[differentiated_inputs_[i]] = made[count + i];
    }
    made.resize(count);
    reset_ = state_->has_stale_gradients = false;
    return made;
  }
  made.resize(count);
  // No step may use what is there: gradients of before the reset, or none.
  state_->has_stale_gradients |= reset_;
  if (reset_) {
    for (const std::string& name : train_.graph->gradients()) {
      const std::string parameter = name.substr(0, name.size() - std::string_view(kGradient).size());
      if (state_->is_trainable(parameter)) state_->gradient(parameter)->clear();
    }
  }
  return made;
}

Outputs TrainingSession::eval_step(const Inputs& inputs, const OrtRunOptions* options, const Outputs& given) {
  const Lock lock(state_->lock);
  if (eval_.graph == nullptr) throw StateError("there is no evaluation graph: pass eval_model");
  const std::vector<Held<OrtValue>> values = checked(eval_, inputs);
  const GraphSignature& signature = eval_.signature;
  if (eval_.binding == nullptr) {
    eval_.binding = std::make_unique<Binding>(eval_.graph, runtime_, parameters_of(signature), Variables(),
                                              signature.inputs, signature.outputs, signature.check);
  }
  return run(eval_, *eval_.binding, values, options, given);
}

void TrainingSession::lazy_reset_gradients() {
  const Lock lock(state_->lock);
  reset_ = true;
}

void TrainingSession::optimizer_step(const OrtRunOptions* options) {
  const Lock lock(state_->lock);
  if (!can_update_alone_) throw StateError("there is no optimizer graph: pass optimizer_model, or call step");
  state_->require_values();
  OptimizerMemory& held = memory();
  if (state_->has_stale_gradients) {
    held.skipped += 1;
    return;
  }
  if (optimizer_binding_ == nullptr) {
    Variables state, results;
    bind_updates(state, results);
    for (const auto& item : state_->trainable) {
      if (optimizer_->model().input(item.first + kGradient) == nullptr) {
        throw StateError(optimizer_->name() +
                         " is the graph of a whole step, which takes no gradients: pass optimizer_model.onnx, or call "
                         "TrainingSession.step");
      }
      state[item.first + kGradient] = state_->gradient(item.first);
    }
    std::vector<ValueType> flags;
    for (const ValueType& value : optimizer_->model().outputs) {
      if (results.count(value.name) == 0) flags.push_back(value);
    }
    optimizer_binding_ = std::make_unique<Binding>(optimizer_, runtime_, std::move(state), std::move(results),
                                                   std::vector<ValueType>(), std::vector<ValueType>(), flags);
  }
  *held.steps->as<int64_t>() = held.count + 1;
  optimizer_binding_->run({}, options, {});
  (optimizer_binding_->passed() ? held.count : held.skipped) += 1;
}

Outputs TrainingSession::step(const Inputs& inputs, const OrtRunOptions* options, const Outputs& given) {
  const Lock lock(state_->lock);
  if (fused_.graph == nullptr) return separate_step(inputs, options, given);
  const std::vector<Held<OrtValue>> values = checked(fused_, inputs);
  const GraphSignature& signature = fused_.signature;
  OptimizerMemory& held = memory();
  if (fused_.binding == nullptr) {
    Variables state = parameters_of(signature), results;
    bind_updates(state, results);
    for (const std::string& name : signature.updated) results[name + kUpdated] = state.at(name);
    fused_.binding = std::make_unique<Binding>(fused_.graph, runtime_, std::move(state), std::move(results),
                                               signature.inputs, signature.outputs, signature.check);
  }
  *held.steps->as<int64_t>() = held.count + 1;
  Outputs made = run(fused_, *fused_.binding, values, options, given);
  (fused_.binding->passed() ? held.count : held.skipped) += 1;
  return made;
}

// A step without a graph for it: gradients start from zero, and the accumulated ones are restored.
Outputs TrainingSession::separate_step(const Inputs& inputs, const OrtRunOptions* options, const Outputs& given) {
  if (!can_update_alone_) throw StateError("there is no optimizer graph: pass optimizer_model, or call step");
  std::map<std::string, std::vector<uint8_t>> kept;
  const bool was_reset = reset_, were_stale = state_->has_stale_gradients;
  if (!was_reset) {
    for (const std::string& name : train_.signature.trained) {
      if (!state_->is_trainable(name)) continue;
      const Bytes& data = state_->gradient(name)->data;
      kept[name].assign(data.data, data.data + data.size);
    }
  }
  const auto restore = [&] {
    reset_ = was_reset;
    for (const auto& [name, bytes] : kept) {
      if (!bytes.empty()) std::memcpy(state_->gradient(name)->data.data, bytes.data(), bytes.size());
    }
    state_->has_stale_gradients = were_stale;
  };
  reset_ = true;
  Outputs made;
  try {
    made = train_step(inputs, options, given);
    optimizer_step(options);
  } catch (...) {
    restore();
    throw;
  }
  restore();
  return made;
}

// ---- parameters ----

void TrainingSession::list_parameters() {
  const ModelFile& model = train_.graph->model();
  std::vector<std::string> rest;
  std::set<std::string> listed;
  for (const ValueType& value : train_.signature.parameters) {
    (state_->is_trainable(value.name) ? trained_ : rest).push_back(value.name);
    listed.insert(value.name);
    if (value.is_fixed()) shapes_[value.name] = value.sizes();
  }
  all_ = trained_;
  all_.insert(all_.end(), rest.begin(), rest.end());
  for (const std::string& name : model.metadata.frozen) {
    if (state_->has(name) && listed.insert(name).second) all_.push_back(name);
  }
  for (const std::string& name : state_->names()) {
    if (listed.insert(name).second) all_.push_back(name);
  }
  for (const std::string& name : all_) {
    if (shapes_.count(name) > 0) continue;
    const ExternalTensor* external = model.external.find(name);
    if (!state_->nominal)
      shapes_[name] = state_->tensor(name)->dims;
    else if (external != nullptr)
      shapes_[name] = external->dims;
  }
}

const Dims& TrainingSession::shape_of_parameter(const std::string& name) const {
  const auto found = shapes_.find(name);
  if (found != shapes_.end()) return found->second;
  throw StateError("the shape of " + quoted(name) +
                   " is neither in the training graph nor in the nominal checkpoint: use a complete checkpoint");
}

uint64_t TrainingSession::parameters_size(bool trainable_only) const {
  uint64_t size = 0;
  for (const std::string& name : parameter_names(trainable_only)) size += elements_of(shape_of_parameter(name));
  return size;
}

void TrainingSession::require_floats(const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    const int code = state_->tensor(name)->code;
    if (code == kFloatCode) continue;
    throw StateError("the parameter " + quoted(name) + " is " + type_text(code) + "; only float32 goes into a buffer");
  }
}

void TrainingSession::copy_parameters_to(float* buffer, bool trainable_only) {
  const Lock lock(state_->lock);
  state_->require_values();
  require_floats(parameter_names(trainable_only));
  for (const std::string& name : parameter_names(trainable_only)) {
    const Bytes& data = state_->tensor(name)->data;
    if (data.size > 0) std::memcpy(buffer, data.data, static_cast<size_t>(data.size));
    buffer += data.size / sizeof(float);
  }
}

void TrainingSession::copy_to_parameters(const float* buffer, bool trainable_only) {
  const Lock lock(state_->lock);
  if (state_->nominal && trainable_only) {
    throw StateError("Please load the model parameters first. A nominal state needs all of them: trainable_only=False");
  }
  require_floats(parameter_names(trainable_only));
  Named<Tensor> values;
  for (const std::string& name : parameter_names(trainable_only)) {
    const Dims& dims = shape_of_parameter(name);
    Bytes data = allocate(data_size(kFloatCode, dims));
    if (data.size > 0) std::memcpy(data.data, buffer, static_cast<size_t>(data.size));
    buffer += elements_of(dims);
    values[name] = {kFloatCode, dims, data, {}};
  }
  if (state_->nominal) {
    state_->complete(values);
    return;
  }
  for (const auto& [name, value] : values) state_->set(name, value);
}

// ---- export ----

void TrainingSession::export_model(const std::string& path, const std::vector<std::string>& names) {
  const Lock lock(state_->lock);
  if (eval_.graph == nullptr) throw StateError("there is no evaluation graph to export: pass eval_model_uri");
  state_->require_values();
  state_->require_finite("nothing was exported", false);
  ExportRequest request;
  request.names = names;
  for (const auto& [name, value] : state_->properties) {
    const Text* text = std::get_if<Text>(&value);
    if (text != nullptr && starts_with(name, kModelPrefix)) request.about[name] = **text;
  }
  device::export_model(
      eval_.graph->model(), [this](const std::string& name) { return state_->tensor(name); },
      {runtime_, settings_->env}, path, request);
}

const std::vector<ValueType>& TrainingSession::inputs(bool training) const {
  return (training ? train_ : eval_).signature.inputs;
}

const std::vector<ValueType>& TrainingSession::outputs(bool training) const {
  return (training ? train_ : eval_).signature.outputs;
}

}  // namespace onnxtrain::device
