#include "state.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr const char* kGroup = "group0";
const std::string kTraining = std::string(kReservedPrefix) + "training";
const std::string kGeneration = std::string(kReservedPrefix) + "generation";

bool is_count(const Json* value) { return value != nullptr && value->kind == Json::kInteger && value->text[0] != '-'; }

// Whether the record beside the optimizer's tensors, which is not trusted, is what it should be.
bool is_training_record(const Json& record) {
  if (record.kind != Json::kObject) return false;
  const Json *random = record.find("random"), *rate = record.find("learning_rate");
  if (random != nullptr && (!is_count(random->find("seed")) || !is_count(random->find("draws")))) return false;
  for (const char* key : {"private", "scheduler"}) {
    const Json* value = record.find(key);
    if (value != nullptr && value->kind != Json::kObject) return false;
  }
  return rate == nullptr || (rate->is_number() && std::abs(rate->as_double()) <= double{FLT_MAX});
}

Json training_record_of(const Property& property) {
  Json record;
  const Text* text = std::get_if<Text>(&property);
  if (text == nullptr || !parse_json(**text, Numbers::kFromWords, record) || !is_training_record(record)) {
    throw CheckpointError(
        "the checkpoint holds a damaged record of the learning rate, the scheduler or the random numbers");
  }
  return record;
}

bool read_generation(const Json& found, Generation& generation) {
  const Json *identifier = found.find("id"), *files = found.find("files");
  if (identifier == nullptr || identifier->kind != Json::kText || !is_hexadecimal(identifier->text, 32)) return false;
  if (files == nullptr || files->kind != Json::kObject) return false;
  generation.identifier = identifier->text;
  for (const auto& [name, pair] : files->object) {
    uint64_t size = 0, crc = 0;
    if (pair.kind != Json::kList || pair.list.size() != 2) return false;
    if (pair.list[0].kind != Json::kInteger || pair.list[1].kind != Json::kInteger) return false;
    // Numbers that do not fit are those of no file.
    if (!pair.list[0].as_uint64(size)) size = UINT64_MAX;
    if (!pair.list[1].as_uint64(crc) || crc > UINT32_MAX) size = UINT64_MAX;
    generation.files[name] = {size, static_cast<uint32_t>(crc)};
  }
  return true;
}

Generation generation_of(const Property& property) {
  Json found;
  Generation generation;
  const Text* text = std::get_if<Text>(&property);
  if (text == nullptr || !parse_json(**text, Numbers::kPlain, found) || !read_generation(found, generation)) {
    throw CheckpointError("the checkpoint holds a damaged record of the graphs that it belongs to");
  }
  return generation;
}

template <class T, class IsBad>
uint64_t count_if(const Bytes& data, const IsBad& is_bad) {
  const T* first = reinterpret_cast<const T*>(data.data);
  return static_cast<uint64_t>(std::count_if(first, first + data.size / sizeof(T), is_bad));
}

// Memory of our own that graphs can be bound to.
Bytes aligned(const Bytes& data) {
  if (data.size == 0 || reinterpret_cast<uintptr_t>(data.data) % kAlignment == 0) return data;
  Bytes made = allocate(data.size);
  std::memcpy(made.data, data.data, static_cast<size_t>(data.size));
  return made;
}

}  // namespace

uint64_t count_bad(const Tensor& tensor) {
  if (tensor.data.size == 0) return 0;
  if (tensor.code == kFloatCode) return count_if<float>(tensor.data, [](float x) { return !std::isfinite(x); });
  if (tensor.code == kDoubleCode) return count_if<double>(tensor.data, [](double x) { return !std::isfinite(x); });
  if (tensor.code != kFloat16Code) return 0;
  return count_if<uint16_t>(tensor.data, [](uint16_t bits) { return (bits & 0x7C00) == 0x7C00; });
}

float finite_float(const char* name, double value) {
  const auto rounded = static_cast<float>(value);
  if (std::isfinite(rounded)) return rounded;
  throw ArgumentError(std::string(name) + " must be a finite number, not " +
                      shortest_digits(std::isfinite(value) ? static_cast<double>(rounded) : value));
}

// ---- variables ----

Variable::Variable(const RuntimePointer& runtime, int code, const Dims& dims, const Bytes& given)
    : code(code),
      dims(dims),
      data(given),
      runtime_(runtime),
      value_(value_over(runtime, given.data, given.size, code, dims)) {}

