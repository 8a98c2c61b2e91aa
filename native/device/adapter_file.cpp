// Reads and writes `.onnx_adapter` files: FlatBuffers, and behind it a record that ONNX Runtime does not look at, JSON
// about the adapter and a checksum. Files are not trusted. Field numbers are those of the schema.
#include <algorithm>
#include <cstring>

#include "adapter.h"
#include "checksums.h"
#include "files.h"
#include "flat_reader.h"
#include "flat_writer.h"
#include "folder_lock.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr std::string_view kIdentifier = "TORT", kMark = "TORTNOTE";
constexpr int32_t kVersion = 1;
constexpr uint64_t kNoteEnd = 16;  // the length of the JSON before, the CRC-32 of all before, and the mark
constexpr int64_t kMaxRank = 32;   // the limit of numpy 1
constexpr int64_t kMostElements = (int64_t{1} << 58) - 1;
constexpr uint64_t kTableSize = 1024;  // more than a tensor needs besides its elements
constexpr int kComplex64Code = 14, kComplex128Code = 15;
constexpr const char* kPeftWeights = "adapter_model.safetensors";

bool is_refused(int code) {
  return code == kStringCode || code == kBoolCode || code == kComplex64Code || code == kComplex128Code;
}

std::string too_large() { return "an .onnx_adapter file holds less than " + with_commas(kMaxFileSize) + " bytes"; }

// ---- reading ----

// What our files have behind the FlatBuffers part; those of others have nothing there.
Json read_note(const Bytes& data, const std::string& source) {
  if (data.size < kNoteEnd) return Json::of_object();
  const uint64_t end = data.size - kNoteEnd;
  const std::string_view mark = data.view().substr(end + 8);
  if (!is_mark(mark, kMark)) return Json::of_object();
  const auto length = number_at<uint32_t>(data.data + end), crc = number_at<uint32_t>(data.data + end + 4);
  if (mark != kMark || length > end || crc != crc32(data.view().substr(0, end + 4))) {
    throw AdapterError(source + ": the checksum does not match: the file is damaged");
  }
  Json found;
  const std::string wrong = source + ": the record at its end cannot be read: ";
  if (!parse_json(data.view().substr(end - length, length), Numbers::kPlain, found)) {
    throw AdapterError(wrong + "it is not valid JSON");
  }
  if (found.kind != Json::kObject) {
    throw AdapterError(wrong + "the record at its end is " + shown(found, 60) + ", not an object");
  }
  return found;
}

Tensor read_tensor(const FlatTable& table, const Bytes& data) {
  Tensor made;
  made.code = table.int32(2, "data_type");
  const ElementType* type = element_type(made.code);
  if (type == nullptr || is_refused(made.code)) {
    const std::string kind = type != nullptr ? type->name : std::to_string(made.code);
    table.fail("the element type " + kind + " is not one that an adapter may have");
  }
  made.dims = table.int64s(1, "dims", kMaxRank);
  int64_t elements = 1;
  for (const int64_t dim : made.dims) {
    const int64_t size = std::max<int64_t>(dim, 1);
    if (dim < 0 || size > kMostElements / elements) {
      table.fail("the dimensions " + tuple_text(made.dims) + " are impossible");
    }
    elements *= size;
  }
  if (made.dims.empty()) table.fail("it has no dimensions");
  const auto [start, count] = table.span(3, "raw_data");
  const uint64_t size = data_size(made.code, made.dims);
  if (static_cast<uint64_t>(count) != size) {
    table.fail("the dimensions " + list_text(made.dims) + " need " + std::to_string(size) +
               " bytes of data, but there are " + std::to_string(count));
  }
  made.data = data.part(static_cast<uint64_t>(start), size);
  return made;
}

Named<Tensor> read_tensors(const Bytes& data, const std::string& source) {
  FlatReader reader(data, source);
  const FlatTable root = reader.root(kIdentifier, "adapter");
  const int32_t version = root.int32(0, "format_version");
  if (version != kVersion) {
    root.fail("the format version is " + std::to_string(version) + "; version " + std::to_string(kVersion) +
              " can be read");
  }
  for (const auto& [slot, name] : {std::pair(1, "adapter_version"), std::pair(2, "model_version")}) {
    root.int32(slot, name);
  }
  Named<Tensor> tensors;
  root.each_table(3, "parameters", [&](FlatTable& table) {
    const std::string name = *table.string(0, "name");
    if (name.empty()) table.fail("the name is missing");
    table.where += " (" + quoted(first_characters(name, 80)) + ")";
    if (tensors.find(name) != nullptr) table.fail("the name occurs twice");
    tensors[name] = read_tensor(table, data);
  });
  return tensors;
}

