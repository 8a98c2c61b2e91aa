// What a session has of an optimizer: its memory, its learning rate, its schedule.
#include <algorithm>
#include <cmath>

#include "session.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

constexpr const char* kGroup = "group0";
constexpr float kDefaultRate = 0.001f;
constexpr int64_t kMostSteps = int64_t{1} << 53;  // more than anybody takes; graphs compute with them as floats

void require_count(const std::string& name, size_t wanted, size_t held) {
  if (wanted == held) return;
  throw CheckpointError("the optimizer keeps " + std::to_string(wanted) +
                        " tensors for each parameter, and the checkpoint has " + std::to_string(held) + " for " +
                        quoted(name) +
                        ": it was saved with another optimizer. Load the checkpoint without its optimizer state (save "
                        "it with include_optimizer_state=False), or use that optimizer");
}

bool is_zero(const Tensor& tensor) {
  for (uint64_t i = 0; i < tensor.data.size; ++i) {
    const bool is_sign = tensor.code == kFloatCode && i % 4 == 3;  // -0 is zero, too
    if ((tensor.data.data[i] & (is_sign ? 0x7F : 0xFF)) != 0) return false;
  }
  return true;
}

// The moments of a parameter that were saved; none without a saved group.
std::vector<Tensor> saved_moments(const OptimizerGroup* group, const std::string& name,
                                  const std::vector<ValueType>& wanted, const Dims& dims) {
  if (group == nullptr) return {};
  const std::vector<Tensor>* held = group->states.find(name);
  if (held == nullptr) {
    throw CheckpointError("the checkpoint has an optimizer state, but none for the parameter " + quoted(name) +
                          ": it is of another model");
  }
  if (wanted.empty() && held->size() == 1 && element_type((*held)[0].code)->has_numpy && is_zero((*held)[0])) {
    return {};  // as SGD without momentum is saved
  }
  require_count(name, wanted.size(), held->size());
  for (size_t k = 0; k < wanted.size(); ++k) {
    if ((*held)[k].code == wanted[k].code && (*held)[k].dims == dims) continue;
    throw CheckpointError("the checkpoint has moments of " + quoted(name) +
                          " with another shape or type than the parameter: its optimizer state is of another model");
  }
  return *held;
}

// Whether two values of settings are equal; numbers of both kinds are compared.
bool is_equal(const Json* a, const Json& b) {
  if (a == nullptr || !a->is_number()) return false;
  return a->as_double() == b.as_double();
}

}  // namespace

void TrainingSession::open_optimizer(GraphFiles& files) {
  can_update_alone_ = files.optimizer.has_value();
  const bool is_fused_only = !can_update_alone_ && files.step.has_value();
  if (!can_update_alone_ && !is_fused_only) return;
  optimizer_ = open(is_fused_only ? *files.step : std::move(*files.optimizer));
  check_updates(optimizer_->model(), *state_);
  const auto wanted = momentums_of(optimizer_->model());
  if (state_->optimizer == nullptr) {
    auto made = std::make_shared<OptimizerMemory>();
    made->rates = new_variable(runtime_, kFloatCode, {1});
    made->steps = new_variable(runtime_, kInt64Code, {1});
    *made->rates->as<float>() = kDefaultRate;
    if (state_->saved_rate.has_value()) *made->rates->as<float>() = static_cast<float>(state_->saved_rate->as_double());
    if (const OptimizerGroup* group = state_->groups.find(kGroup)) {
      if (!std::isfinite(group->initial_learning_rate) || group->step >= kMostSteps) {
        throw CheckpointError("the checkpoint has " + shortest_digits(double{group->initial_learning_rate}) +
                              " as initial learning rate and " + std::to_string(group->step) +
                              " as number of steps: its optimizer state is damaged");
      }
      made->count = group->step;
      made->initial_rate = double{group->initial_learning_rate};
    }
    state_->optimizer = made;
  }
  for (const auto& [name, moments] : state_->optimizer->moments) {
    const auto found = wanted.find(name);
    require_count(name, found == wanted.end() ? 0 : found->second.size(), moments.size());
  }
  if (!proximal_of(optimizer_->model(), *state_).empty()) proximal_mu_ = new_variable(runtime_, kFloatCode, {1});
  allocate_moments();
  if (!files.step.has_value()) return;
  fused_ = executor(std::move(*files.step), GraphKind::kFusedStep);
  check_updates(fused_.graph->model(), *state_);
  const auto of_step = momentums_of(fused_.graph->model());
  for (const auto& item : state_->trainable) {
    const auto a = of_step.find(item.first), b = wanted.find(item.first);
    const size_t in_step = a == of_step.end() ? 0 : a->second.size(), own = b == wanted.end() ? 0 : b->second.size();
    if (in_step == own) continue;
    throw ModelError(fused_.graph->name() + " keeps " + std::to_string(in_step) + " tensors for " + quoted(item.first) +
                     ", and " + optimizer_->name() + " " + std::to_string(own) + ": they are of different optimizers");
  }
}