Held<OrtValue> Variable::in_shape(const Dims& wanted) const {
  if (wanted == dims) return value_;
  if (elements_of(wanted) != elements_of(dims)) return nullptr;
  return value_over(runtime_, data.data, data.size, code, wanted);
}

void Variable::clear() {
  if (data.size > 0) std::memset(data.data, 0, static_cast<size_t>(data.size));
}

VariablePointer new_variable(const RuntimePointer& runtime, int code, const Dims& dims) {
  return std::make_shared<Variable>(runtime, code, dims, allocate_zeros(data_size(code, dims)));
}

// ---- the schedule ----

double LinearSchedule::at(int64_t step) const {
  if (step < warmup) return rate * (static_cast<double>(step) / static_cast<double>(warmup));
  const auto falling = static_cast<double>(std::max<int64_t>(1, total - warmup));
  return 0.0 + (rate - 0.0) * std::max(0.0, static_cast<double>(total - warmup - (step - warmup)) / falling);
}

Json LinearSchedule::settings() const {
  Json made = Json::of_object();
  made.set("warmup_step_count", Json::of_integer(warmup));
  made.set("total_step_count", Json::of_integer(total));
  made.set("initial_lr", Json::of_float(rate));
  made.set("first_step", Json::of_integer(0));
  return made;
}

// ---- the state ----

TrainingState::TrainingState(CheckpointContent content)
    : trainable(std::move(content.trainable)),
      frozen(std::move(content.frozen)),
      groups(std::move(content.groups)),
      nominal(content.nominal),
      has_external_data_(content.has_external_data) {
  for (const auto& [name, value] : content.properties) {
    if (name == kTraining) {
      const Json record = training_record_of(value);
      if (const Json* found = record.find("random")) random = RandomSeeds(*found);
      if (const Json* found = record.find("private")) private_ = *found;
      if (const Json* found = record.find("learning_rate")) saved_rate = *found;
      if (const Json* found = record.find("scheduler")) saved_scheduler = *found;
      continue;
    }
    if (name == kGeneration) generation = generation_of(value);
    (starts_with(name, kReservedPrefix) ? reserved_ : properties)[name] = value;
  }
}

CheckpointContent TrainingState::content(bool with_optimizer) const {
  CheckpointContent made;
  made.trainable = trainable;
  made.frozen = frozen;
  made.nominal = nominal;
  made.has_external_data = has_external_data_;
  made.properties = properties;
  for (const auto& [name, value] : reserved_) {
    if (name != kGeneration || generation.has_value()) made.properties[name] = value;
  }
  if (!with_optimizer || nominal) return made;
  made.groups = groups;
  if (optimizer != nullptr && optimizer->moments.size() > 0) {
    made.groups = Named<OptimizerGroup>();
    made.groups[kGroup] = group();
  }
  made.properties[kTraining] = std::make_shared<const std::string>(to_json(training_record()));
  return made;
}

OptimizerGroup TrainingState::group() const {
  OptimizerGroup made;
  made.step = optimizer->count;
  made.initial_learning_rate = static_cast<float>(optimizer->initial_rate);
  for (const auto& [name, moments] : optimizer->moments) {
    std::vector<Tensor>& tensors = made.states[name];
    for (const VariablePointer& moment : moments) tensors.push_back(moment->tensor());
    // ONNX Runtime's SGD needs a state that it never reads.
    if (tensors.empty()) tensors.push_back({kFloatCode, {1}, allocate_zeros(sizeof(float)), {}});
  }
  return made;
}

Json TrainingState::training_record() const {
  Json record = Json::of_object();
  record.set("random", random.saved());
  if (!private_.object.empty()) record.set("private", private_);
  std::optional<Json> rate = saved_rate, scheduler = saved_scheduler;
  if (optimizer != nullptr) {
    rate = Json::of_float(double{*optimizer->rates->as<float>()});
    if (optimizer->schedule.has_value()) {
      scheduler = Json::of_object();
      scheduler->set("kind", Json::of_text("linear"));
      scheduler->set("state", optimizer->schedule->settings());
    }
  }
  if (rate.has_value()) record.set("learning_rate", *rate);
  if (scheduler.has_value() && !scheduler->object.empty()) record.set("scheduler", *scheduler);
  return record;
}

