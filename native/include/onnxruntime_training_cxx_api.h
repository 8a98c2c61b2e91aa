// Training in C++, on a stock onnxruntime: the classes of ONNX Runtime's training interface, provided
// by libonnxtrain. Errors are exceptions of onnxruntime's own kind, Ort::Exception.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "onnxruntime_cxx_api.h"
#include "onnxruntime_training_c_api.h"

namespace Ort {

inline const OrtTrainingApi& GetTrainingApi() { return *onnxtrain_training_api(&GetApi()); }

using Property = std::variant<int64_t, float, std::string>;

namespace training_detail {

inline void Release(OrtCheckpointState* state) { GetTrainingApi().ReleaseCheckpointState(state); }
inline void Release(OrtTrainingSession* session) { GetTrainingApi().ReleaseTrainingSession(session); }

// The owner of an object in C. It can be moved and not be copied.
template <class T>
class Owner {
 public:
  Owner() = default;
  explicit Owner(std::nullptr_t) {}
  explicit Owner(T* pointer) : pointer_(pointer) {}
  Owner(Owner&& other) noexcept : pointer_(other.release()) {}
  Owner& operator=(Owner&& other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {
    if (pointer_ != nullptr) Release(pointer_);
  }

  operator T*() const noexcept { return pointer_; }
  T* release() { return std::exchange(pointer_, nullptr); }

 protected:
  T* pointer_ = nullptr;
};

// A text in memory of the allocator, which is freed.
inline std::string Taken(AllocatorWithDefaultOptions& allocator, void* text) {
  std::string taken = static_cast<const char*>(text);
  allocator.Free(text);
  return taken;
}

}  // namespace training_detail

// The state of a training: parameters, optimizer state, properties. It has to outlive its sessions.
class CheckpointState : public training_detail::Owner<OrtCheckpointState> {
 public:
  using Owner::Owner;
  CheckpointState() = delete;

  static CheckpointState LoadCheckpoint(const std::basic_string<ORTCHAR_T>& path_to_checkpoint) {
    OrtCheckpointState* state = nullptr;
    ThrowOnError(GetTrainingApi().LoadCheckpoint(path_to_checkpoint.c_str(), &state));
    return CheckpointState(state);
  }

  static CheckpointState LoadCheckpointFromBuffer(const std::vector<uint8_t>& buffer) {
    OrtCheckpointState* state = nullptr;
    ThrowOnError(GetTrainingApi().LoadCheckpointFromBuffer(buffer.data(), buffer.size(), &state));
    return CheckpointState(state);
  }

  static void SaveCheckpoint(const CheckpointState& checkpoint_state,
                             const std::basic_string<ORTCHAR_T>& path_to_checkpoint,
                             const bool include_optimizer_state = false) {
    ThrowOnError(
        GetTrainingApi().SaveCheckpoint(checkpoint_state, path_to_checkpoint.c_str(), include_optimizer_state));
  }

  void AddProperty(const std::string& property_name, const Property& property_value) {
    OrtPropertyType type = OrtStringProperty;
    const void* value = nullptr;
    if (const auto* number = std::get_if<int64_t>(&property_value)) {
      type = OrtIntProperty;
      value = number;
    } else if (const auto* fraction = std::get_if<float>(&property_value)) {
      type = OrtFloatProperty;
      value = fraction;
    } else {
      value = std::get<std::string>(property_value).c_str();
    }
    ThrowOnError(GetTrainingApi().AddProperty(pointer_, property_name.c_str(), type, const_cast<void*>(value)));
  }

  Property GetProperty(const std::string& property_name) {
    AllocatorWithDefaultOptions allocator;
    OrtPropertyType type = OrtIntProperty;
    void* value = nullptr;
    ThrowOnError(GetTrainingApi().GetProperty(pointer_, property_name.c_str(), allocator, &type, &value));
    if (type == OrtStringProperty) return training_detail::Taken(allocator, value);
    Property property;
    if (type == OrtIntProperty)
      property = *static_cast<const int64_t*>(value);
    else
      property = *static_cast<const float*>(value);
    allocator.Free(value);
    return property;
  }

  void UpdateParameter(const std::string& parameter_name, const Value& parameter) {
    OrtValue* value = const_cast<OrtValue*>(static_cast<const OrtValue*>(parameter));
    ThrowOnError(GetTrainingApi().UpdateParameter(pointer_, parameter_name.c_str(), value));
  }

  Value GetParameter(const std::string& parameter_name) {
    AllocatorWithDefaultOptions allocator;
    OrtValue* parameter = nullptr;
    ThrowOnError(GetTrainingApi().GetParameter(pointer_, parameter_name.c_str(), allocator, &parameter));
    return Value(parameter);
  }
};

// Training: steps, evaluation, learning rate, parameters.
class TrainingSession : public training_detail::Owner<OrtTrainingSession> {
 public:
  TrainingSession(const Env& env, const SessionOptions& session_options, CheckpointState& checkpoint_state,
                  const std::basic_string<ORTCHAR_T>& train_model_path,
                  const std::optional<std::basic_string<ORTCHAR_T>>& eval_model_path = std::nullopt,
                  const std::optional<std::basic_string<ORTCHAR_T>>& optimizer_model_path = std::nullopt) {
    ThrowOnError(GetTrainingApi().CreateTrainingSession(
        env, session_options, checkpoint_state, train_model_path.c_str(),
        eval_model_path.has_value() ? eval_model_path->c_str() : nullptr,
        optimizer_model_path.has_value() ? optimizer_model_path->c_str() : nullptr, &pointer_));
  }

