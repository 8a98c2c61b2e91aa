// FlatBuffers files that may be broken or hostile.
//
// Each offset, length and string is checked before it is followed, and the work is bounded by the
// size of the file: a file cannot crash the reader, keep it busy or fill the memory. Every error
// names the file, the object and the byte.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bytes.h"
#include "errors.h"

namespace onnxtrain::device {

constexpr int64_t kMaxTables = 1000000;  // as FlatBuffers' verifier has it
constexpr int64_t kMaxStrings = kMaxTables;

// A string of the file. Objects may share one, so that it takes no more memory than in the file.
using Text = std::shared_ptr<const std::string>;

class FlatTable;

// The bytes of a file, and how many of them were read.
class FlatReader {
 public:
  FlatReader(Bytes data, std::string source) : data(std::move(data)), source_(std::move(source)) {}

  // The root table of a file that carries `identifier`; `what` is what the file is.
  FlatTable root(std::string_view identifier, const std::string& what);

  [[noreturn]] void fail(const std::string& what, const std::string& where, int64_t position = -1) const;
  int64_t size() const { return static_cast<int64_t>(data.size); }

  const Bytes data;

 private:
  friend class FlatTable;

  struct Layout {
    uint16_t table_size = 0;
    std::vector<uint16_t> offsets;
  };

  void need(int64_t position, int64_t size, const std::string& where) const;
  // Counts the bytes of an object. Objects of a valid file do not overlap, so the sum of their
  // sizes cannot exceed that of the file; it does in a file that was made to expand without end.
  void claim(int64_t position, int64_t size, const std::string& where);
  template <class T>
  T number(int64_t position, const std::string& where) const;
  int64_t follow(int64_t position, const std::string& where) const;
  const Text& string(int64_t position, const std::string& where);
  const Layout& layout(int64_t position, const std::string& where);
  std::vector<int64_t> targets(int64_t start, int64_t count, const std::string& where) const;

  std::string source_;
  int64_t tables_ = 0;
  int64_t read_ = 0;
  std::map<int64_t, Text> strings_;
  std::map<int64_t, Layout> layouts_;
};

// A table of the file, with fields by their number in the schema.
class FlatTable {
 public:
  FlatTable(FlatReader& reader, int64_t position, std::string where);

  [[noreturn]] void fail(const std::string& what) const { reader_->fail(what, where, position_); }

  int64_t int64(int slot, const char* name, int64_t otherwise = 0) const;
  int32_t int32(int slot, const char* name) const;
  float float32(int slot, const char* name) const;
  bool flag(int slot, const char* name) const;
  Text string(int slot, const char* name) const;  // "" if it is absent
  bool has_table(int slot, const char* name) const { return target(slot, name) >= 0; }
  FlatTable table(int slot, const char* name) const;  // one that is there
  // A vector of tables: calls with each, in order, before it looks at the next.
  template <class Function>
  void each_table(int slot, const char* name, const Function& call) const;
  std::vector<Text> strings(int slot, const char* name) const;
  std::vector<int64_t> int64s(int slot, const char* name, int64_t at_most) const;
  // Where the bytes of a vector begin in the file, and their number.
  std::pair<int64_t, int64_t> span(int slot, const char* name) const { return vector(slot, 1, name); }

  std::string where;

 private:
  int64_t field(int slot, int64_t size, const char* name) const;  // -1 if it is absent
  int64_t target(int slot, const char* name) const;               // -1 if it is absent
  std::pair<int64_t, int64_t> vector(int slot, int64_t item_size, const char* name) const;
  std::vector<int64_t> items(int slot, const char* name) const;
  template <class T>
  T scalar(int slot, const char* name, T otherwise) const;

  FlatReader* reader_;
  int64_t position_;
  const FlatReader::Layout* layout_;
};

template <class Function>
void FlatTable::each_table(int slot, const char* name, const Function& call) const {
  const std::vector<int64_t> positions = items(slot, name);
  for (size_t index = 0; index < positions.size(); ++index) {
    FlatTable table(*reader_, positions[index], where + "." + name + "[" + std::to_string(index) + "]");
    call(table);
  }
}

}  // namespace onnxtrain::device