Adapter read_onnx_adapter(const Bytes& data, const std::string& source) {
  if (data.size > kMaxFileSize) throw AdapterError(source + ": " + too_large());
  const Json note = read_note(data, source);
  Adapter made;
  made.tensors = read_tensors(data, source);
  try {
    made.factors = read_factors(note.find("lora"), note.find("base"));
  } catch (const Error& error) {
    throw AdapterError(source + ": the record at its end is wrong: " + error.what());
  }
  require_float_types(made.tensors);
  if (made.factors.pairs.empty()) made.factors.pairs = pairs_by_name(made.tensors, source);
  require_consistent(made, source);
  return made;
}

// ---- writing ----

template <class T>
void append(std::string& bytes, T number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

FlatNodePointer tensor_node(const std::string& name, const Tensor& tensor) {
  if (is_refused(tensor.code) || tensor.dims.empty()) {
    throw AdapterError(quoted(name) + ": an adapter cannot hold " + element_type(tensor.code)->name + " of the shape " +
                       list_text(tensor.dims));
  }
  FlatNodePointer table = flat_table();
  table->children[0] = flat_string(name);
  table->children[1] = flat_int64s(tensor.dims);
  table->set<int32_t>(2, tensor.code);
  table->children[3] = flat_bulk(std::make_shared<Bulk>(Bulk{tensor.data.data, tensor.data.size, kAlignment}));
  return table;
}

FlatLayout layout_of(const Adapter& adapter) {
  std::map<std::string, const Tensor*> sorted;
  for (const auto& [name, tensor] : adapter.tensors) sorted[name] = &tensor;
  FlatNodePointer root = flat_table(), parameters = flat_nodes();
  uint64_t size = 0;
  for (const auto& [name, tensor] : sorted) {
    parameters->nodes.push_back(tensor_node(name, *tensor));
    size += tensor->data.size + kTableSize;
  }
  if (size > kMaxFileSize) throw AdapterError(too_large());
  for (const int slot : {0, 1, 2}) root->set<int32_t>(slot, kVersion);  // of the format, the adapter and the model
  root->children[3] = std::move(parameters);
  return lay_out(std::move(root), kIdentifier);
}

std::string adapter_bytes(const Adapter& adapter) {
  const FlatLayout layout = layout_of(adapter);
  const std::string note = to_json(record_of(adapter.factors));
  std::string bytes;
  bytes.reserve(static_cast<size_t>(layout.end) + note.size() + kNoteEnd);
  bytes += layout.front;
  for (const auto& bulk : layout.bulks) {
    bytes.resize(static_cast<size_t>(bulk->offset) - 4, '\0');
    append(bytes, static_cast<uint32_t>(bulk->length));
    if (bulk->length > 0) bytes.append(reinterpret_cast<const char*>(bulk->data), static_cast<size_t>(bulk->length));
  }
  bytes += note;
  append(bytes, static_cast<uint32_t>(note.size()));
  append(bytes, crc32(bytes));
  return bytes += kMark;
}

}  // namespace

Adapter read_adapter(const std::string& given) {
  std::string path = tidy_path(given);
  if (is_folder(path)) path += std::string("/") + kPeftWeights;
  settle(folder_of(path));
  const Bytes data = translated("read", path, [&] { return OpenFile(path).read_all(); });
  if (data.size >= 8 && data.view().substr(4, 4) == kIdentifier) return read_onnx_adapter(data, path);
  if (data.size > 8 && data.data[8] == '{') {
    throw AdapterError(path +
                       " is an adapter of PEFT, which Python reads: make an .onnx_adapter file of it with 'onnxtrain "
                       "adapter convert'");
  }
  throw AdapterError(path + " is not an adapter: it is neither an .onnx_adapter file nor safetensors");
}

void write_adapter(const std::string& given, const Adapter& adapter) {
  const std::string path = tidy_path(given), bytes = adapter_bytes(adapter);
  if (path.empty() || path == "." || path == "/") throw AdapterError(quoted(given) + " does not name a file");
  translated("write", path, [&] { replace_file(path, [&](NewFile& file) { file.write(bytes); }); });
}

}  // namespace onnxtrain::device
