// The inputs and outputs of a graph by what they are for, and whether it belongs to a checkpoint.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "model_file.h"
#include "state.h"

namespace onnxtrain::device {

// Names of inputs and outputs; those that begin with "_" or "." are suffixes of the name of a parameter.
constexpr const char *kLazyReset = "lazy_reset_grad", *kRandomSeed = "random_seed", *kLearningRate = "learning_rate",
                     *kStep = "step", *kGradient = "_grad", *kBuffer = "_grad.accumulation.buffer",
                     *kAccumulated = "_grad.accumulation.out", *kUpdated = ".updated", *kMomentum = ".momentum",
                     *kProximalMu = "proximal_mu", *kReference = ".reference", *kUpdatedFlag = "updated_flag",
                     *kFiniteCheck = "finite_check";

struct GraphSignature {
  std::vector<ValueType> inputs, outputs;  // the user's
  std::vector<ValueType> parameters;       // inputs that the checkpoint has
  std::vector<std::string> trained;        // whose gradient the graph accumulates
  std::vector<std::string> updated;        // what it gives a new value to
  std::vector<ValueType> check;            // outputs that tell whether a step was finite
  bool has_seed = false;
};

enum class GraphKind { kTraining, kEvaluation, kFusedStep };

GraphSignature signature_of(const ModelFile& model, const TrainingState& state, GraphKind kind);

// The states that an optimizer keeps, by parameter, in the order of their numbers.
std::map<std::string, std::vector<ValueType>> momentums_of(const ModelFile& model);

// The inputs of the proximal term, where the graph has it.
std::vector<ValueType> proximal_of(const ModelFile& model, const TrainingState& state);

// Refuses a graph that was written with other files; returns the generation of the graphs so far.
std::string check_generation(const ModelFile& model, const TrainingState& state, const std::string& earlier);

// Refuses the file of a base that is not the one which the graphs were written with.
void check_base(const ModelFile& model, TrainingState& state);

// Refuses a graph and a checkpoint that were not made for each other.
void check_belongs(const ModelFile& model, const TrainingState& state, const GraphSignature& signature);

// Refuses a training graph that does not train what the checkpoint says it should.
void check_trains(const ModelFile& model, const TrainingState& state, const GraphSignature& signature);

// Refuses a graph that does not update what trains, and that alone.
void check_updates(const ModelFile& model, const TrainingState& state);

}  // namespace onnxtrain::device
