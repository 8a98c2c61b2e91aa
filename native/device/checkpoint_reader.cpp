// Reads checkpoints, which are not trusted. Field numbers are those of the schema.
#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "checkpoint.h"
#include "checkpoint_parts.h"
#include "checkpoint_store.h"
#include "checksums.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr int64_t kMaxRank = 32;  // the limit of numpy 1
constexpr int64_t kMostElements = (int64_t{1} << 58) - 1;
constexpr uint64_t kUpstreamAlignment = 4;
constexpr uint64_t kLargestGap = 4096;  // as much as a writer may need to begin at a page of memory
// A reader may come between the two renames of a writer.
constexpr int kAttempts = 5;
constexpr auto kPause = std::chrono::milliseconds(20);

// A tensor of the file: its type, where its elements are, and where it belongs.
struct Entry {
  FlatTable table;
  int code;
  Dims dims;
  int64_t offset = 0;
  uint64_t size = 0;
  bool is_external = false;
  std::vector<Text> strings = {};
};

// Reads a name, which is required and not yet taken, and tells it to errors to come.
template <class IsTaken>
std::string name_in(FlatTable& table, const char* field, const IsTaken& is_taken) {
  const std::string name = *table.string(0, field);
  if (name.empty()) table.fail(std::string(field) + " is missing");
  if (is_taken(name)) table.fail("the name " + quoted(name) + " occurs twice");
  table.where += " (" + quoted(first_characters(name, 80)) + ")";
  return name;
}

// Checks that tensors of one file do not overlap, and returns where the last one ends. Training one
// of two that share bytes would change the other.
uint64_t require_apart(std::vector<const Entry*> entries) {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry* a, const Entry* b) { return a->offset < b->offset; });
  uint64_t end = 0;
  for (const Entry* entry : entries) {
    if (entry->size == 0) continue;
    const auto offset = static_cast<uint64_t>(entry->offset);
    if (offset < end) entry->table.fail("its elements overlap with those of another tensor");
    if (entry->is_external && offset - end >= kLargestGap) {
      entry->table.fail(std::to_string(offset - end) + " bytes of external data before it are unused");
    }
    end = offset + entry->size;
  }
  return end;
}

void check_offset(const Entry& entry, uint64_t alignment) {
  if (entry.offset >= 0 && static_cast<uint64_t>(entry.offset) % alignment == 0) return;
  entry.table.fail("the offset in the external data is " + std::to_string(entry.offset) + ", not a multiple of " +
                   std::to_string(alignment));
}

std::string shown_between(const std::vector<const Entry*>& entries, uint64_t start, uint64_t stop) {
  std::vector<std::string> touched;
  for (const Entry* entry : entries) {
    const auto offset = static_cast<uint64_t>(entry->offset);
    if (offset < stop && offset + entry->size > start && touched.size() < 3) touched.push_back(entry->table.where);
  }
  return touched.empty() ? "no tensor" : joined(touched, ", ");
}

class CheckpointReader {
 public:
  CheckpointReader(const Bytes& data, const std::string& path)
      : path_(path), reader_(data, path.empty() ? "checkpoint" : path), root_(reader_.root(kIdentifier, "checkpoint")) {
    const int32_t version = root_.int32(0, "version");
    if (version != 1 && version != kVersion) {
      root_.fail("the format version is " + std::to_string(version) + "; versions (1, 2) can be read");
    }
  }

  // Reads all. Nothing is allocated or copied before everything is checked.
  CheckpointContent read() {
    bool is_announced = false;
    const std::string wrong = check_file(reader_.data.view(), is_announced);
    if (!wrong.empty()) root_.fail(wrong);
    CheckpointContent content;
    const std::string identifier = properties(content.properties);
    if (root_.has_table(1, "module_state")) read_module(root_.table(1, "module_state"), content);
    root_.each_table(2, "optimizer_groups", [&](FlatTable& table) {
      const auto is_taken = [&](const std::string& name) { return content.groups.find(name) != nullptr; };
      const std::string name = name_in(table, "group_name", is_taken);
      read_group(table, content.groups[name]);
    });
    fill(content, identifier, is_announced);
    return content;
  }

