#include "json.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr size_t kMostDigits = 300;  // a float has at most 309
constexpr int kMostLevels = 100;     // of lists and objects; ours have ten

void append_utf8(std::string& text, uint32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr uint8_t kLead[] = {0, 0xC0, 0xE0, 0xF0};
  text += static_cast<char>(kLead[more] | (code >> (6 * more)));
  for (int shift = 6 * (more - 1); shift >= 0; shift -= 6) text += static_cast<char>(0x80 | ((code >> shift) & 0x3F));
}

// What is too large or too small for a float is infinite or 0.
double rounded_number(std::string_view text) {
  double number = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  if (read.ec == std::errc()) return number;
  const bool is_negative = text[0] == '-';
  const size_t mark = std::min(text.find_first_of("eE"), text.size());
  const std::string_view digits = text.substr(is_negative, mark - is_negative);
  const size_t point = std::min(digits.find('.'), digits.size());
  const size_t first = std::min(digits.find_first_not_of("0."), digits.size());
  const bool is_small_power = mark < text.size() && text.substr(mark).find('-') != text.npos;
  const bool is_large = mark < text.size() ? !is_small_power : first < point;
  const double size = is_large ? std::numeric_limits<double>::infinity() : 0.0;
  return is_negative ? -size : size;
}

class Parser {
 public:
  Parser(std::string_view text, Numbers numbers) : text_(text), numbers_(numbers) {}

  bool whole(Json& result) {
    skip_space();
    if (!value(result, 0)) return false;
    skip_space();
    return at_ == text_.size();
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
      ++at_;
  }

  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  bool value(Json& result, int level) {
    if (level > kMostLevels || at_ >= text_.size()) return false;
    const char first = text_[at_];
    if (first == '{') return object(result, level);
    if (first == '[') return list(result, level);
    if (first == '"') {
      if (!string(result.text)) return false;
      result.kind = Json::kText;
      if (numbers_ == Numbers::kFromWords) take_word(result);
      return true;
    }
    if (take("null")) return true;
    if (take("true") || take("false")) {
      result.kind = Json::kBool;
      result.truth = first == 't';
      return true;
    }
    for (const char* word : {"NaN", "Infinity", "-Infinity"}) {
      if (!take(word)) continue;
      result.text = word;
      return take_word(result);
    }
    return number(result);
  }

  // Makes a number of one of three words.
  static bool take_word(Json& result) {
    if (result.text == "NaN")
      result.number = std::numeric_limits<double>::quiet_NaN();
    else if (result.text == "Infinity")
      result.number = std::numeric_limits<double>::infinity();
    else if (result.text == "-Infinity")
      result.number = -std::numeric_limits<double>::infinity();
    else
      return false;
    result.kind = Json::kFloat;
    result.text.clear();
    return true;
  }

  size_t digits() {
    const size_t start = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ - start;
  }

  bool number(Json& result) {
    const size_t start = at_;
    take("-");
    const bool begins_with_zero = at_ < text_.size() && text_[at_] == '0';
    const size_t count = begins_with_zero ? 1 : digits();
    if (begins_with_zero) ++at_;
    if (count == 0) return false;
    const size_t whole_end = at_;
    if (take(".") && digits() == 0) at_ = whole_end;
    const size_t fraction_end = at_;
    if (take("e") || take("E")) {
      if (!take("+")) take("-");
      if (digits() == 0) at_ = fraction_end;
    }
    const std::string_view found = text_.substr(start, at_ - start);
    if (at_ > whole_end) {
      result.kind = Json::kFloat;
      result.number = rounded_number(found);
      return true;
    }
    if (found.size() > kMostDigits) return false;
    result.kind = Json::kInteger;
    result.text = found == "-0" ? "0" : std::string(found);
    return true;
  }

  bool hexadecimal(uint32_t& code) {
    const std::string_view four = text_.substr(at_, 4);
    if (four.size() < 4 || four.find_first_not_of("0123456789abcdefABCDEF") != four.npos) return false;
    code = static_cast<uint32_t>(std::stoul(std::string(four), nullptr, 16));
    at_ += 4;
    return true;
  }

  bool escape(std::string& result) {
    if (at_ >= text_.size()) return false;
    const char letter = text_[at_++];
    constexpr std::string_view kLetters = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    const size_t known = kLetters.find(letter);
    if (known != kLetters.npos) {
      result += kMeanings[known];
      return true;
    }
    uint32_t code = 0;
    if (letter != 'u' || !hexadecimal(code)) return false;
    const size_t after = at_;
    uint32_t low = 0;
    if (code >= 0xD800 && code < 0xDC00 && take("\\u") && hexadecimal(low) && low >= 0xDC00 && low < 0xE000) {
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else {
      at_ = after;
    }
    append_utf8(result, code);
    return true;
  }

  bool string(std::string& result) {
    ++at_;
    while (at_ < text_.size()) {
      const char next = text_[at_++];
      if (next == '"') return true;
      if (static_cast<uint8_t>(next) < 0x20) return false;
      if (next != '\\') {
        result += next;
      } else if (!escape(result)) {
        return false;
      }
    }
    return false;
  }

  bool list(Json& result, int level) {
    result.kind = Json::kList;
    ++at_;
    skip_space();
    if (take("]")) return true;
    while (true) {
      result.list.emplace_back();
      if (!value(result.list.back(), level + 1)) return false;
      skip_space();
      if (take("]")) return true;
      if (!take(",")) return false;
      skip_space();
    }
  }

  bool object(Json& result, int level) {
    result.kind = Json::kObject;
    std::unordered_set<std::string> keys;
    ++at_;
    skip_space();
    if (take("}")) return true;
    while (true) {
      std::string key;
      if (at_ >= text_.size() || text_[at_] != '"' || !string(key) || !keys.insert(key).second) return false;
      skip_space();
      if (!take(":")) return false;
      skip_space();
      result.object.emplace_back(std::move(key), Json());
      if (!value(result.object.back().second, level + 1)) return false;
      skip_space();
      if (take("}")) return true;
      if (!take(",")) return false;
      skip_space();
    }
  }

  std::string_view text_;
  Numbers numbers_;
  size_t at_ = 0;
};

void append_unit(std::string& text, uint32_t unit) {
  text += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) text += "0123456789abcdef"[(unit >> shift) & 15];
}

