// Protobuf's wire format, as far as ONNX files need it.
//
// A message is a sequence of fields, each a tag (number and kind) and a value. Fields are views of
// the message, so unread parts are neither parsed nor copied, and can be written again byte for
// byte. The bytes may be broken or hostile: each number and length is checked before it is used, and
// the number of fields is bounded. Every error names the file, the object and the byte.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace onnxtrain::device {

enum WireKind : int { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// A field of a message: its number, its value, and its place in the message.
struct WireField {
  int number;
  int kind;
  uint64_t value;         // of a number
  std::string_view data;  // of strings, bytes, messages and packed lists
  size_t start, end;
};

using WireFields = std::vector<WireField>;

constexpr size_t kMaxParsed = 300000;
constexpr size_t kMaxModelRank = 64;  // numpy and onnxruntime have lower limits

// Reads the messages of a file, which errors call `source`.
class WireReader {
 public:
  explicit WireReader(std::string source) : source_(std::move(source)) {}

  [[noreturn]] void fail(const std::string& what, const std::string& where, int64_t position = -1) const;

  // Calls with the fields of a message, in the order of the file.
  template <class Function>
  void each(std::string_view message, const std::string& where, const Function& call) {
    size_t position = 0;
    while (position < message.size()) call(next(message, position, where));
  }
  // The fields of a message that have these numbers, of which there may not be too many.
  WireFields pick(std::string_view message, const std::string& where, std::initializer_list<int> numbers);

  std::string_view message(const WireField& field, const std::string& where) const;
  std::string text(const WireField& field, const std::string& where) const;
  int64_t int64(const WireField& field, const std::string& where) const;
  // Of several fields of a number the last one counts; "" or 0 if there is none.
  std::string last_text(const WireFields& fields, int number, const std::string& where) const;
  int64_t last_int64(const WireFields& fields, int number, const std::string& where) const;
  // The numbers of a repeated field, packed or not.
  std::vector<int64_t> int64s(const WireFields& fields, int number, const std::string& where) const;
  // The message in a field; two are an error, since protobuf would merge them.
  bool only(std::string_view message, int number, const std::string& where, std::string_view& found);

 private:
  WireField next(std::string_view message, size_t& position, const std::string& where);
  uint64_t varint(std::string_view data, size_t& position, const std::string& where) const;

  std::string source_;
  int64_t left_ = 4000000;  // fields; far more than the largest models have
};

// ---- writing ----

std::string varint_bytes(uint64_t value);
std::string number_field(int number, int64_t value);
std::string bytes_header(int number, uint64_t size);
std::string bytes_field(int number, std::string_view data);

}  // namespace onnxtrain::device