  TrainingSession(const Env& env, const SessionOptions& session_options, CheckpointState& checkpoint_state,
                  const std::vector<uint8_t>& train_model_data, const std::vector<uint8_t>& eval_model_data = {},
                  const std::vector<uint8_t>& optim_model_data = {}) {
    ThrowOnError(GetTrainingApi().CreateTrainingSessionFromBuffer(
        env, session_options, checkpoint_state, train_model_data.data(), train_model_data.size(),
        eval_model_data.data(), eval_model_data.size(), optim_model_data.data(), optim_model_data.size(), &pointer_));
  }

  std::vector<Value> TrainStep(const std::vector<Value>& input_values) {
    size_t count = 0;
    ThrowOnError(GetTrainingApi().TrainingSessionGetTrainingModelOutputCount(pointer_, &count));
    const std::vector<const OrtValue*> inputs = Pointers(input_values);
    std::vector<OrtValue*> outputs(count, nullptr);
    ThrowOnError(GetTrainingApi().TrainStep(pointer_, nullptr, inputs.size(), inputs.data(), count, outputs.data()));
    return Values(outputs);
  }

  std::vector<Value> EvalStep(const std::vector<Value>& input_values) {
    size_t count = 0;
    ThrowOnError(GetTrainingApi().TrainingSessionGetEvalModelOutputCount(pointer_, &count));
    const std::vector<const OrtValue*> inputs = Pointers(input_values);
    std::vector<OrtValue*> outputs(count, nullptr);
    ThrowOnError(GetTrainingApi().EvalStep(pointer_, nullptr, inputs.size(), inputs.data(), count, outputs.data()));
    return Values(outputs);
  }

  void LazyResetGrad() { ThrowOnError(GetTrainingApi().LazyResetGrad(pointer_)); }
  void OptimizerStep() { ThrowOnError(GetTrainingApi().OptimizerStep(pointer_, nullptr)); }
  void SetLearningRate(float learning_rate) { ThrowOnError(GetTrainingApi().SetLearningRate(pointer_, learning_rate)); }
  float GetLearningRate() const {
    float learning_rate = 0;
    ThrowOnError(GetTrainingApi().GetLearningRate(pointer_, &learning_rate));
    return learning_rate;
  }
  void RegisterLinearLRScheduler(int64_t warmup_step_count, int64_t total_step_count, float initial_lr) {
    ThrowOnError(GetTrainingApi().RegisterLinearLRScheduler(pointer_, warmup_step_count, total_step_count, initial_lr));
  }
  void SchedulerStep() { ThrowOnError(GetTrainingApi().SchedulerStep(pointer_)); }

  void ExportModelForInferencing(const std::basic_string<ORTCHAR_T>& inference_model_path,
                                 const std::vector<std::string>& graph_output_names) {
    std::vector<const char*> names;
    for (const std::string& name : graph_output_names) names.push_back(name.c_str());
    ThrowOnError(
        GetTrainingApi().ExportModelForInferencing(pointer_, inference_model_path.c_str(), names.size(), names.data()));
  }

  std::vector<std::string> InputNames(const bool training) {
    const OrtTrainingApi& api = GetTrainingApi();
    return training ? Names(api.TrainingSessionGetTrainingModelInputCount, api.TrainingSessionGetTrainingModelInputName)
                    : Names(api.TrainingSessionGetEvalModelInputCount, api.TrainingSessionGetEvalModelInputName);
  }

  std::vector<std::string> OutputNames(const bool training) {
    const OrtTrainingApi& api = GetTrainingApi();
    return training
               ? Names(api.TrainingSessionGetTrainingModelOutputCount, api.TrainingSessionGetTrainingModelOutputName)
               : Names(api.TrainingSessionGetEvalModelOutputCount, api.TrainingSessionGetEvalModelOutputName);
  }

  Value ToBuffer(const bool only_trainable) {
    AllocatorWithDefaultOptions allocator;
    const auto size = static_cast<int64_t>(ParametersSize(only_trainable));
    Value buffer = Value::CreateTensor<float>(allocator, &size, 1);
    ThrowOnError(GetTrainingApi().CopyParametersToBuffer(pointer_, buffer, only_trainable));
    return buffer;
  }

  // The size of the buffer tells whether it holds all parameters, or those that train.
  void FromBuffer(Value& buffer) {
    const size_t size = buffer.GetTensorTypeAndShapeInfo().GetElementCount();
    const bool only_trainable = size != ParametersSize(false);
    ThrowOnError(GetTrainingApi().CopyBufferToParameters(pointer_, buffer, only_trainable));
  }

 private:
  static std::vector<const OrtValue*> Pointers(const std::vector<Value>& values) {
    std::vector<const OrtValue*> pointers;
    for (const Value& value : values) pointers.push_back(value);
    return pointers;
  }

  static std::vector<Value> Values(const std::vector<OrtValue*>& pointers) {
    std::vector<Value> values;
    for (OrtValue* pointer : pointers) values.emplace_back(pointer);
    return values;
  }

  template <class Count, class Name>
  std::vector<std::string> Names(Count* count, Name* name) {
    AllocatorWithDefaultOptions allocator;
    size_t size = 0;
    ThrowOnError(count(pointer_, &size));
    std::vector<std::string> names;
    for (size_t index = 0; index < size; ++index) {
      char* text = nullptr;
      ThrowOnError(name(pointer_, index, allocator, &text));
      names.push_back(training_detail::Taken(allocator, text));
    }
    return names;
  }

  size_t ParametersSize(bool only_trainable) {
    size_t size = 0;
    ThrowOnError(GetTrainingApi().GetParametersSize(pointer_, &size, only_trainable));
    return size;
  }
};

// Determines everything that is random in training from here on.
inline void SetSeed(const int64_t seed) { ThrowOnError(GetTrainingApi().SetSeed(seed)); }

}  // namespace Ort