// The code point at a position of UTF-8 (where half a pair of surrogates may be, from an escape).
uint32_t code_point_at(std::string_view text, size_t& at) {
  const auto lead = static_cast<uint8_t>(text[at++]);
  const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
  uint32_t code = lead & (0x3Fu >> more);
  for (int i = 0; i < more && at < text.size(); ++i) code = (code << 6) | (static_cast<uint8_t>(text[at++]) & 0x3Fu);
  return code;
}

std::string text_to_json(std::string_view text) {
  std::string made = "\"";
  constexpr std::string_view kLetters = "\"\\bfnrt", kMeanings = "\"\\\b\f\n\r\t";
  for (size_t at = 0; at < text.size();) {
    const auto byte = static_cast<uint8_t>(text[at]);
    const size_t known = kMeanings.find(text[at]);
    if (known != kMeanings.npos) {
      made += '\\';
      made += kLetters[known];
      ++at;
    } else if (byte >= 0x20 && byte < 0x7F) {
      made += text[at++];
    } else if (byte < 0x80) {
      append_unit(made, byte);
      ++at;
    } else {
      const uint32_t code = code_point_at(text, at);
      if (code >= 0x10000) {
        append_unit(made, 0xD800 + ((code - 0x10000) >> 10));
        append_unit(made, 0xDC00 + ((code - 0x10000) & 0x3FF));
      } else {
        append_unit(made, code);
      }
    }
  }
  return made + '"';
}

// A list or an object.
std::string in_brackets(const Json& value, std::string (*write)(const Json&), std::string (*quote)(std::string_view)) {
  std::vector<std::string> parts;
  for (const Json& item : value.list) parts.push_back(write(item));
  for (const auto& [key, item] : value.object) parts.push_back(quote(key) + ": " + write(item));
  const bool is_list = value.kind == Json::kList;
  return (is_list ? "[" : "{") + joined(parts, ", ") + (is_list ? "]" : "}");
}

std::string in_python(const Json& value) {
  if (value.kind == Json::kNull) return "None";
  if (value.kind == Json::kBool) return value.truth ? "True" : "False";
  if (value.kind == Json::kFloat) return shortest_digits(value.number);
  if (value.kind == Json::kText) return quoted(value.text);
  if (value.kind == Json::kInteger) return value.text;
  return in_brackets(value, in_python, quoted);
}

}  // namespace

Json Json::of_kind(Kind kind) {
  Json made;
  made.kind = kind;
  return made;
}

Json Json::of_integer(int64_t number) {
  Json made = of_kind(kInteger);
  made.text = std::to_string(number);
  return made;
}

Json Json::of_unsigned(uint64_t number) {
  Json made = of_kind(kInteger);
  made.text = std::to_string(number);
  return made;
}

Json Json::of_float(double number) {
  Json made = of_kind(kFloat);
  made.number = number;
  return made;
}

Json Json::of_text(std::string text) {
  Json made = of_kind(kText);
  made.text = std::move(text);
  return made;
}

const Json* Json::find(std::string_view key) const {
  for (const auto& [name, value] : object) {
    if (name == key) return &value;
  }
  return nullptr;
}

void Json::set(const std::string& key, Json value) {
  for (auto& [name, held] : object) {
    if (name != key) continue;
    held = std::move(value);
    return;
  }
  object.emplace_back(key, std::move(value));
}

double Json::as_double() const { return kind == kFloat ? number : rounded_number(text); }

bool Json::as_int64(int64_t& result) const {
  const char* end = text.data() + text.size();
  if (kind != kInteger) return false;
  const auto read = std::from_chars(text.data(), end, result);
  return read.ec == std::errc() && read.ptr == end;
}

bool Json::as_uint64(uint64_t& result) const {
  const char* end = text.data() + text.size();
  if (kind != kInteger || text[0] == '-') return false;
  const auto read = std::from_chars(text.data(), end, result);
  return read.ec == std::errc() && read.ptr == end;
}

bool Json::as_texts(std::vector<std::string>& result) const {
  if (kind != kList) return false;
  result.clear();
  for (const Json& item : list) {
    if (item.kind != kText) return false;
    result.push_back(item.text);
  }
  return true;
}

bool parse_json(std::string_view text, Numbers numbers, Json& result) {
  result = Json();
  return utf8_error(text) == text.npos && Parser(text, numbers).whole(result);
}

std::string to_json(const Json& value) {
  switch (value.kind) {
    case Json::kNull:
      return "null";
    case Json::kBool:
      return value.truth ? "true" : "false";
    case Json::kInteger:
      return value.text;
    case Json::kFloat:
      if (std::isnan(value.number)) return "\"NaN\"";
      if (std::isinf(value.number)) return value.number > 0 ? "\"Infinity\"" : "\"-Infinity\"";
      return shortest_digits(value.number);
    case Json::kText:
      return text_to_json(value.text);
    case Json::kList:
      break;
    case Json::kObject:
      break;
  }
  return in_brackets(value, to_json, text_to_json);
}

std::string shown(const Json& value, size_t most) {
  const std::string text = in_python(value);
  return character_count(text) <= most ? text : std::string(first_characters(text, most)) + "...";
}

}  // namespace onnxtrain::device
