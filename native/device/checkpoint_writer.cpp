// The layout of the files of a checkpoint, and their bytes.
#include <algorithm>
#include <cmath>

#include "checkpoint.h"
#include "checkpoint_parts.h"
#include "checkpoint_store.h"
#include "checksums.h"
#include "flat_writer.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr uint64_t kMebibyte = 1 << 20;
constexpr uint64_t kExternalTensorSize = 64;  // smaller tensors stay in the file itself
constexpr uint64_t kNoThreshold = UINT64_MAX;

uint64_t rounded_up(uint64_t size) { return std::max<uint64_t>(1, (size + kMebibyte - 1) / kMebibyte) * kMebibyte; }

uint64_t size_of(const std::string& name, const Tensor& tensor) {
  return character_count(name) + data_size(tensor.code, tensor.dims);
}

uint64_t size_of(const Named<Tensor>& tensors) {
  uint64_t size = 0;
  for (const auto& [name, tensor] : tensors) size += size_of(name, tensor);
  return size;
}

uint64_t size_of_moments(const CheckpointContent& content) {
  uint64_t size = 0;
  for (const auto& group : content.groups) {
    for (const auto& [name, tensors] : group.second.states) {
      for (const Tensor& tensor : tensors) size += size_of(name, tensor);
    }
  }
  return size;
}

FlatNodePointer name_node(const std::string& name) {
  if (name.empty()) throw CheckpointError("'' is not a name");
  return flat_string(name);
}

// Writes zeros up to an offset.
template <class Output>
void write_zeros(Output& output, uint64_t count) {
  const std::string zeros(static_cast<size_t>(count), '\0');
  output.write(zeros.data(), zeros.size());
}

class CheckpointLayout {
 public:
  CheckpointLayout(const CheckpointContent& content, Order order, uint64_t threshold, const std::string& identifier)
      : order_(order), nominal_(content.nominal), identifier_(identifier) {
    check(content);
    const uint64_t moments = size_of_moments(content);
    const uint64_t size = size_of(content.trainable) + size_of(content.frozen) + moments;
    const bool may_be_external = threshold != kNoThreshold && !nominal_;
    is_external_ = may_be_external && (content.has_external_data || rounded_up(size) >= threshold);
    // ONNX Runtime looks for momentums in the first file, so they leave it only if they do not fit.
    has_external_moments_ = is_external_ && rounded_up(moments) >= kExternalDataThreshold;
    layout_ = lay_out(root_of(content), std::string(kIdentifier) + std::string(kFrontSize, '\0'));
    const std::string front = front_of(layout_.end + kEndSize, layout_.front.size());
    layout_.front.replace(kFrontAt, front.size(), front);
  }

  bool is_external() const { return is_external_; }

  // Writes the file itself.
  template <class Output>
  void write_main(Output& output) const {
    uint32_t crc = 0;
    const auto write = [&](const void* data, size_t size) {
      output.write(data, size);
      crc = crc32(data, size, crc);
    };
    write(layout_.front.data(), layout_.front.size());
    uint64_t end = layout_.front.size();
    for (const auto& bulk : layout_.bulks) {
      std::string between(static_cast<size_t>(bulk->offset - 4 - end), '\0');
      const auto length = static_cast<uint32_t>(bulk->length);
      between.append(reinterpret_cast<const char*>(&length), sizeof length);
      write(between.data(), between.size());
      if (bulk->length > 0) write(bulk->data, static_cast<size_t>(bulk->length));
      end = bulk->offset + bulk->length;
    }
    const std::string last = end_of(crc);
    output.write(last.data(), last.size());
  }

  // Writes the external data.
  void write_data(NewFile& file) const {
    BlockWriter blocks(file);
    uint64_t end = 0;
    for (const auto& bulk : outside_) {
      write_zeros(blocks, bulk->offset - end);
      blocks.write(bulk->data, static_cast<size_t>(bulk->length));
      end = bulk->offset + bulk->length;
    }
    blocks.finish();
    file.write(footer_of(identifier_));
  }

 private:
  static void check(const CheckpointContent& content) {
    std::vector<std::string> both;
    for (const auto& item : content.trainable) {
      if (content.frozen.find(item.first) != nullptr) both.push_back(item.first);
    }
    if (!both.empty()) {
      throw CheckpointError(quoted(*std::min_element(both.begin(), both.end())) + " is trainable and frozen at once");
    }
    if (content.nominal && content.groups.size() > 0) {
      throw CheckpointError("a nominal checkpoint holds no state of an optimizer");
    }
  }

