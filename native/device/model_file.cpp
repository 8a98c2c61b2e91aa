#include "model_file.h"

#include <algorithm>
#include <cerrno>
#include <climits>

#include "errors.h"
#include "files.h"
#include "folder_lock.h"
#include "json.h"
#include "text.h"
#include "wire.h"

namespace onnxtrain::device {

namespace {

constexpr int kModelVersion = 1, kModelGraph = 7, kModelOpset = 8, kModelMetadata = 14;
constexpr int kGraphNode = 1, kGraphInitializer = 5, kGraphInput = 11, kGraphOutput = 12;
constexpr int kTensorDims = 1, kTensorType = 2, kTensorName = 8, kTensorRaw = 9, kTensorExternal = 13,
              kTensorLocation = 14;
constexpr int64_t kMostElements = int64_t{1} << 58;

// Whether the file is FlatBuffers with the identifier of the ORT format. A producer's name in an
// ONNX file may hold the same four letters; there the first four bytes are not an offset.
bool has_ort_identifier(std::string_view data) {
  if (data.size() < 8 || data.substr(4, 4) != "ORTM") return false;
  const auto offset = number_at<uint32_t>(reinterpret_cast<const uint8_t*>(data.data()));
  return offset >= 8 && offset <= data.size() - 4;
}

// Whether a path leads to a file in the folder of the model, on any system.
bool stays_in_folder(const std::string& location) {
  if (location.empty() || location.find('\0') != location.npos) return false;
  if (location[0] == '/' || location[0] == '\\' || (location.size() > 1 && location[1] == ':')) return false;
  for (size_t at = 0; at <= location.size();) {
    const size_t end = std::min(location.find_first_of("/\\", at), location.size());
    if (location.compare(at, end - at, "..") == 0) return false;
    at = end + 1;
  }
  return true;
}

// The number of an element type; one that is too large is that of none.
int read_code(WireReader& reader, const WireFields& fields, int number, const std::string& where) {
  const int64_t code = reader.last_int64(fields, number, where);
  return code < INT_MIN || code > INT_MAX ? INT_MAX : static_cast<int>(code);
}

Dimension read_dimension(WireReader& reader, std::string_view message, const std::string& where) {
  Dimension made;
  reader.each(message, where, [&](const WireField& field) {
    if (field.number == 1) {
      made = Dimension();
      made.size = std::max<int64_t>(-1, reader.int64(field, where));  // exporters write -1 for an unknown size
    } else if (field.number == 2) {
      made = Dimension();
      made.symbol = reader.text(field, where);
    }
  });
  return made;
}

}  // namespace

std::pair<std::string, std::string> read_entry(WireReader& reader, std::string_view message) {
  const WireFields fields = reader.pick(message, "entry", {1, 2});
  const std::string key = reader.last_text(fields, 1, "entry.key");
  return {key, reader.last_text(fields, 2, "entry " + quoted(key))};
}

std::string read_opset(WireReader& reader, std::string_view message) {
  const WireFields fields = reader.pick(message, "opset_import", {1, 2});
  const std::string domain = reader.last_text(fields, 1, "opset_import.domain");
  reader.last_int64(fields, 2, "opset_import.version");
  return domain == "ai.onnx" ? "" : domain;
}

std::pair<int, Dims> read_tensor_type(WireReader& reader, std::string_view message, const std::string& name) {
  const std::string where = "initializer " + quoted(name);
  const WireFields fields = reader.pick(message, where, {kTensorType, kTensorDims});
  return {read_code(reader, fields, kTensorType, where), reader.int64s(fields, kTensorDims, where)};
}

ValueType read_value_type(WireReader& reader, std::string_view message, const std::string& what) {
  ValueType value;
  value.name = reader.last_text(reader.pick(message, what, {1}), 1, what + ".name");
  const std::string where = what + " " + quoted(value.name);
  std::string_view declared, tensor, shape;
  if (!reader.only(message, 2, where, declared) || !reader.only(declared, 1, where, tensor)) return value;
  value.code = read_code(reader, reader.pick(tensor, where, {1}), 1, where);
  value.has_shape = reader.only(tensor, 2, where, shape);
  if (!value.has_shape) return value;
  const WireFields dims = reader.pick(shape, where, {1});
  if (dims.size() > kMaxModelRank) {
    reader.fail("there are more than " + std::to_string(kMaxModelRank) + " dimensions", where);
  }
  for (const WireField& dim : dims) value.dims.push_back(read_dimension(reader, reader.message(dim, where), where));
  return value;
}

namespace {

uint64_t position_in(WireReader& reader, const std::string& text, const std::string& where) {
  if (text.empty() || text.size() > 18 || text.find_first_not_of("0123456789") != text.npos) {
    reader.fail(quoted(first_characters(text, 40)) + " is not a position in a file", where);
  }
  return std::stoull(text);
}

void check_shape(WireReader& reader, const Dims& dims, const std::string& where) {
  int64_t count = 1;
  for (const int64_t dim : dims) {
    const int64_t size = std::max<int64_t>(dim, 1);
    if (dim < 0 || size > kMostElements / count) {
      reader.fail("the shape " + tuple_text(dims) + " is impossible", where);
    }
    count *= size;
  }
}

// `twice` gets a name that another initializer has, too.
void read_initializer(ModelFile& model, WireReader& reader, std::string_view message, std::string& twice) {
  const WireFields fields =
      reader.pick(message, "initializer", {kTensorName, kTensorType, kTensorDims, kTensorExternal, kTensorLocation});
  const std::string name = reader.last_text(fields, kTensorName, "initializer.name");
  const std::string where = "initializer " + quoted(name);
  ExternalTensor tensor;
  tensor.name = name;
  tensor.code = read_code(reader, fields, kTensorType, where);
  tensor.dims = reader.int64s(fields, kTensorDims, where);
  if (name.empty()) reader.fail("it has no name", "graph.initializer");
  if (model.initializers.find(name) != nullptr && twice.empty()) twice = name;
  model.initializers[name] = message;
  for (const WireField& field : fields) {
    if (field.number == kTensorExternal) reader.message(field, where);
  }
  if (reader.last_int64(fields, kTensorLocation, where) != 1) return;
  if (element_type(tensor.code) == nullptr || tensor.code == kStringCode) {
    reader.fail("the element type " + std::to_string(tensor.code) + " cannot be in an external file", where);
  }
  check_shape(reader, tensor.dims, where);
  std::map<std::string, std::string> keys;
  for (const WireField& field : fields) {
    if (field.number != kTensorExternal) continue;
    const auto [key, value] = read_entry(reader, reader.message(field, where));
    keys[key] = value;
  }
  const uint64_t size = data_size(tensor.code, tensor.dims);
  tensor.length = keys.count("length") ? position_in(reader, keys["length"], where) : size;
  if (tensor.length != size) {
    reader.fail(
        std::to_string(tensor.length) + " bytes of external data, where the shape needs " + std::to_string(size),
        where);
  }
  tensor.location = keys["location"];
  if (!stays_in_folder(tensor.location)) {
    reader.fail("the external data are at " + quoted(tensor.location) + ", outside the folder", where);
  }
  tensor.offset = keys.count("offset") ? position_in(reader, keys["offset"], where) : 0;
  model.external[name] = tensor;
}

void index_names(WireReader& reader, const std::vector<ValueType>& values, std::map<std::string, size_t>& index,
                 const std::string& where) {
  for (const ValueType& value : values) {
    if (value.name.empty()) reader.fail("it has no name", where);
    const bool is_new = index.emplace(value.name, index.size()).second;
    if (!is_new) reader.fail("the name " + quoted(value.name) + " occurs twice", where);
  }
}

void index_names(WireReader& reader, ModelFile& model) {
  index_names(reader, model.inputs, model.input_index, "graph.input");
  index_names(reader, model.outputs, model.output_index, "graph.output");
}

void read_graph(ModelFile& model, WireReader& reader, std::string_view graph) {
  size_t parsed = 0;
  std::string twice;
  reader.each(graph, "graph", [&](const WireField& field) {
    if (field.number == kGraphNode) {
      reader.message(field, "graph.node");
      model.node_count += 1;
      return;
    }
    const bool is_value = field.number == kGraphInput || field.number == kGraphOutput;
    if (!is_value && field.number != kGraphInitializer) return;
    if (++parsed > kMaxParsed) reader.fail("it has more inputs and initializers than any real model has", "graph");
    if (field.number == kGraphInitializer) {
      read_initializer(model, reader, reader.message(field, "graph.initializer"), twice);
      return;
    }
    const std::string what = field.number == kGraphInput ? "input" : "output";
    const ValueType value = read_value_type(reader, reader.message(field, "graph." + what), what);
    (field.number == kGraphInput ? model.inputs : model.outputs).push_back(value);
  });
  index_names(reader, model);
  if (!twice.empty()) reader.fail("the name " + quoted(twice) + " occurs twice", "graph.initializer");
}

[[noreturn]] void wrong_entry(WireReader& reader, const char* key) {
  reader.fail(quoted(key) + " in the metadata of onnxtrain has a wrong type or value", "metadata_props");
}

void read_metadata(GraphMetadata& metadata, WireReader& reader, const std::string& text) {
  Json found;
  if (!parse_json(text, Numbers::kPlain, found)) {
    reader.fail("the metadata of onnxtrain is not valid JSON", "metadata_props");
  }
  if (found.kind != Json::kObject) reader.fail("the metadata of onnxtrain is not a JSON object", "metadata_props");
  const Json* format = found.find("format");
  if (format != nullptr && !format->as_int64(metadata.format)) wrong_entry(reader, "format");
  const std::pair<const char*, std::string*> texts[] = {{"checkpoint", &metadata.checkpoint},
                                                        {"loss", &metadata.loss},
                                                        {"target", &metadata.target},
                                                        {"generation", &metadata.generation},
                                                        {"base", &metadata.base}};
  for (const auto& [key, target] : texts) {
    const Json* value = found.find(key);
    if (value == nullptr) continue;
    if (value->kind != Json::kText) wrong_entry(reader, key);
    *target = value->text;
    const bool is_file = target == &metadata.checkpoint || (target == &metadata.base && !target->empty());
    if (is_file && !stays_in_folder(*target)) wrong_entry(reader, key);
  }
  const std::pair<const char*, std::vector<std::string>*> lists[] = {
      {"outputs", &metadata.outputs},       {"trainable", &metadata.trainable}, {"frozen", &metadata.frozen},
      {"statistics", &metadata.statistics}, {"kernels", &metadata.kernels},     {"gradients", &metadata.gradients},
      {"folded", &metadata.folded}};
  for (const auto& [key, target] : lists) {
    const Json* value = found.find(key);
    if (value != nullptr && !value->as_texts(*target)) wrong_entry(reader, key);
  }
  const Json* memory = found.find("memory");
  if (memory != nullptr && memory->kind != Json::kObject) wrong_entry(reader, "memory");
  metadata.has_memory_budget = memory != nullptr;
}

ModelFile parsed(ModelFile model) {
  if (has_ort_identifier(model.data.view())) {
    model.is_ort = true;
    return model;
  }
  WireReader reader(model.name);
  if (model.data.size == 0) reader.fail("the file is empty", "model");
  std::vector<std::string_view> graphs;
  size_t parsed = 0;
  reader.each(model.data.view(), "model", [&](const WireField& field) {
    const bool is_read = field.number == kModelGraph || field.number == kModelVersion || field.number == kModelOpset ||
                         field.number == kModelMetadata;
    if (!is_read) return;
    if (parsed++ == kMaxParsed) reader.fail("there are more fields than any real model has", "model");
    if (field.number == kModelGraph) {
      graphs.push_back(reader.message(field, "model"));
    } else if (field.number == kModelVersion) {
      reader.int64(field, "model");
    } else if (field.number == kModelOpset) {
      read_opset(reader, reader.message(field, "opset_import"));
    } else {
      const auto [key, value] = read_entry(reader, reader.message(field, "metadata_props"));
      model.properties[key] = value;
    }
  });
  if (graphs.size() != 1) {
    const std::string count = graphs.empty() ? "no" : "several";
    reader.fail("there are " + count + " graphs instead of one: it is no ONNX model", "model");
  }
  const std::string* metadata = model.properties.find(kMetadataKey);
  if (metadata != nullptr) read_metadata(model.metadata, reader, *metadata);
  read_graph(model, reader, graphs[0]);
  return model;
}

}  // namespace

bool ValueType::is_fixed() const {
  return has_shape && std::all_of(dims.begin(), dims.end(), [](const Dimension& dim) { return dim.is_number(); });
}

Dims ValueType::sizes() const {
  Dims made;
  for (const Dimension& dim : dims) made.push_back(dim.size);
  return made;
}

const ValueType* ModelFile::input(const std::string& wanted) const {
  const auto found = input_index.find(wanted);
  return found == input_index.end() ? nullptr : &inputs[found->second];
}

const ValueType* ModelFile::output(const std::string& wanted) const {
  const auto found = output_index.find(wanted);
  return found == output_index.end() ? nullptr : &outputs[found->second];
}

bool ModelFile::is_in_base(const ExternalTensor& tensor) const {
  return !metadata.base.empty() && tensor.location == metadata.base;
}

std::vector<std::string> ModelFile::stored() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : external) {
    if (!is_in_base(tensor)) names.push_back(name);
  }
  return names;
}

