#include "flat_reader.h"

#include <algorithm>

#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr int kMostFields = 8;  // more than any table of the schema has

}  // namespace

void FlatReader::fail(const std::string& what, const std::string& where, int64_t position) const {
  const std::string at = position < 0 ? "" : " at byte " + std::to_string(position);
  throw CheckpointError(source_ + ": " + where + at + ": " + what);
}

FlatTable FlatReader::root(std::string_view identifier, const std::string& what) {
  if (size() < 8) fail("the file ends after " + std::to_string(size()) + " bytes, before its header does", what);
  const std::string_view found = data.view().substr(4, 4);
  if (found != identifier) {
    const std::string instead = quoted_bytes(found) + " instead of " + quoted_bytes(identifier);
    fail("the file identifier is " + instead + ": it is not a " + what, what, 4);
  }
  return FlatTable(*this, follow(0, what), what);
}

void FlatReader::need(int64_t position, int64_t size, const std::string& where) const {
  if (position >= 0 && position + size <= this->size()) return;
  const std::string what = std::to_string(size) + " bytes are needed, but the file has " + std::to_string(this->size());
  fail(what + ": it is truncated or damaged", where, position);
}

void FlatReader::claim(int64_t position, int64_t size, const std::string& where) {
  need(position, size, where);
  read_ += size;
  if (read_ > this->size()) fail("objects in the file overlap", where, position);
}

template <class T>
T FlatReader::number(int64_t position, const std::string& where) const {
  need(position, sizeof(T), where);
  return number_at<T>(data.data + position);
}

int64_t FlatReader::follow(int64_t position, const std::string& where) const {
  const auto offset = number<uint32_t>(position, where);
  if (offset == 0) fail("an offset is zero", where, position);
  need(position + offset, 4, where);
  return position + offset;
}

const Text& FlatReader::string(int64_t position, const std::string& where) {
  const auto found = strings_.find(position);
  if (found != strings_.end()) return found->second;
  if (static_cast<int64_t>(strings_.size()) >= kMaxStrings) {
    fail("the file has more than " + std::to_string(kMaxStrings) + " strings", where, position);
  }
  const auto length = static_cast<int64_t>(number<uint32_t>(position, where));
  claim(position, 4 + length + 1, where);  // the zero at the end is part of the format, not of the length
  const int64_t start = position + 4;
  if (data.data[start + length] != 0) fail("a string does not end with a zero byte", where, start + length);
  const std::string_view text = data.view().substr(static_cast<size_t>(start), static_cast<size_t>(length));
  const size_t wrong = utf8_error(text);
  if (wrong != text.npos) fail("a string is not valid UTF-8", where, start + static_cast<int64_t>(wrong));
  return strings_.emplace(position, std::make_shared<const std::string>(text)).first->second;
}

const FlatReader::Layout& FlatReader::layout(int64_t position, const std::string& where) {
  const auto found = layouts_.find(position);
  if (found != layouts_.end()) return found->second;
  if (position < 0 || position + 4 > size()) fail("the table points to a layout outside the file", where);
  const auto own_size = number<uint16_t>(position, where);
  Layout made;
  made.table_size = number<uint16_t>(position + 2, where);
  if (own_size < 4 || own_size % 2 != 0 || made.table_size < 4) {
    fail("the layout of the table is damaged", where, position);
  }
  need(position, own_size, where);
  const int fields = std::min(own_size / 2 - 2, kMostFields);
  for (int k = 0; k < fields; ++k) made.offsets.push_back(number<uint16_t>(position + 4 + 2 * k, where));
  return layouts_.emplace(position, std::move(made)).first->second;
}

std::vector<int64_t> FlatReader::targets(int64_t start, int64_t count, const std::string& where) const {
  std::vector<int64_t> positions(static_cast<size_t>(count));
  for (int64_t index = 0; index < count; ++index) {
    const int64_t at = start + 4 * index;
    const int64_t offset = number_at<uint32_t>(data.data + at);
    if (offset == 0 || at + offset + 4 > size()) follow(at, where + "[" + std::to_string(index) + "]");
    positions[static_cast<size_t>(index)] = at + offset;
  }
  return positions;
}

