// What training needs to know of a graph file: interface, metadata, external tensors. The file is
// read once, and parsed at the level of the graph; nodes and weights are skipped.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bytes.h"
#include "checkpoint.h"
#include "wire.h"

namespace onnxtrain::device {

// A dimension: a number, or the name of a symbolic one; "" if it is unknown.
struct Dimension {
  int64_t size = -1;
  std::string symbol;
  bool is_number() const { return size >= 0; }
};

// The type of an input or output.
struct ValueType {
  std::string name;
  int code = 0;  // ONNX's number of the element type; 0 if it is not a tensor
  bool has_shape = false;
  std::vector<Dimension> dims;

  bool is_fixed() const;  // whether all dimensions are numbers
  Dims sizes() const;     // of one that is fixed
};

// An initializer with its elements in another file of the folder.
struct ExternalTensor {
  std::string name;
  int code = 0;
  Dims dims;
  std::string location;
  uint64_t offset = 0, length = 0;
};

// The metadata of a graph (docs/format.md); a graph of ONNX Runtime's own tools has the defaults.
struct GraphMetadata {
  int64_t format = 1;
  std::string checkpoint, loss, target = "cpu", generation, base;
  std::vector<std::string> outputs, trainable, frozen, statistics, kernels, gradients, folded;
  bool has_memory_budget = false;
};

struct ModelFile {
  std::string name;  // what messages call it
  std::string path;  // "" for a model in memory
  Bytes data;
  bool is_ort = false;
  GraphMetadata metadata;
  std::vector<ValueType> inputs, outputs;
  Named<ExternalTensor> external;
  Named<std::string_view> initializers;  // the message of each
  Named<std::string> properties;         // of the model, beside the metadata
  size_t node_count = 0;
  std::map<std::string, size_t> input_index, output_index;

  const ValueType* input(const std::string& name) const;
  const ValueType* output(const std::string& name) const;
  // The initializers that are in the checkpoint, by the names that they have there.
  std::vector<std::string> stored() const;
  bool is_in_base(const ExternalTensor& tensor) const;
};

ModelFile read_model(const std::string& path);
ModelFile read_model(const Bytes& data);

// Gives a model in the ORT format the interface and the metadata that its session has.
void take_values(ModelFile& model, std::vector<ValueType> inputs, std::vector<ValueType> outputs);
void read_metadata(ModelFile& model, const std::string& text);

// ---- messages ----

constexpr const char* kMetadataKey = "onnxtrain";
// What a model tells of its low-rank factors, and of the base that they belong to.
constexpr const char *kFactorsKey = "onnxtrain.lora", *kFingerprintKey = "onnxtrain.base";

// The key and the value of a StringStringEntryProto.
std::pair<std::string, std::string> read_entry(WireReader& reader, std::string_view message);
// The domain of an opset import; that of `ai.onnx` is "".
std::string read_opset(WireReader& reader, std::string_view message);
// A ValueInfoProto; `what` is "input" and the like.
ValueType read_value_type(WireReader& reader, std::string_view message, const std::string& what);
// Element type and shape of a TensorProto.
std::pair<int, Dims> read_tensor_type(WireReader& reader, std::string_view message, const std::string& name);

// Reads tensors from the files beside a model that it names; `path` is that of the model.
class ExternalFiles {
 public:
  explicit ExternalFiles(std::string path) : path_(std::move(path)) {}
  // The elements of a tensor. All that is read of a file is at most its size: thousands of tensors of the
  // same bytes would fill the memory.
  Bytes read(const ExternalTensor& tensor);

 private:
  std::string path_;
  std::map<std::string, uint64_t> left_;
};

// The elements of an initializer that has them inside; false if they are strings, or in a form that
// is not read here.
bool inline_data(const ModelFile& model, const std::string& name, std::string& elements);

}  // namespace onnxtrain::device