ModelFile read_model(const std::string& given) {
  ModelFile model;
  model.name = model.path = tidy_path(given);
  settle(folder_of(model.path));
  try {
    model.data = OpenFile(model.path).read_all();
  } catch (const OsError& error) {
    if (error.code == ENOENT) throw ModelError("there is no model at " + model.path);
    throw ModelError("cannot read the model " + model.path + ": " + error.what());
  }
  return parsed(std::move(model));
}

ModelFile read_model(const Bytes& data) {
  ModelFile model;
  model.name = "model in memory";
  model.data = data;
  return parsed(std::move(model));
}

void take_values(ModelFile& model, std::vector<ValueType> inputs, std::vector<ValueType> outputs) {
  WireReader reader(model.name);
  model.inputs = std::move(inputs);
  model.outputs = std::move(outputs);
  index_names(reader, model);
}

void read_metadata(ModelFile& model, const std::string& text) {
  WireReader reader(model.name);
  read_metadata(model.metadata, reader, text);
}

Bytes ExternalFiles::read(const ExternalTensor& tensor) {
  const std::string file = beside(path_, tensor.location);
  const std::string where = path_ + ": initializer " + quoted(tensor.name);
  settle(folder_of(file));
  try {
    const OpenFile opened(file);
    require_beside(file, path_);
    const uint64_t end = tensor.offset + tensor.length;
    if (end > opened.size) {
      throw ModelError(where + " ends at byte " + std::to_string(end) + " of " + tensor.location +
                       ", which is shorter");
    }
    uint64_t& left = left_.emplace(tensor.location, opened.size).first->second;
    if (tensor.length > left) {
      throw ModelError(where + " overlaps with other tensors in " + tensor.location);
    }
    left -= tensor.length;
    Bytes made = allocate(tensor.length);
    opened.read_into(made.data, tensor.length, tensor.offset);
    return made;
  } catch (const OsError& error) {
    if (error.code == ENOENT) throw ModelError("there is no model at " + file);
    throw ModelError("cannot read the model " + file + ": " + error.what());
  }
}

bool inline_data(const ModelFile& model, const std::string& name, std::string& elements) {
  WireReader reader(model.name);
  const std::string where = "initializer " + quoted(name);
  const std::string_view* message = model.initializers.find(name);
  if (message == nullptr || model.external.find(name) != nullptr) return false;
  bool is_raw = false;
  for (const WireField& field : reader.pick(*message, where, {kTensorRaw})) {
    elements = std::string(reader.message(field, where));
    is_raw = true;
  }
  return is_raw;
}

}  // namespace onnxtrain::device