void TrainingState::require_finite(const std::string& what, bool with_optimizer) const {
  std::vector<std::pair<std::string, Tensor>> held;
  for (const auto& [name, value] : trainable) held.emplace_back(name, value);
  // Frozen parameters are not looked at: masks are infinite in many models.
  for (const auto& [name, variable] : variables_) {
    if (trainable.find(name) == nullptr) held.emplace_back(name, variable->tensor());
  }
  if (with_optimizer && optimizer != nullptr) {
    for (const auto& [name, tensors] : group().states) {
      for (size_t k = 0; k < tensors.size(); ++k) held.emplace_back(name + ".momentum" + std::to_string(k), tensors[k]);
    }
  }
  for (const auto& [name, value] : held) {
    const uint64_t bad = count_bad(value);
    if (bad == 0) continue;
    throw StateError(quoted(name) + " has " + std::to_string(bad) + " of " + std::to_string(elements_of(value.dims)) +
                     " elements that are infinite or not a number: " + what +
                     ". Go on from an earlier checkpoint, or pass allow_nonfinite=True.");
  }
}

void TrainingState::require_values() const {
  if (!nominal) return;
  throw StateError(
      "Please load the model parameters first. The checkpoint is nominal, it has names and no values: "
      "copy_buffer_to_parameters(buffer, trainable_only=False) gives it some");
}

std::vector<std::string> TrainingState::names() const {
  std::vector<std::string> made;
  for (const auto& item : trainable) made.push_back(item.first);
  for (const auto& item : frozen) made.push_back(item.first);
  std::sort(made.begin(), made.end());
  return made;
}

const Tensor* TrainingState::tensor(const std::string& name) const {
  const Tensor* found = trainable.find(name);
  return found != nullptr ? found : frozen.find(name);
}

const Tensor& TrainingState::require(const std::string& name) const {
  const Tensor* found = tensor(name);
  if (found == nullptr) throw ArgumentError("Parameter " + name + " not found.");
  if (nominal) {
    throw StateError(
        "Please load the parameter states first: the checkpoint is nominal, it has names and no values. Copy a buffer "
        "of all parameters into it with Module.copy_buffer_to_parameters(buffer, trainable_only=False)");
  }
  return *found;
}

void TrainingState::set(const std::string& name, const Tensor& value) {
  const Tensor& held = require(name);
  if (value.dims != held.dims) {
    throw StateError("the parameter " + quoted(name) + " has the shape " + list_text(held.dims) + ", not " +
                     list_text(value.dims));
  }
  if (value.code != held.code) {
    throw StateError("the parameter " + quoted(name) + " is " + type_text(held.code) + ", not " +
                     type_text(value.code));
  }
  if (value.data.size == 0) return;
  const auto size = static_cast<size_t>(value.data.size);
  if (is_trainable(name) || variables_.count(name) > 0) {
    std::memcpy(held.data.data, value.data.data, size);
    return;
  }
  if (std::memcmp(held.data.data, value.data.data, size) == 0) return;
  const auto constant = baked.find(name);
  if (constant != baked.end()) {
    throw StateError("the frozen parameter " + quoted(name) + " is a constant of " + constant->second +
                     ", which is in the ORT format and cannot be changed: use the graphs in the ONNX format");
  }
  // Sessions may be bound to the present memory.
  Bytes made = allocate(value.data.size);
  std::memcpy(made.data, value.data.data, size);
  frozen[name].data = made;
  changed_constants.insert(name);
  frozen_version += 1;
}

const VariablePointer& TrainingState::variable(const std::string& name) {
  VariablePointer& held = variables_[name];
  if (held != nullptr) return held;
  Tensor& found = is_trainable(name) ? trainable[name] : frozen[name];
  if (!element_type(found.code)->has_numpy || found.code == kStringCode) {
    variables_.erase(name);
    throw StateError("the parameter " + quoted(name) + " is of type " + element_type(found.code)->name +
                     ", which numpy does not have: it cannot change in training on this device");
  }
  found.data = aligned(found.data);
  held = std::make_shared<Variable>(runtime, found.code, found.dims, found.data);
  return held;
}

const VariablePointer& TrainingState::gradient(const std::string& name) {
  VariablePointer& held = gradients_[name];
  if (held == nullptr) {
    const Tensor& of = *tensor(name);
    held = new_variable(runtime, of.code, of.dims);
  }
  return held;
}

void TrainingState::complete(const Named<Tensor>& values) {
  for (const auto& [name, value] : values) (is_trainable(name) ? trainable : frozen)[name] = value;
  nominal = false;
  frozen_version += 1;
}

}  // namespace onnxtrain::device
