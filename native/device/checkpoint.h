// Checkpoint files: reading, and replacing them atomically. docs/format.md specifies them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bytes.h"
#include "element_types.h"
#include "flat_reader.h"

namespace onnxtrain::device {

// Values by name, in the order in which they were added.
template <class T>
class Named {
 public:
  T* find(const std::string& name) {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &items_[found->second].second;
  }
  const T* find(const std::string& name) const { return const_cast<Named*>(this)->find(name); }
  T& operator[](const std::string& name) {
    const auto [found, is_new] = index_.try_emplace(name, items_.size());
    if (is_new) items_.emplace_back(name, T());
    return items_[found->second].second;
  }
  size_t size() const { return items_.size(); }
  auto begin() { return items_.begin(); }
  auto end() { return items_.end(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

 private:
  std::vector<std::pair<std::string, T>> items_;
  std::map<std::string, size_t> index_;  // names of a hostile file could all have one hash
};

struct Tensor {
  int code = kFloatCode;
  Dims dims;
  Bytes data;                 // empty in a nominal checkpoint
  std::vector<Text> strings;  // of a tensor of strings
};

using Property = std::variant<int64_t, float, Text>;

// The state of an optimizer: a parameter's tensors are `momentum<k>` in the file.
struct OptimizerGroup {
  int64_t step = 0;
  float initial_learning_rate = 0;
  Named<std::vector<Tensor>> states;
};

// Everything in a checkpoint, in the order of the file.
struct CheckpointContent {
  Named<Tensor> trainable, frozen;
  bool nominal = false;
  Named<OptimizerGroup> groups;
  Named<Property> properties;
  bool has_external_data = false;  // large tensors were in a second file, and are written to one
};

// ONNX Runtime's limit: files of this size, rounded up to whole mebibytes, have external data.
constexpr uint64_t kExternalDataThreshold = uint64_t{1800} << 20;

// Reads a file. All of it is read, and nothing is mapped: what happens to it afterwards changes
// nothing. Tensors are parts of one piece of memory.
CheckpointContent read_checkpoint(const std::string& path);

// Reads a checkpoint without external data from memory.
CheckpointContent read_checkpoint(const Bytes& data);

enum class Order { kByName, kAsGiven };  // of a saved training state, and of an artifact folder

// Writes a checkpoint, and its external data if it is large. A crash at any moment leaves a readable
// checkpoint, the old or the new one.
void write_checkpoint(const std::string& path, const CheckpointContent& content, Order order = Order::kByName,
                      uint64_t external_data_threshold = kExternalDataThreshold);

// The bytes of a checkpoint as one file.
std::string checkpoint_bytes(const CheckpointContent& content, Order order = Order::kByName);

// Properties of this prefix hold what the format has no field for. Users do not see them.
constexpr std::string_view kReservedPrefix = "__onnxtrain__.";
// Those of this prefix that are strings go with an exported model.
constexpr std::string_view kModelPrefix = "onnxtrain.";

}  // namespace onnxtrain::device
