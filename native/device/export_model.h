// Export of a trained model for inference.
//
// The evaluation graph is cut down to what the outputs need, and the parameters, which are inputs of
// that graph, become initializers with their current values. Nodes are copied byte for byte, so that
// the exported model computes what evaluation computes.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "model_parts.h"
#include "ort.h"

namespace onnxtrain::device {

// The present value of a parameter, frozen ones included; null if there is none.
using Values = std::function<const Tensor*(const std::string&)>;

// What runs small models: types that a graph does not state, and what is computed once, come from it.
struct Inference {
  RuntimePointer runtime;
  const OrtEnv* env = nullptr;

  // A session of a model in memory, which is not optimised.
  Held<OrtSession> session(const std::string& model) const;
};

struct ExportRequest {
  std::vector<std::string> names;            // of the outputs: any values of the graph
  std::map<std::string, std::string> about;  // what is added to the metadata of the model
  uint64_t external_data_threshold = kExternalDataThreshold;
};

// Writes an evaluation model as one for inference. One of `external_data_threshold` bytes or more keeps
// its tensors in `<path>.data`.
void export_model(const ModelFile& model, const Values& values, const Inference& inference, const std::string& path,
                  const ExportRequest& request);

// One cut through a model: what some outputs need.
class Cut {
 public:
  Cut(const ModelFile& model, const ModelParts& parts, const std::vector<std::string>& outputs, const Values& values);

  // The model with outputs of types that are found.
  ModelLayout layout(const Inference& inference);
  // The same with outputs of no type.
  ModelLayout untyped_layout();

 private:
  using Types = std::vector<std::string>;  // of outputs: a ValueInfoProto each

  ModelLayout filled(Types outputs);
  ModelLayout assembled(const std::vector<std::string>& names, std::vector<std::string> inputs, Types outputs) const;
  Types output_types(const Inference& inference);
  std::string stated_type(const std::string& name);  // "" if the model does not state one
  std::string initializer_type(const std::string& name);
  std::map<std::string, std::string> inferred(const Inference& inference, const std::vector<std::string>& names);
  StoredTensor from_file(const ExternalTensor& tensor);

  const ModelFile& model_;
  const ModelParts& parts_;
  const std::vector<std::string> outputs_;
  const Values& values_;
  WireReader reader_;
  ExternalFiles files_;
  Needed needed_;
};

// Whether an input is a parameter, whether or not it has a value.
bool is_parameter(const ModelFile& model, const Values& values, const std::string& name);

// Computes what the metadata of an evaluation graph list as depending on parameters alone, if the outputs
// need it; it takes the place of the nodes that make it.
void fold(const ModelFile& model, ModelParts& parts, const std::vector<std::string>& outputs, const Values& values,
          const Inference& inference);

}  // namespace onnxtrain::device
