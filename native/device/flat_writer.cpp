#include "flat_writer.h"

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace onnxtrain::device {

FlatNodePointer flat_table() { return std::make_unique<FlatNode>(FlatNode::kTable); }
FlatNodePointer flat_nodes() { return std::make_unique<FlatNode>(FlatNode::kNodes); }

FlatNodePointer flat_int64s(std::vector<int64_t> numbers) {
  auto made = std::make_unique<FlatNode>(FlatNode::kInt64s);
  made->int64s = std::move(numbers);
  return made;
}

FlatNodePointer flat_string(std::string text) {
  auto made = std::make_unique<FlatNode>(FlatNode::kString);
  made->text = std::move(text);
  return made;
}

FlatNodePointer flat_bulk(std::shared_ptr<Bulk> bulk) {
  auto made = std::make_unique<FlatNode>(FlatNode::kBulk);
  made->bulk = std::move(bulk);
  return made;
}

namespace {

template <class T>
std::string bytes_of(T number) {
  return std::string(reinterpret_cast<const char*>(&number), sizeof number);
}

uint64_t padding(uint64_t position, uint64_t alignment) { return (alignment - position % alignment) % alignment; }

void check_size(uint64_t size) {
  if (size <= kMaxFileSize) return;
  throw CheckpointError("the checkpoint needs more than " + std::to_string(kMaxFileSize) +
                        " bytes besides its external data, the limit of its format");
}

// The part of the file that is built in memory.
class Front {
 public:
  explicit Front(std::string_view head) : bytes(4, '\0') { bytes += head; }

  // Appends an object and returns its position.
  size_t place(FlatNode& node) {
    if (node.kind == FlatNode::kTable) return place_table(node);
    if (node.kind == FlatNode::kInt64s) {
      pad(8, 4);
    } else {
      pad(4, 0);
    }
    const size_t position = bytes.size();
    if (node.kind == FlatNode::kString) {
      bytes += bytes_of(static_cast<uint32_t>(node.text.size())) + node.text + '\0';
    } else if (node.kind == FlatNode::kInt64s) {
      bytes += bytes_of(static_cast<uint32_t>(node.int64s.size()));
      for (const int64_t number : node.int64s) bytes += bytes_of(number);
    } else {
      bytes += bytes_of(static_cast<uint32_t>(node.nodes.size()));
      for (FlatNodePointer& item : node.nodes) {
        open.emplace_back(bytes.size(), std::move(item));
        bytes.append(4, '\0');
      }
    }
    return position;
  }

  void refer(size_t reference, uint64_t position) {
    check_size(position);
    const auto distance = static_cast<uint32_t>(position - reference);
    std::memcpy(&bytes[reference], &distance, sizeof distance);
  }

  std::string bytes;
  // Positions of offsets that are not known yet, and what they refer to.
  std::deque<std::pair<size_t, FlatNodePointer>> open;

 private:
  struct Field {
    int slot;
    size_t width;
    size_t offset;
  };

  size_t place_table(FlatNode& node) {
    std::vector<Field> fields;
    for (const auto& [slot, scalar] : node.scalars) {
      if (!scalar.is_default) fields.push_back({slot, scalar.bytes.size(), 0});
    }
    for (const auto& child : node.children) fields.push_back({child.first, 4, 0});
    // Widest fields first, right behind the four bytes of the offset to the vtable.
    std::sort(fields.begin(), fields.end(),
              [](const Field& a, const Field& b) { return a.width != b.width ? a.width > b.width : a.slot < b.slot; });
    size_t size = 4, widest = 4;
    int last = -1;
    for (Field& field : fields) {
      field.offset = size;
      size += field.width;
      widest = std::max(widest, field.width);
      last = std::max(last, field.slot);
    }
    const size_t vtable = vtable_of(fields, last, size);
    pad(widest, 4);
    const size_t position = bytes.size();
    bytes += bytes_of(static_cast<int32_t>(position - vtable)) + std::string(size - 4, '\0');
    fill(node, fields, position);
    return position;
  }

  // The position of a vtable; tables of one shape share it.
  size_t vtable_of(const std::vector<Field>& fields, int last, size_t table_size) {
    std::vector<uint16_t> slots(static_cast<size_t>(last + 1), 0);
    for (const Field& field : fields) slots[static_cast<size_t>(field.slot)] = static_cast<uint16_t>(field.offset);
    std::string vtable = bytes_of(static_cast<uint16_t>(4 + 2 * slots.size()));
    vtable += bytes_of(static_cast<uint16_t>(table_size));
    for (const uint16_t offset : slots) vtable += bytes_of(offset);
    const auto found = vtables_.find(vtable);
    if (found != vtables_.end()) return found->second;
    pad(2, 0);
    const size_t position = bytes.size();
    bytes += vtable;
    vtables_.emplace(vtable, position);
    return position;
  }

  // Writes the numbers of a table; what it refers to comes later, in the order of the fields.
  void fill(FlatNode& node, const std::vector<Field>& fields, size_t position) {
    std::map<int, size_t> offsets;
    for (const Field& field : fields) offsets[field.slot] = position + field.offset;
    for (const auto& [slot, at] : offsets) {
      const auto child = node.children.find(slot);
      if (child != node.children.end()) {
        open.emplace_back(at, std::move(child->second));
      } else {
        bytes.replace(at, node.scalars[slot].bytes.size(), node.scalars[slot].bytes);
      }
    }
  }

  // Adds zeros until the position `ahead` bytes further on is aligned.
  void pad(size_t alignment, size_t ahead) { bytes.append(padding(bytes.size() + ahead, alignment), '\0'); }

  std::map<std::string, size_t> vtables_;
};

}  // namespace

FlatLayout lay_out(FlatNodePointer root, std::string_view head) {
  Front front(head);
  front.open.emplace_back(0, std::move(root));
  std::vector<std::pair<size_t, std::shared_ptr<Bulk>>> waiting;
  while (!front.open.empty()) {
    const auto [reference, node] = std::move(front.open.front());
    front.open.pop_front();
    if (node->kind == FlatNode::kBulk) {
      waiting.emplace_back(reference, node->bulk);
    } else {
      front.refer(reference, front.place(*node));
    }
  }
  FlatLayout layout;
  layout.end = front.bytes.size();
  for (const auto& [reference, bulk] : waiting) {
    // The length, four bytes, stands in front of the data.
    bulk->offset = layout.end + 4 + padding(layout.end + 4, bulk->alignment);
    front.refer(reference, bulk->offset - 4);
    layout.end = bulk->offset + bulk->length;
    layout.bulks.push_back(bulk);
  }
  check_size(layout.end);
  layout.front = std::move(front.bytes);
  return layout;
}

}  // namespace onnxtrain::device
