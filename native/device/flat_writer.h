// New FlatBuffers files: tables, strings and short vectors first, then the elements of tensors.
//
// The elements are not copied: the layout knows where they go, and they are written straight to the
// file. An object always follows its owner.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace onnxtrain::device {

constexpr uint64_t kMaxFileSize = (uint64_t{1} << 31) - 2;  // FlatBuffers' limit

// A vector of bytes that is written at `offset`.
struct Bulk {
  const uint8_t* data;
  uint64_t length;
  uint64_t alignment;
  uint64_t offset = 0;
};

struct FlatNode;
using FlatNodePointer = std::unique_ptr<FlatNode>;

// A number in a table, as its bytes; FlatBuffers omits a field with its default.
struct FlatScalar {
  std::string bytes;
  bool is_default = false;
};

// An object of the file: one of the kinds below.
struct FlatNode {
  enum Kind { kTable, kNodes, kInt64s, kString, kBulk } kind;
  std::map<int, FlatScalar> scalars;        // fields of a table, by their numbers in the schema
  std::map<int, FlatNodePointer> children;  // other fields
  std::vector<FlatNodePointer> nodes;       // a vector of tables or strings
  std::vector<int64_t> int64s;
  std::string text;
  std::shared_ptr<Bulk> bulk;

  explicit FlatNode(Kind kind) : kind(kind) {}
  template <class T>
  void set(int slot, T number, T otherwise = T{}) {
    const auto* bytes = reinterpret_cast<const char*>(&number);
    scalars[slot] = {std::string(bytes, sizeof number), number == otherwise};
  }
};

FlatNodePointer flat_table();
FlatNodePointer flat_nodes();
FlatNodePointer flat_int64s(std::vector<int64_t> numbers);
FlatNodePointer flat_string(std::string text);
FlatNodePointer flat_bulk(std::shared_ptr<Bulk> bulk);

struct FlatLayout {
  std::string front;                         // all before the elements of tensors
  std::vector<std::shared_ptr<Bulk>> bulks;  // in the order in which they follow
  uint64_t end = 0;
};

// Assigns offsets to all objects. `head` follows the first four bytes: the identifier of the file,
// and what no table refers to.
FlatLayout lay_out(FlatNodePointer root, std::string_view head);

}  // namespace onnxtrain::device