// Makes the moments: those of the checkpoint, or zeros.
void TrainingSession::allocate_moments() {
  OptimizerMemory& held = memory();
  if (held.moments.size() > 0 || state_->nominal) return;
  const auto wanted = momentums_of(optimizer_->model());
  const OptimizerGroup* group = state_->groups.find(kGroup);
  Named<std::vector<VariablePointer>> made;
  for (const auto& [name, parameter] : state_->trainable) {
    const auto found = wanted.find(name);
    const std::vector<ValueType> types = found == wanted.end() ? std::vector<ValueType>() : found->second;
    for (const ValueType& type : types) {
      if (type.code == kFloatCode || type.code == kDoubleCode || type.code == kFloat16Code) continue;
      throw ModelError(optimizer_->name() + " keeps " + quoted(type.name) + " as " + type_text(type.code) +
                       ": the state of an optimizer is float, double or float16 on this device. Generate the "
                       "artifacts anew");
    }
    const std::vector<Tensor> saved = saved_moments(group, name, types, parameter.dims);
    std::vector<VariablePointer>& moments = made[name];
    for (size_t k = 0; k < types.size(); ++k) {
      VariablePointer moment = new_variable(runtime_, types[k].code, parameter.dims);
      if (!saved.empty() && moment->data.size > 0) {
        std::copy(saved[k].data.data, saved[k].data.data + saved[k].data.size, moment->data.data);
      }
      moments.push_back(std::move(moment));
    }
  }
  held.moments = std::move(made);
  // They are in memory that changes now; those of the file are out of date.
  Named<OptimizerGroup> others;
  for (const auto& [name, other] : state_->groups) {
    if (name != kGroup) others[name] = other;
  }
  state_->groups = std::move(others);
}

// Starts over: no step was taken, and all moments are zero. The learning rate stays.
void TrainingSession::reset_optimizer() {
  if (optimizer_ == nullptr) return;
  allocate_moments();
  OptimizerMemory& held = memory();
  for (const auto& item : held.moments) {
    for (const VariablePointer& moment : item.second) moment->clear();
  }
  held.count = 0;
  held.schedule.reset();
}

// The variables that an update reads, and those that it writes, by names in the graph.
void TrainingSession::bind_updates(Variables& state, Variables& results) {
  allocate_moments();
  OptimizerMemory& held = memory();
  state[kLearningRate] = held.rates;
  state[kStep] = held.steps;
  for (const auto& [name, moments] : held.moments) {
    state[name] = results[name + kUpdated] = state_->variable(name);
    for (size_t k = 0; k < moments.size(); ++k) {
      const std::string moment = name + kMomentum + std::to_string(k);
      state[moment] = results[moment + kUpdated] = moments[k];
    }
    if (proximal_mu_ == nullptr) continue;
    VariablePointer& reference = proximal_references_[name + kReference];
    if (reference == nullptr) reference = new_variable(runtime_, state[name]->code, state[name]->dims);
    state[name + kReference] = reference;
  }
  if (proximal_mu_ != nullptr) state[kProximalMu] = proximal_mu_;
}

OptimizerMemory& TrainingSession::memory() const {
  if (optimizer_ == nullptr) throw StateError("there is no optimizer: pass optimizer_model or step_model");
  return *state_->optimizer;
}

void TrainingSession::set_learning_rate(float rate) {
  const Lock lock(state_->lock);
  *memory().rates->as<float>() = finite_float("the learning rate", double{rate});
}

float TrainingSession::learning_rate() const { return *memory().rates->as<float>(); }

void TrainingSession::register_linear_schedule(int64_t warmup, int64_t total, float rate) {
  const Lock lock(state_->lock);
  OptimizerMemory& held = memory();
  const std::pair<const char*, int64_t> counts[] = {{"warmup_step_count", warmup}, {"total_step_count", total}};
  for (const auto& [name, count] : counts) {
    if (count >= 0) continue;
    throw ArgumentError(std::string(name) + " must be a whole number of at least 0, not " + std::to_string(count));
  }
  if (warmup > total) {
    throw ArgumentError("warmup_step_count (" + std::to_string(warmup) + ") is more than total_step_count (" +
                        std::to_string(total) +
                        "). (The Python package of onnxruntime-training took the two in the wrong order; here the "
                        "warm-up comes first.)");
  }
  const double initial = double{finite_float("initial_lr", double{rate})};
  if (initial < 0) throw ArgumentError("initial_lr must not be negative, but is " + shortest_digits(initial));
  const LinearSchedule schedule{warmup, total, initial};
  const Json* saved = nullptr;
  if (state_->saved_scheduler.has_value()) {
    const Json* kind = state_->saved_scheduler->find("kind");
    if (kind != nullptr && kind->kind == Json::kText && kind->text == "linear") {
      saved = state_->saved_scheduler->find("state");
      if (saved == nullptr || saved->kind != Json::kObject) {
        throw CheckpointError("the checkpoint holds a damaged state of a scheduler");
      }
    }
  }
  bool is_continued = saved != nullptr;
  for (const auto& [name, value] : schedule.settings().object) {
    is_continued = is_continued && is_equal(saved->find(name), value);
  }
  held.schedule = schedule;
  if (!is_continued) {
    held.initial_rate = initial;
    schedule_step();
  }
  state_->saved_scheduler.reset();
}

void TrainingSession::schedule_step() {
  const Lock lock(state_->lock);
  OptimizerMemory& held = memory();
  if (!held.schedule.has_value()) {
    throw StateError(
        "there is no scheduler: call register_linear_lr_scheduler, or make one of onnxtrain.api with "
        "session.optimizer");
  }
  *held.rates->as<float>() = finite_float("the learning rate", held.schedule->at(held.count));
}

}  // namespace onnxtrain::device
