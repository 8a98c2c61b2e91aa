// The bytes of an ONNX file that is to be written, and of its external data.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "files.h"
#include "model_file.h"

namespace onnxtrain::device {

constexpr uint64_t kMaxFileSize = (uint64_t{1} << 31) - 1;  // protobuf takes no larger message

// A sequence of bytes in pieces. Views are not copied until they are written.
class Chunks {
 public:
  void add(std::string_view view) { add_piece({{}, view}); }
  void add_own(std::string bytes) { add_piece({std::move(bytes), {}}); }
  void add_field(int number, std::string_view content);  // a field that is a message or bytes
  void add_message(int number, Chunks content);

  uint64_t size() const { return size_; }
  void write(NewFile& file) const;
  std::string joined() const;

 private:
  struct Piece {
    std::string own;
    std::string_view view;
    std::string_view bytes() const { return view.data() == nullptr ? std::string_view(own) : view; }
  };
  void add_piece(Piece piece);

  std::vector<Piece> pieces_;
  uint64_t size_ = 0;
};

// An initializer to be written.
struct StoredTensor {
  std::string name;
  Tensor value;

  Chunks head() const;
  Chunks inside() const;                                               // with its elements
  Chunks outside(const std::string& location, uint64_t offset) const;  // with a reference to them
  bool is_large() const;  // whether it leaves the file when the file gets too large
};

// The value of a parameter, which must be of the type that the model wants.
StoredTensor checked_tensor(const std::string& name, const Tensor& value, const ValueType& wanted);

// All of a model that is to be written. `head` and `graph_head` are whole fields; the others are messages.
struct ModelLayout {
  std::vector<std::string_view> head, opsets, functions, graph_head;
  std::vector<std::pair<std::string, std::string>> properties;
  std::vector<std::string> inputs, outputs, more_nodes;
  std::vector<std::string_view> nodes, value_infos, quantization, copied, sparse;
  std::vector<StoredTensor> tensors;

  uint64_t tensor_size() const;
  // The model; with a location, large tensors are in the file of that name.
  Chunks file(const std::string& location = "") const;
  Chunks external_data() const;

 private:
  Chunks graph(const std::string& location) const;
};

// A ValueInfoProto.
std::string value_info(const std::string& name, const ValueType& type);
// The type of a tensor, as a TypeProto.
std::string tensor_type(const ValueType& type);

// The type of a tensor of known shape.
ValueType type_of(int code, const Dims& dims);

}  // namespace onnxtrain::device
