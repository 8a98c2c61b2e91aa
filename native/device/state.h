// All that training changes and needs to be resumed.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint.h"
#include "json.h"
#include "ort.h"
#include "random_seeds.h"

namespace onnxtrain::device {

// A tensor whose memory graphs are bound to: it shows the present values, and training goes on from
// what is written into it.
class Variable {
 public:
  Variable(const RuntimePointer& runtime, int code, const Dims& dims, const Bytes& data);

  OrtValue* value() const { return value_.get(); }
  // The same memory in another shape; null if that has another number of elements.
  Held<OrtValue> in_shape(const Dims& dims) const;
  void clear();
  Tensor tensor() const { return {code, dims, data, {}}; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data.data);
  }

  const int code;
  const Dims dims;
  const Bytes data;

 private:
  RuntimePointer runtime_;
  Held<OrtValue> value_;
};

using VariablePointer = std::shared_ptr<Variable>;

VariablePointer new_variable(const RuntimePointer& runtime, int code, const Dims& dims);  // all zero

// What binds the graphs and the checkpoint of an artifact folder to each other.
struct Generation {
  std::string identifier;
  std::map<std::string, std::pair<uint64_t, uint32_t>> files;  // size and CRC-32 by name
};

// The linear schedule: the rate rises from 0 during the warm-up, then falls to 0.
struct LinearSchedule {
  int64_t warmup = 0, total = 0;
  double rate = 0;
  double at(int64_t step) const;
  Json settings() const;
};

// What lasts from step to step of an optimizer.
struct OptimizerMemory {
  VariablePointer rates, steps;  // float[1] and int64[1], which graphs read
  int64_t count = 0, skipped = 0;
  Named<std::vector<VariablePointer>> moments;
  double initial_rate = 0.001;
  std::optional<LinearSchedule> schedule;
};

// The state of a training. Callers hold `lock` while they use it.
class TrainingState {
 public:
  explicit TrainingState(CheckpointContent content);

  // The state as plain data; tensors are the memory that training works with.
  CheckpointContent content(bool with_optimizer) const;
  // Refuses to go on where training has made something infinite or NaN.
  void require_finite(const std::string& what, bool with_optimizer) const;
  void require_values() const;  // refuses a nominal state

  bool has(const std::string& name) const { return tensor(name) != nullptr; }
  bool is_trainable(const std::string& name) const { return trainable.find(name) != nullptr; }
  std::vector<std::string> names() const;  // sorted
  const Tensor* tensor(const std::string& name) const;
  const Tensor& require(const std::string& name) const;  // of a parameter that users ask for
  void set(const std::string& name, const Tensor& value);

  // The memory of a parameter, which can change from then on.
  const VariablePointer& variable(const std::string& name);
  // The memory of its gradient, which is zero at first.
  const VariablePointer& gradient(const std::string& name);
  // Gives a nominal state its values.
  void complete(const Named<Tensor>& values);

  std::recursive_mutex lock;
  RuntimePointer runtime;  // that of the session
  Named<Tensor> trainable, frozen;
  Named<Property> properties;  // the user's own
  Named<OptimizerGroup> groups;
  std::shared_ptr<OptimizerMemory> optimizer;
  std::optional<Generation> generation;
  std::optional<Json> saved_rate, saved_scheduler;
  mutable RandomSeeds random;
  bool nominal;
  bool has_stale_gradients = false;  // all batches since the last reset were skipped
  int64_t skipped_batches = 0;
  int frozen_version = 0;  // how often a constant was changed
  std::set<std::string> changed_constants;
  std::map<std::string, Bytes> base;  // what graphs have read of the base of low-rank factors, by place
  std::set<std::string> checked_bases;
  std::map<std::string, std::string> baked;  // constants inside of a graph file that cannot be changed, to that file

 private:
  Json training_record() const;
  OptimizerGroup group() const;

  Named<Property> reserved_;
  Json private_ = Json::of_object();
  bool has_external_data_;
  std::map<std::string, VariablePointer> variables_, gradients_;
};

// How many elements of a tensor of floats are infinite or NaN.
uint64_t count_bad(const Tensor& tensor);

// Checks for a number that is finite in 32 bits.
float finite_float(const char* name, double value);

}  // namespace onnxtrain::device
