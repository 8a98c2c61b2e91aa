// A graph with everything bound to it that stays the same from run to run: nothing is copied.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph.h"

namespace onnxtrain::device {

using Symbols = std::map<std::string, int64_t>;
using Variables = std::map<std::string, VariablePointer>;

// What a user gives for an output: nothing, or a tensor to write to.
using Outputs = std::vector<Held<OrtValue>>;

// An output that each run returns. Asking onnxruntime for its outputs takes time for every
// parameter; so once an output has had the shape that the graph declares, memory of that shape is
// bound to it before the run.
class BoundOutput {
 public:
  explicit BoundOutput(ValueType type)
      : type_(std::move(type)), is_declared_right_(type_.has_shape && type_.dims.empty()) {}
  const std::string& name() const { return type_.name; }
  // Binds memory for the next run; null if onnxruntime is to allocate it.
  Held<OrtValue> bind(const RuntimePointer& runtime, OrtIoBinding* binding, const Symbols& symbols,
                      const Held<OrtValue>& given) const;
  void learn(const Dims& shape, const Symbols& symbols) {
    is_declared_right_ = has_shape(symbols) && shape_of(symbols) == shape;
  }

 private:
  bool has_shape(const Symbols& symbols) const;
  Dims shape_of(const Symbols& symbols) const;

  ValueType type_;
  bool is_declared_right_;
};

class Binding {
 public:
  // Reads `state` and writes `results`, by the names of inputs and outputs; `inputs` and `outputs` are
  // those that each run takes and returns, and `check` tells whether a run has changed anything.
  Binding(std::shared_ptr<Graph> graph, const RuntimePointer& runtime, Variables state, Variables results,
          std::vector<ValueType> inputs, const std::vector<ValueType>& outputs, const std::vector<ValueType>& check);

  Outputs run(const std::vector<Held<OrtValue>>& values, const OrtRunOptions* options, const Outputs& given);
  bool passed() const { return passed_; }

 private:
  void bind();
  void take_allocated(Outputs& made, const Symbols& symbols);
  void read_check(Outputs& made);

  std::shared_ptr<Graph> graph_;
  RuntimePointer runtime_;
  Variables state_, results_;
  std::vector<ValueType> inputs_;
  std::vector<BoundOutput> outputs_;
  size_t checks_;
  Held<OrtSession> session_;
  Held<OrtIoBinding> binding_;
  Held<OrtRunOptions> run_options_;
  std::vector<Held<OrtValue>> kept_;  // other shapes of memory that is bound
  struct Copied {
    size_t index;
    std::string name;
    VariablePointer variable;
  };
  std::vector<Copied> copied_;  // what is not written in place
  bool passed_ = true;
};

}  // namespace onnxtrain::device