  // The items of a mapping in the order of the file.
  template <class T>
  std::vector<const std::pair<std::string, T>*> items(const Named<T>& mapping) const {
    std::vector<const std::pair<std::string, T>*> found;
    for (const auto& item : mapping) found.push_back(&item);
    if (order_ == Order::kByName) {
      std::sort(found.begin(), found.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
    }
    return found;
  }

  FlatNodePointer root_of(const CheckpointContent& content) {
    FlatNodePointer root = flat_table();
    root->set<int32_t>(0, kVersion);
    FlatNodePointer module = flat_table();
    int slot = 0;
    for (const auto* tensors : {&content.trainable, &content.frozen}) {
      FlatNodePointer list = flat_nodes();
      for (const auto* item : items(*tensors))
        list->nodes.push_back(tensor_node(item->first, item->second, is_external_));
      module->children[slot++] = std::move(list);
    }
    module->set<uint8_t>(2, content.nominal);
    module->set<uint8_t>(3, is_external_);
    root->children[1] = std::move(module);
    if (order_ == Order::kByName || content.groups.size() > 0) {
      FlatNodePointer groups = flat_nodes();
      for (const auto* item : items(content.groups)) groups->nodes.push_back(group_node(item->first, item->second));
      root->children[2] = std::move(groups);
    }
    Named<Property> properties = content.properties;
    if (is_external_) {
      properties[std::string(kDataIdentifier)] = std::make_shared<const std::string>(identifier_);
    }
    if (properties.size() > 0) root->children[3] = property_node(properties);
    return root;
  }

  FlatNodePointer tensor_node(const std::string& name, const Tensor& tensor, bool may_be_outside) {
    FlatNodePointer table = flat_table();
    table->children[0] = name_node(name);
    table->children[2] = flat_int64s(nominal_ ? Dims() : tensor.dims);
    table->set<int32_t>(3, tensor.code);
    if (nominal_) {
      table->children[4] = flat_bulk(std::make_shared<Bulk>(Bulk{nullptr, 0, 4}));
      return table;
    }
    if (tensor.code == kStringCode) {
      FlatNodePointer strings = flat_nodes();
      for (const Text& text : tensor.strings) strings->nodes.push_back(flat_string(*text));
      table->children[5] = std::move(strings);
      return table;
    }
    const uint64_t length = data_size(tensor.code, tensor.dims);
    if (tensor.data.size != length) {
      throw CheckpointError("tensor " + quoted(name) + ": " + std::to_string(tensor.data.size) +
                            " bytes of data do not fill " + tuple_text(tensor.dims));
    }
    const bool is_large = length >= kExternalTensorSize;
    auto bulk = std::make_shared<Bulk>(Bulk{tensor.data.data, length, is_large ? kAlignment : 8});
    if (may_be_outside && is_large) {
      bulk->offset = (data_end_ + kAlignment - 1) / kAlignment * kAlignment;
      data_end_ = bulk->offset + length;
      outside_.push_back(bulk);
      table->set<int64_t>(6, static_cast<int64_t>(bulk->offset), -1);
    } else {
      table->children[4] = flat_bulk(std::move(bulk));
    }
    return table;
  }

  FlatNodePointer group_node(const std::string& name, const OptimizerGroup& group) {
    FlatNodePointer table = flat_table(), states = flat_nodes();
    table->children[0] = name_node(name);
    table->set<int64_t>(1, group.step);
    table->set<float>(2, group.initial_learning_rate);
    for (const auto* item : items(group.states)) {
      FlatNodePointer state = flat_table(), moments = flat_nodes();
      state->children[0] = name_node(item->first);
      for (size_t k = 0; k < item->second.size(); ++k) {
        const std::string moment = "momentum" + std::to_string(k);
        moments->nodes.push_back(tensor_node(moment, item->second[k], has_external_moments_));
      }
      state->children[1] = std::move(moments);
      states->nodes.push_back(std::move(state));
    }
    table->children[3] = std::move(states);
    return table;
  }

  FlatNodePointer property_node(const Named<Property>& properties) const {
    FlatNodePointer bag = flat_table();
    for (int slot = 0; slot < 3; ++slot) bag->children[slot] = flat_nodes();
    for (const auto* item : items(properties)) {
      FlatNodePointer table = flat_table();
      table->children[0] = name_node(item->first);
      const Property& value = item->second;
      if (const auto* number = std::get_if<int64_t>(&value)) table->set<int64_t>(1, *number);
      if (const auto* number = std::get_if<float>(&value)) table->set<float>(1, *number);
      if (const auto* text = std::get_if<Text>(&value)) table->children[1] = flat_string(**text);
      bag->children[static_cast<int>(value.index())]->nodes.push_back(std::move(table));
    }
    return bag;
  }

  Order order_;
  bool nominal_;
  std::string identifier_;
  bool is_external_ = false, has_external_moments_ = false;
  std::vector<std::shared_ptr<Bulk>> outside_;  // in the second file
  uint64_t data_end_ = 0;
  FlatLayout layout_;
};

struct StringOutput {
  std::string& text;
  void write(const void* data, size_t size) { text.append(static_cast<const char*>(data), size); }
};

}  // namespace

void write_checkpoint(const std::string& given, const CheckpointContent& content, Order order,
                      uint64_t external_data_threshold) {
  const std::string path = tidy_path(given), identifier = random_digits(8);
  if (path.empty() || path == "." || path == "/") throw CheckpointError(quoted(given) + " does not name a file");
  const CheckpointLayout layout(content, order, external_data_threshold, identifier);
  const Write main = [&](NewFile& file) { layout.write_main(file); };
  Write data;
  if (layout.is_external()) data = [&](NewFile& file) { layout.write_data(file); };
  store_checkpoint(path, main, data, identifier, [&] { return live_identifier(path); });
}

std::string checkpoint_bytes(const CheckpointContent& content, Order order) {
  std::string bytes;
  StringOutput output{bytes};
  CheckpointLayout(content, order, kNoThreshold, "").write_main(output);
  return bytes;
}

}  // namespace onnxtrain::device
