#include "text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <random>

namespace onnxtrain::device {

namespace {

struct Sequence {
  size_t length;  // of the bytes; 0 if they are not UTF-8
  uint32_t code_point;
};

Sequence sequence_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t offset) {
    return at + offset < text.size() ? static_cast<uint8_t>(text[at + offset]) : uint8_t{0};
  };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {1, lead};
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {0, 0};
  uint32_t code_point = lead & (0xFFu >> (length + 1));
  for (size_t offset = 1; offset < length; ++offset) {
    if ((byte(offset) & 0xC0) != 0x80) return {0, 0};
    code_point = (code_point << 6) | (byte(offset) & 0x3Fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code_point >= 0xD800 && code_point <= 0xDFFF;
  if (code_point < kLeast[length] || code_point > 0x10FFFF || is_surrogate) return {0, 0};
  return {length, code_point};
}

void append_hexadecimal(std::string& text, uint32_t number, int digits) {
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) text += "0123456789abcdef"[(number >> shift) & 15];
}

// Appends an ASCII character as it is shown between `quote`s.
void append_shown(std::string& text, char character, char quote) {
  const auto code = static_cast<uint8_t>(character);
  if (character == quote || character == '\\') {
    text += '\\';
    text += character;
  } else if (character == '\n' || character == '\r' || character == '\t') {
    text += character == '\n' ? "\\n" : character == '\r' ? "\\r" : "\\t";
  } else if (code < 0x20 || code >= 0x7F) {
    text += "\\x";
    append_hexadecimal(text, code, 2);
  } else {
    text += character;
  }
}

char quote_for(std::string_view text) {
  const bool has_single = text.find('\'') != text.npos;
  return has_single && text.find('"') == text.npos ? '"' : '\'';
}

// Whether a character beyond ASCII has no form of its own: controls, spaces, signs for direction.
bool is_invisible(uint32_t code) {
  return code <= 0xA0 || code == 0xAD || (code >= 0x2000 && code <= 0x200F) || (code >= 0x2028 && code <= 0x202F) ||
         (code >= 0x205F && code <= 0x206F) || code == 0x3000 || code == 0xFEFF || (code >= 0xE000 && code <= 0xF8FF) ||
         (code >= 0xFFF0 && code <= 0xFFFB) || (code & 0xFFFE) == 0xFFFE || code >= 0xE0000;
}

void append_code_point(std::string& text, uint32_t code) {
  const int digits = code < 0x100 ? 2 : code < 0x10000 ? 4 : 8;
  text += digits == 2 ? "\\x" : digits == 4 ? "\\u" : "\\U";
  append_hexadecimal(text, code, digits);
}

}  // namespace

size_t utf8_error(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = sequence_at(text, at).length;
    if (length == 0) return at;
    at += length;
  }
  return text.npos;
}

std::string_view first_characters(std::string_view text, size_t count) {
  size_t at = 0;
  for (; at < text.size() && count > 0; --count) at += std::max<size_t>(1, sequence_at(text, at).length);
  return text.substr(0, at);
}

size_t character_count(std::string_view text) {
  size_t count = 0;
  for (const char byte : text) count += (static_cast<uint8_t>(byte) & 0xC0) != 0x80;
  return count;
}

std::string quoted(std::string_view text) {
  const char quote = quote_for(text);
  std::string shown(1, quote);
  for (size_t at = 0; at < text.size();) {
    const Sequence found = sequence_at(text, at);
    if (found.length <= 1) {
      append_shown(shown, text[at], quote);
    } else if (is_invisible(found.code_point)) {
      append_code_point(shown, found.code_point);
    } else {
      shown += text.substr(at, found.length);
    }
    at += std::max<size_t>(1, found.length);
  }
  return shown + quote;
}

std::string quoted_bytes(std::string_view bytes) {
  const char quote = quote_for(bytes);
  std::string shown = std::string("b") + quote;
  for (const char byte : bytes) append_shown(shown, byte, quote);
  return shown + quote;
}

std::string list_text(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

std::string tuple_text(const std::vector<int64_t>& dims) {
  const std::string list = list_text(dims);
  return "(" + list.substr(1, list.size() - 2) + (dims.size() == 1 ? ",)" : ")");
}

std::string with_commas(uint64_t number) {
  std::string digits = std::to_string(number);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string shortest_digits(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, number, std::chars_format::scientific).ptr;
  std::string text(buffer, end);
  std::string sign;
  if (text[0] == '-') {
    sign = "-";
    text.erase(0, 1);
  }
  const size_t mark = text.find('e');
  const int exponent = std::stoi(text.substr(mark + 1));
  std::string digits = text.substr(0, mark);
  if (digits.size() > 1) digits.erase(1, 1);  // the point
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    if (count > 1) digits.insert(1, ".");
    std::string power = std::to_string(std::abs(exponent));
    if (power.size() < 2) power.insert(0, "0");
    return sign + digits + (exponent < 0 ? "e-" : "e+") + power;
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (count <= exponent + 1) return sign + digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  return sign + digits.insert(static_cast<size_t>(exponent + 1), ".");
}

std::string joined(const std::vector<std::string>& parts, std::string_view between) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += between;
    text += parts[i];
  }
  return text;
}

bool starts_with(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool is_hexadecimal(std::string_view text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == text.npos;
}

std::string random_digits(size_t bytes) {
  std::random_device source;
  std::string digits;
  for (size_t i = 0; i < bytes; ++i) append_hexadecimal(digits, source() & 0xFFu, 2);
  return digits;
}

}  // namespace onnxtrain::device
