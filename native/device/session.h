// All of training: steps, evaluation, learning rate, parameters.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "adapter.h"
#include "binding.h"
#include "graph.h"
#include "signature.h"
#include "state.h"

namespace onnxtrain::device {

using Inputs = std::vector<const OrtValue*>;

// The graphs of a session; those that are missing are not there.
struct GraphFiles {
  std::optional<ModelFile> train, eval, optimizer, step;
};

class TrainingSession {
 public:
  TrainingSession(const RuntimePointer& runtime, const Settings& settings, std::shared_ptr<TrainingState> state,
                  GraphFiles files);

  // The loss and further outputs; gradients are added to the accumulated ones.
  Outputs train_step(const Inputs& inputs, const OrtRunOptions* options = nullptr, const Outputs& given = {});
  // The same of the model in inference mode.
  Outputs eval_step(const Inputs& inputs, const OrtRunOptions* options = nullptr, const Outputs& given = {});
  // Updates the parameters from the accumulated gradients.
  void optimizer_step(const OrtRunOptions* options = nullptr);
  // Does what a training step from zero and an optimizer step do, in one run if there is a graph for it.
  // Accumulated gradients are neither used nor lost.
  Outputs step(const Inputs& inputs, const OrtRunOptions* options = nullptr, const Outputs& given = {});
  void lazy_reset_gradients();

  void set_learning_rate(float rate);
  float learning_rate() const;
  void register_linear_schedule(int64_t warmup, int64_t total, float rate);
  void schedule_step();

  // All parameters: trainable ones, running statistics, frozen ones. Buffers have them in this order.
  const std::vector<std::string>& parameter_names(bool trainable_only) const {
    return trainable_only ? trained_ : all_;
  }
  uint64_t parameters_size(bool trainable_only) const;
  void copy_parameters_to(float* buffer, bool trainable_only);
  void copy_to_parameters(const float* buffer, bool trainable_only);

  // The gradient of an input that the training graph differentiates, of the last training step; null if
  // there is none.
  Held<OrtValue> input_gradient(const std::string& name) const;

  // Writes a model for inference, with the parameters as they are now; any values of the evaluation graph
  // can be outputs. Parameters that training has made infinite or NaN are refused.
  void export_model(const std::string& path, const std::vector<std::string>& names);
  // Writes what trains as it is now, low-rank factors with the scale in B.
  void export_adapter(const std::string& path);
  // Goes on from an adapter of the same base, layers and rank; moments start from zero.
  void load_adapter(const std::string& path);

  const std::vector<ValueType>& inputs(bool training) const;
  const std::vector<ValueType>& outputs(bool training) const;
  int64_t skipped_steps() const { return memory().skipped; }
  int64_t step_count() const { return memory().count; }
  const std::shared_ptr<TrainingState>& state() const { return state_; }

 private:
  // A graph with its signature, and what is bound to it.
  struct Executor {
    std::shared_ptr<Graph> graph;
    GraphSignature signature;
    std::unique_ptr<Binding> binding;
  };

  std::shared_ptr<Graph> open(ModelFile model);
  Executor executor(ModelFile model, GraphKind kind);
  void open_optimizer(GraphFiles& files);
  void allocate_moments();
  void list_parameters();
  Variables parameters_of(const GraphSignature& signature);
  void bind_updates(Variables& state, Variables& results);
  Binding& train_binding();
  Held<OrtValue> input_buffer(const std::string& name, const std::vector<Held<OrtValue>>& values) const;
  Outputs run(Executor& executor, Binding& binding, const std::vector<Held<OrtValue>>& values,
              const OrtRunOptions* options, const Outputs& given);
  std::vector<Held<OrtValue>> checked(const Executor& executor, const Inputs& inputs) const;
  Outputs separate_step(const Inputs& inputs, const OrtRunOptions* options, const Outputs& given);
  OptimizerMemory& memory() const;
  void reset_optimizer();
  Factors factors() const;
  Named<Tensor> trained_tensors();
  const Dims& shape_of_parameter(const std::string& name) const;
  void require_floats(const std::vector<std::string>& names) const;

  RuntimePointer runtime_;
  std::shared_ptr<Settings> settings_;
  std::shared_ptr<TrainingState> state_;
  std::string generation_;
  Executor train_, eval_, fused_;
  std::vector<std::string> differentiated_inputs_;
  std::map<std::string, Held<OrtValue>> input_gradients_;
  std::unique_ptr<Binding> train_from_zero_;  // writes gradients straight into their buffers
  std::shared_ptr<Graph> optimizer_;
  std::unique_ptr<Binding> optimizer_binding_;
  bool can_update_alone_ = false;
  bool reset_ = true;
  VariablePointer reset_flag_, seed_, proximal_mu_;
  Variables proximal_references_;
  std::vector<std::string> trained_, all_;
  std::map<std::string, Dims> shapes_;
};

}  // namespace onnxtrain::device
