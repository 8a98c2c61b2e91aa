#include "wire.h"

#include <algorithm>

#include "errors.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

std::string too_long(uint64_t length, uint64_t left) {
  return "a field of " + std::to_string(length) + " bytes, but " + std::to_string(left) +
         " are left: the file is truncated or damaged";
}

const char* kind_name(int kind) {
  return kind == kVarint ? "a number" : kind == kFixed64 ? "8 bytes" : kind == kBytes ? "a length" : "4 bytes";
}

std::string wrong_kind(const WireField& field, int wanted) {
  return "field " + std::to_string(field.number) + " should have " + kind_name(wanted) + " and has " +
         kind_name(field.kind);
}

uint64_t little_endian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

}  // namespace

void WireReader::fail(const std::string& what, const std::string& where, int64_t position) const {
  const std::string at = position < 0 ? "" : " at byte " + std::to_string(position) + " of it";
  throw ModelError(source_ + ": " + where + at + ": " + what);
}

uint64_t WireReader::varint(std::string_view data, size_t& position, const std::string& where) const {
  uint64_t result = 0;
  for (size_t index = 0; index < 10; ++index) {
    if (position + index >= data.size()) {
      fail("a number is cut off: the file is truncated or damaged", where, static_cast<int64_t>(position));
    }
    const auto byte = static_cast<uint8_t>(data[position + index]);
    result |= static_cast<uint64_t>(byte & 0x7F) << (7 * index);
    if (byte < 0x80) {
      position += index + 1;
      return result;
    }
  }
  fail("a number has more than ten bytes", where, static_cast<int64_t>(position));
}

WireField WireReader::next(std::string_view message, size_t& position, const std::string& where) {
  if (--left_ < 0) fail("there are more fields than any real model has", where);
  const size_t start = position;
  const auto place = static_cast<int64_t>(start);
  const uint64_t tag = varint(message, position, where), number = tag >> 3;
  const auto kind = static_cast<int>(tag & 7);
  if (number == 0 || number > 0x1FFFFFFF) fail("a field has an impossible number", where, place);
  WireField field{static_cast<int>(number), kind, 0, {}, start, 0};
  if (kind == kVarint) {
    field.value = varint(message, position, where);
  } else if (kind == kBytes || kind == kFixed32 || kind == kFixed64) {
    const uint64_t length = kind == kBytes ? varint(message, position, where) : kind == kFixed32 ? 4 : 8;
    const size_t left = message.size() - position;
    if (length > left) fail(too_long(length, left), where, place);
    const std::string_view data = message.substr(position, static_cast<size_t>(length));
    if (kind == kBytes)
      field.data = data;
    else
      field.value = little_endian(data);
    position += static_cast<size_t>(length);
  } else {
    fail("a field is of the kind " + std::to_string(kind) + ", which ONNX does not have", where, place);
  }
  field.end = position;
  return field;
}

WireFields WireReader::pick(std::string_view message, const std::string& where, std::initializer_list<int> numbers) {
  WireFields found;
  each(message, where, [&](const WireField& field) {
    if (std::find(numbers.begin(), numbers.end(), field.number) == numbers.end()) return;
    if (found.size() == kMaxParsed) fail("there are more fields than any real model has", where);
    found.push_back(field);
  });
  return found;
}

std::string_view WireReader::message(const WireField& field, const std::string& where) const {
  if (field.kind != kBytes) fail(wrong_kind(field, kBytes), where, static_cast<int64_t>(field.start));
  return field.data;
}

std::string WireReader::text(const WireField& field, const std::string& where) const {
  const std::string_view data = message(field, where);
  const size_t wrong = utf8_error(data);
  if (wrong != data.npos) fail("a text is not valid UTF-8", where, static_cast<int64_t>(field.start + wrong));
  return std::string(data);
}

int64_t WireReader::int64(const WireField& field, const std::string& where) const {
  if (field.kind != kVarint) fail(wrong_kind(field, kVarint), where, static_cast<int64_t>(field.start));
  return static_cast<int64_t>(field.value);
}

std::string WireReader::last_text(const WireFields& fields, int number, const std::string& where) const {
  std::string found;
  for (const WireField& field : fields) {
    if (field.number == number) found = text(field, where);
  }
  return found;
}

int64_t WireReader::last_int64(const WireFields& fields, int number, const std::string& where) const {
  int64_t found = 0;
  for (const WireField& field : fields) {
    if (field.number == number) found = int64(field, where);
  }
  return found;
}

std::vector<int64_t> WireReader::int64s(const WireFields& fields, int number, const std::string& where) const {
  std::vector<int64_t> result;
  for (const WireField& field : fields) {
    if (field.number != number) continue;
    if (field.kind == kVarint) {
      result.push_back(static_cast<int64_t>(field.value));
    } else {
      const std::string_view data = message(field, where);
      for (size_t position = 0; position < data.size() && result.size() <= kMaxModelRank;) {
        result.push_back(static_cast<int64_t>(varint(data, position, where)));
      }
    }
    if (result.size() > kMaxModelRank) {
      fail("there are more than " + std::to_string(kMaxModelRank) + " numbers", where);
    }
  }
  return result;
}

bool WireReader::only(std::string_view given, int number, const std::string& where, std::string_view& found) {
  const WireFields fields = pick(given, where, {number});
  if (fields.size() > 1) {
    fail("field " + std::to_string(number) + " is there twice", where, static_cast<int64_t>(fields[1].start));
  }
  if (!fields.empty()) found = message(fields[0], where);
  return !fields.empty();
}

std::string varint_bytes(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7F) | 0x80);
  return bytes + static_cast<char>(value);
}

std::string number_field(int number, int64_t value) {
  return varint_bytes(static_cast<uint64_t>(number) << 3 | kVarint) + varint_bytes(static_cast<uint64_t>(value));
}

std::string bytes_header(int number, uint64_t size) {
  return varint_bytes(static_cast<uint64_t>(number) << 3 | kBytes) + varint_bytes(size);
}

std::string bytes_field(int number, std::string_view data) {
  return bytes_header(number, data.size()) + std::string(data);
}

}  // namespace onnxtrain::device
