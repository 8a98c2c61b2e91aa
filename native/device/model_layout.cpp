#include "model_layout.h"

#include "text.h"
#include "wire.h"

namespace onnxtrain::device {

namespace {

constexpr int kModelGraph = 7, kModelOpset = 8, kModelMetadata = 14, kModelFunction = 25;
constexpr int kGraphNode = 1, kGraphInitializer = 5, kGraphInput = 11, kGraphOutput = 12, kGraphValueInfo = 13,
              kGraphQuantization = 14, kGraphSparse = 15;
constexpr int kTensorDims = 1, kTensorType = 2, kTensorStrings = 6, kTensorName = 8, kTensorRaw = 9,
              kTensorExternal = 13, kTensorLocation = 14;
constexpr int kExternal = 1;
// As in checkpoints: smaller tensors stay in the file itself.
constexpr uint64_t kExternalTensorSize = 64;
// Large tensors begin at a page of memory, so that a runtime can map them.
constexpr uint64_t kPage = 4096, kLarge = 1 << 20;

uint64_t aligned(uint64_t offset, const StoredTensor& tensor) {
  const uint64_t unit = tensor.value.data.size >= kLarge ? kPage : kAlignment;
  return (offset + unit - 1) / unit * unit;
}

std::string described(const ValueType& type) {
  const ElementType* element = element_type(type.code);
  const std::string kind = element == nullptr ? "of element type " + std::to_string(type.code) : element->name;
  if (!type.has_shape) return kind + " of any shape";
  std::vector<std::string> dims;
  for (const Dimension& dim : type.dims) {
    const std::string symbol = dim.symbol.empty() ? "None" : dim.symbol;
    dims.push_back(dim.is_number() ? std::to_string(dim.size) : symbol);
  }
  return kind + " of shape (" + joined(dims, ", ") + ")";
}

bool is_of_type(const Tensor& value, const ValueType& wanted) {
  if (value.code != wanted.code) return false;
  if (!wanted.has_shape) return true;
  if (wanted.dims.size() != value.dims.size()) return false;
  for (size_t i = 0; i < value.dims.size(); ++i) {
    if (wanted.dims[i].is_number() && wanted.dims[i].size != value.dims[i]) return false;
  }
  return true;
}

}  // namespace

// ---- pieces ----

void Chunks::add_piece(Piece piece) {
  size_ += piece.bytes().size();
  pieces_.push_back(std::move(piece));
}

void Chunks::add_field(int number, std::string_view content) {
  add_own(bytes_header(number, content.size()));
  add(content);
}

void Chunks::add_message(int number, Chunks content) {
  add_own(bytes_header(number, content.size_));
  for (Piece& piece : content.pieces_) add_piece(std::move(piece));
}

void Chunks::write(NewFile& file) const {
  for (const Piece& piece : pieces_) file.write(piece.bytes());
}

std::string Chunks::joined() const {
  std::string made;
  made.reserve(static_cast<size_t>(size_));
  for (const Piece& piece : pieces_) made += piece.bytes();
  return made;
}

// ---- tensors ----

StoredTensor checked_tensor(const std::string& name, const Tensor& value, const ValueType& wanted) {
  if (value.code != kStringCode && value.data.size != data_size(value.code, value.dims)) {
    throw StateError("the parameter " + quoted(name) +
                     " has no value. Please load the model parameters first: the checkpoint is nominal");
  }
  if (!is_of_type(value, wanted)) {
    throw CheckpointError("the parameter " + quoted(name) + " is " + described(type_of(value.code, value.dims)) +
                          " and the model wants " + described(wanted) + ": the values are of another model");
  }
  return {name, value};
}

Chunks StoredTensor::head() const {
  std::string made;
  for (const int64_t dim : value.dims) made += number_field(kTensorDims, dim);
  Chunks chunks;
  chunks.add_own(made + number_field(kTensorType, value.code) + bytes_field(kTensorName, name));
  return chunks;
}

Chunks StoredTensor::inside() const {
  Chunks chunks = head();
  for (const Text& text : value.strings) chunks.add_field(kTensorStrings, *text);
  if (value.code != kStringCode) chunks.add_field(kTensorRaw, value.data.view());
  return chunks;
}

Chunks StoredTensor::outside(const std::string& location, uint64_t offset) const {
  Chunks chunks = head();
  const std::pair<const char*, std::string> entries[] = {
      {"location", location}, {"offset", std::to_string(offset)}, {"length", std::to_string(value.data.size)}};
  for (const auto& [key, text] : entries) {
    chunks.add_own(bytes_field(kTensorExternal, bytes_field(1, key) + bytes_field(2, text)));
  }
  chunks.add_own(number_field(kTensorLocation, kExternal));
  return chunks;
}

bool StoredTensor::is_large() const { return value.data.size >= kExternalTensorSize; }

// ---- the model ----

uint64_t ModelLayout::tensor_size() const {
  uint64_t size = 0;
  for (const StoredTensor& tensor : tensors) size += tensor.value.data.size;
  return size;
}

Chunks ModelLayout::file(const std::string& location) const {
  Chunks chunks;
  for (const std::string_view field : head) chunks.add(field);
  for (const auto& [key, value] : properties) {
    chunks.add_own(bytes_field(kModelMetadata, bytes_field(1, key) + bytes_field(2, value)));
  }
  for (const std::string_view opset : opsets) chunks.add_field(kModelOpset, opset);
  chunks.add_message(kModelGraph, graph(location));
  for (const std::string_view function : functions) chunks.add_field(kModelFunction, function);
  if (chunks.size() > kMaxFileSize) {
    throw ModelError("the model has " + with_commas(chunks.size()) + " bytes and an ONNX file cannot have more than " +
                     with_commas(kMaxFileSize) + ": export it to a file, with external data");
  }
  return chunks;
}

Chunks ModelLayout::graph(const std::string& location) const {
  Chunks chunks;
  for (const std::string_view field : graph_head) chunks.add(field);
  const auto add_all = [&](int number, const auto& messages) {
    for (const auto& message : messages) chunks.add_field(number, message);
  };
  add_all(kGraphNode, nodes);
  add_all(kGraphNode, more_nodes);
  add_all(kGraphInitializer, copied);
  add_all(kGraphSparse, sparse);
  add_all(kGraphInput, inputs);
  add_all(kGraphOutput, outputs);
  add_all(kGraphValueInfo, value_infos);
  add_all(kGraphQuantization, quantization);
  uint64_t offset = 0;
  for (const StoredTensor& tensor : tensors) {
    if (location.empty() || !tensor.is_large()) {
      chunks.add_message(kGraphInitializer, tensor.inside());
      continue;
    }
    offset = aligned(offset, tensor);
    chunks.add_message(kGraphInitializer, tensor.outside(location, offset));
    offset += tensor.value.data.size;
  }
  return chunks;
}

Chunks ModelLayout::external_data() const {
  Chunks chunks;
  for (const StoredTensor& tensor : tensors) {
    if (!tensor.is_large()) continue;
    chunks.add_own(std::string(static_cast<size_t>(aligned(chunks.size(), tensor) - chunks.size()), '\0'));
    chunks.add(tensor.value.data.view());
  }
  return chunks;
}

// ---- types ----

std::string value_info(const std::string& name, const ValueType& type) {
  return bytes_field(1, name) + bytes_field(2, tensor_type(type));
}

std::string tensor_type(const ValueType& type) {
  std::string shape;
  for (const Dimension& dim : type.dims) {
    std::string inside;
    if (dim.is_number())
      inside = number_field(1, dim.size);
    else if (!dim.symbol.empty())
      inside = bytes_field(2, dim.symbol);
    shape += bytes_field(1, inside);
  }
  std::string tensor = number_field(1, type.code);
  if (type.has_shape) tensor += bytes_field(2, shape);
  return bytes_field(1, tensor);
}

ValueType type_of(int code, const Dims& dims) {
  ValueType made;
  made.code = code;
  made.has_shape = true;
  for (const int64_t dim : dims) made.dims.push_back({dim, ""});
  return made;
}

}  // namespace onnxtrain::device