FlatTable::FlatTable(FlatReader& reader, int64_t position, std::string given)
    : where(std::move(given)), reader_(&reader), position_(position) {
  reader.tables_ += 1;
  if (reader.tables_ > kMaxTables) {
    reader.fail("the file has more than " + std::to_string(kMaxTables) + " tables", where);
  }
  layout_ = &reader.layout(position - reader.number<int32_t>(position, where), where);
  reader.claim(position, layout_->table_size, where);
}

int64_t FlatTable::int64(int slot, const char* name, int64_t otherwise) const {
  return scalar<int64_t>(slot, name, otherwise);
}
int32_t FlatTable::int32(int slot, const char* name) const { return scalar<int32_t>(slot, name, 0); }
float FlatTable::float32(int slot, const char* name) const { return scalar<float>(slot, name, 0); }

template <class T>
T FlatTable::scalar(int slot, const char* name, T otherwise) const {
  const int64_t at = field(slot, sizeof(T), name);
  return at < 0 ? otherwise : reader_->number<T>(at, where);
}

bool FlatTable::flag(int slot, const char* name) const {
  const auto value = scalar<uint8_t>(slot, name, 0);
  if (value > 1) fail("the flag " + quoted(name) + " is " + std::to_string(value) + " instead of 0 or 1");
  return value == 1;
}

Text FlatTable::string(int slot, const char* name) const {
  const int64_t at = target(slot, name);
  return at < 0 ? std::make_shared<const std::string>() : reader_->string(at, where);
}

FlatTable FlatTable::table(int slot, const char* name) const {
  return FlatTable(*reader_, target(slot, name), where + "." + name);
}

std::vector<Text> FlatTable::strings(int slot, const char* name) const {
  std::vector<Text> found;
  for (const int64_t position : items(slot, name)) found.push_back(reader_->string(position, where + "." + name));
  return found;
}

std::vector<int64_t> FlatTable::int64s(int slot, const char* name, int64_t at_most) const {
  const auto [start, count] = vector(slot, 8, name);
  if (count > at_most) {
    fail(std::string(name) + " has " + std::to_string(count) + " entries, where at most " + std::to_string(at_most) +
         " are allowed");
  }
  std::vector<int64_t> found;
  for (int64_t k = 0; k < count; ++k) found.push_back(number_at<int64_t>(reader_->data.data + start + 8 * k));
  return found;
}

int64_t FlatTable::field(int slot, int64_t size, const char* name) const {
  const auto& offsets = layout_->offsets;
  const int64_t offset = slot < static_cast<int>(offsets.size()) ? offsets[static_cast<size_t>(slot)] : 0;
  if (offset == 0) return -1;
  if (offset < 4 || offset + size > layout_->table_size) fail("the field " + quoted(name) + " lies outside its table");
  return position_ + offset;
}

int64_t FlatTable::target(int slot, const char* name) const {
  const int64_t at = field(slot, 4, name);
  return at < 0 ? -1 : reader_->follow(at, where);
}

std::pair<int64_t, int64_t> FlatTable::vector(int slot, int64_t item_size, const char* name) const {
  const int64_t at = target(slot, name);
  if (at < 0) return {0, 0};
  const int64_t count = reader_->number<uint32_t>(at, where);
  reader_->claim(at, 4 + count * item_size, where);
  return {at + 4, count};
}

std::vector<int64_t> FlatTable::items(int slot, const char* name) const {
  const auto [start, count] = vector(slot, 4, name);
  if (count > kMaxTables) {
    fail(std::string(name) + " has " + std::to_string(count) + " entries, where at most " + std::to_string(kMaxTables) +
         " are allowed");
  }
  return reader_->targets(start, count, where + "." + name);
}

}  // namespace onnxtrain::device