  // Reads the properties, and returns the identifier of the external data, or "".
  std::string properties(Named<Property>& found) {
    std::string identifier;
    bool has_identifier = false;
    const auto put = [&](FlatTable& table, const auto& value_of) {
      const auto is_taken = [&](const std::string& name) {
        return found.find(name) != nullptr || (has_identifier && name == kDataIdentifier);
      };
      const Property value = value_of(table);
      const std::string name = name_in(table, "name", is_taken);
      if (name != kDataIdentifier) {
        found[name] = value;
        return;
      }
      has_identifier = true;
      const Text* text = std::get_if<Text>(&value);
      if (text != nullptr && is_hexadecimal(**text, 16)) identifier = **text;
    };
    if (!root_.has_table(3, "property_bag")) return identifier;
    const FlatTable bag = root_.table(3, "property_bag");
    bag.each_table(0, "ints", [&](FlatTable& table) {
      put(table, [](const FlatTable& t) { return Property(t.int64(1, "value")); });
    });
    bag.each_table(1, "floats", [&](FlatTable& table) {
      put(table, [](const FlatTable& t) { return Property(t.float32(1, "value")); });
    });
    bag.each_table(2, "strings", [&](FlatTable& table) {
      put(table, [](const FlatTable& t) { return Property(t.string(1, "value")); });
    });
    return identifier;
  }

 private:
  void read_module(const FlatTable& module, CheckpointContent& content) {
    content.nominal = module.flag(2, "is_nominal_state");
    content.has_external_data = module.flag(3, "has_external_data");
    const auto is_taken = [&](const std::string& name) {
      return content.trainable.find(name) != nullptr || content.frozen.find(name) != nullptr;
    };
    const auto read = [&](int slot, const char* field, Named<Tensor>& tensors) {
      module.each_table(slot, field, [&](FlatTable& table) {
        const std::string name = name_in(table, "name", is_taken);
        entries_.push_back(entry_of(table, content.nominal));
        tensors[name];
      });
    };
    read(0, "requires_grad_params", content.trainable);
    read(1, "frozen_params", content.frozen);
  }

  void read_group(FlatTable& table, OptimizerGroup& group) {
    group.step = table.int64(1, "step");
    group.initial_learning_rate = table.float32(2, "initial_learning_rate");
    if (group.step < 0) table.fail("the step is " + std::to_string(group.step));
    table.each_table(3, "optimizer_states", [&](FlatTable& state) {
      const auto is_taken = [&](const std::string& name) { return group.states.find(name) != nullptr; };
      const std::string parameter = name_in(state, "param_name", is_taken);
      read_moments(state, group.states[parameter]);
    });
  }

  void read_moments(FlatTable& state, std::vector<Tensor>& tensors) {
    std::vector<std::pair<std::string, Entry>> moments;
    std::set<std::string> names;
    state.each_table(1, "momentums", [&](FlatTable& moment) {
      const std::string name = name_in(moment, "name", [&](const std::string& n) { return names.count(n) > 0; });
      names.insert(name);
      moments.emplace_back(name, entry_of(moment, false));
    });
    std::vector<std::string> expected, shown_names, shown_expected;
    for (size_t k = 0; k < moments.size(); ++k) expected.push_back("momentum" + std::to_string(k));
    for (const std::string& name : names) shown_names.push_back(quoted(name));
    for (const std::string& name : expected) shown_expected.push_back(quoted(name));
    if (names != std::set<std::string>(expected.begin(), expected.end())) {
      state.fail("the momentums are called [" + joined(shown_names, ", ") + "] instead of [" +
                 joined(shown_expected, ", ") + "]");
    }
    std::sort(moments.begin(), moments.end(), [](const auto& a, const auto& b) {
      return a.first.size() != b.first.size() ? a.first.size() < b.first.size() : a.first < b.first;
    });
    for (auto& moment : moments) entries_.push_back(std::move(moment.second));
    tensors.resize(moments.size());
  }

  static Entry entry_of(const FlatTable& table, bool nominal) {
    Entry entry{table, table.int32(3, "data_type"), {}};
    if (element_type(entry.code) == nullptr) {
      table.fail("the element type " + std::to_string(entry.code) + " is unknown");
    }
    entry.dims = table.int64s(2, "dims", kMaxRank);
    int64_t elements = 1;
    for (const int64_t dim : entry.dims) {
      const int64_t size = std::max<int64_t>(dim, 1);  // numpy checks the product without zeros, too
      if (dim < 0 || size > kMostElements / elements) {
        table.fail("the dimensions " + tuple_text(entry.dims) + " are impossible");
      }
      elements *= size;
    }
    if (nominal) {
      if (table.span(4, "raw_data").second != 0) table.fail("a nominal checkpoint has data");
      return entry;
    }
    if (entry.code == kStringCode) {
      entry.strings = table.strings(5, "string_data");
      if (entry.strings.size() != elements_of(entry.dims)) {
        table.fail(std::to_string(entry.strings.size()) + " strings do not fill the dimensions " +
                   tuple_text(entry.dims));
      }
      return entry;
    }
    entry.size = data_size(entry.code, entry.dims);
    entry.offset = table.int64(6, "external_data_offset", -1);
    entry.is_external = entry.offset != -1;
    if (entry.is_external) return entry;
    const auto [start, count] = table.span(4, "raw_data");
    if (static_cast<uint64_t>(count) != entry.size) {
      table.fail("the dimensions need " + std::to_string(entry.size) + " bytes of data, but there are " +
                 std::to_string(count));
    }
    entry.offset = start;
    return entry;
  }

