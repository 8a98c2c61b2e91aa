// The JSON of checkpoints and graphs (docs/format.md): integers of any size and floats are different
// types, and a float that is not finite is the string "NaN", "Infinity" or "-Infinity".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace onnxtrain::device {

struct Json {
  enum Kind { kNull, kBool, kInteger, kFloat, kText, kList, kObject } kind = kNull;
  bool truth = false;
  double number = 0;  // of a float
  std::string text;   // of a string; the digits of an integer
  std::vector<Json> list;
  std::vector<std::pair<std::string, Json>> object;  // in the order of the file

  static Json of_integer(int64_t number);
  static Json of_unsigned(uint64_t number);
  static Json of_float(double number);
  static Json of_text(std::string text);
  static Json of_object() { return of_kind(kObject); }
  static Json of_kind(Kind kind);

  const Json* find(std::string_view key) const;  // null if it is no object, or has no such entry
  void set(const std::string& key, Json value);
  bool is_number() const { return kind == kInteger || kind == kFloat; }
  double as_double() const;                               // of a number
  bool as_int64(int64_t& result) const;                   // whether it is an integer that fits
  bool as_uint64(uint64_t& result) const;                 // the same
  bool as_texts(std::vector<std::string>& result) const;  // whether it is a list of strings
};

enum class Numbers { kFromWords, kPlain };  // whether the strings "NaN" and so on are numbers

// Reads JSON of anyone; false if it is none, has a key twice, or is made to do harm.
bool parse_json(std::string_view text, Numbers numbers, Json& result);

// Writes it as Python does: numbers survive exactly.
std::string to_json(const Json& value);

// A value as messages show it, which is how Python does; of a long one the first characters.
std::string shown(const Json& value, size_t most);

}  // namespace onnxtrain::device