  // Makes the tensors, in the order in which they were found.
  void fill(CheckpointContent& content, const std::string& identifier, bool is_announced) {
    std::vector<const Entry*> inside, outside;
    for (const Entry& entry : entries_) (entry.is_external ? outside : inside).push_back(&entry);
    require_apart(inside);
    Bytes data;
    if (content.has_external_data) {
      if (path_.empty()) throw CheckpointError("the checkpoint has external data: read it by its path");
      data = read_external(identifier, outside, is_announced);
    } else if (!outside.empty()) {
      outside[0]->table.fail("the tensor is in external data, but the checkpoint has none");
    }
    auto entry = entries_.begin();
    const auto put = [&](Tensor& tensor) { tensor = tensor_of(*entry++, data); };
    for (auto& item : content.trainable) put(item.second);
    for (auto& item : content.frozen) put(item.second);
    for (auto& group : content.groups) {
      for (auto& state : group.second.states) {
        for (Tensor& tensor : state.second) put(tensor);
      }
    }
  }

  Tensor tensor_of(const Entry& entry, const Bytes& external) const {
    Tensor tensor{entry.code, entry.dims, {}, entry.strings};
    if (entry.size == 0) return tensor;  // without elements, the offset may be anywhere
    const Bytes& source = entry.is_external ? external : reader_.data;
    tensor.data = source.part(static_cast<uint64_t>(entry.offset), entry.size);
    const bool is_bool = entry.code == kBoolCode;
    if (is_bool && *std::max_element(tensor.data.data, tensor.data.data + entry.size) > 1) {
      entry.table.fail("a bool is neither 0 nor 1");
    }
    return tensor;
  }

  // `is_announced` says that the checkpoint has checksums, and so do its data.
  Bytes read_external(const std::string& identifier, const std::vector<const Entry*>& entries, bool is_announced) {
    for (const Entry* entry : entries) check_offset(*entry, is_announced ? kAlignment : kUpstreamAlignment);
    const uint64_t end = require_apart(entries);
    const auto file = open_data(path_, identifier, !is_announced);
    return translated("read", file->path, [&]() -> Bytes {
      require_beside(file->path, path_);
      if (file->size < end) {
        throw CheckpointError(path_ + ": " + std::to_string(end) + " bytes of external data are needed, but " +
                              file->path + " has " + std::to_string(file->size) + ": it is truncated or damaged");
      }
      if (!is_announced) {
        Bytes data = allocate(end);
        file->read_into(data.data, end, 0);
        return data;
      }
      try {
        return read_checked(*file, file->size - kFooterSize, end);
      } catch (const DamagedData& damage) {
        throw CheckpointError(file->path + " is damaged: " + damage.what);
      } catch (const DamagedBlock& block) {
        throw CheckpointError(file->path + " is damaged: the checksum of bytes " + std::to_string(block.start) +
                              " to " + std::to_string(block.stop) + " does not match. They belong to " +
                              shown_between(entries, block.start, block.stop));
      }
    });
  }

  std::string path_;
  FlatReader reader_;
  FlatTable root_;
  std::vector<Entry> entries_;
};

}  // namespace

CheckpointContent read_checkpoint(const std::string& given) {
  const std::string path = tidy_path(given);
  for (int attempt = 1;; ++attempt) {
    try {
      const auto file = open_checkpoint(path);
      const Bytes data = translated("read", path, [&] { return file->read_all(); });
      return CheckpointReader(data, path).read();
    } catch (const CheckpointDataError&) {
      if (attempt == kAttempts) throw;
    }
    std::this_thread::sleep_for(kPause);
  }
}

CheckpointContent read_checkpoint(const Bytes& data) { return CheckpointReader(data, "").read(); }

std::string live_identifier(const std::string& path) {
  try {
    if (!exists(path)) return "";
    const auto file = open_checkpoint(path);
    const std::string front =
        translated("read", path, [&] { return file->read(0, std::min<uint64_t>(file->size, kFrontAt + kFrontSize)); });
    const uint64_t size = std::min(file->size, structure_size(front));
    Bytes data = translated("read", path, [&] { return allocate(size); });
    translated("read", path, [&] { file->read_into(data.data, size, 0); });
    Named<Property> ignored;
    return CheckpointReader(data, path).properties(ignored);
  } catch (const UnreadableError&) {
    throw;  // it may be whole, and its data no leftovers
  } catch (const CheckpointError&) {
    return "";  // damaged: nothing to preserve
  }
}

}  // namespace onnxtrain::device
