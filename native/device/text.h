// Text as it is in files and in messages: UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace onnxtrain::device {

// Where the first sequence of bytes begins that is not UTF-8; `npos` if there is none.
size_t utf8_error(std::string_view text);

// The first characters of a text.
std::string_view first_characters(std::string_view text, size_t count);

// How many characters a text has.
size_t character_count(std::string_view text);

// A name as messages show it: in quotation marks, with signs for what cannot be printed.
std::string quoted(std::string_view text);

// Bytes as messages show them.
std::string quoted_bytes(std::string_view bytes);

// "(2, 3)"
std::string tuple_text(const std::vector<int64_t>& dims);

// "[2, 3]"
std::string list_text(const std::vector<int64_t>& dims);

// 12345678 as "12,345,678"
std::string with_commas(uint64_t number);

// The shortest digits that give the number again, as Python writes them: 0.1, 1e-05, 3.0.
std::string shortest_digits(double number);

std::string joined(const std::vector<std::string>& parts, std::string_view between);

bool starts_with(std::string_view text, std::string_view start);
bool ends_with(std::string_view text, std::string_view end);

// Whether a text consists of so many lowercase hexadecimal digits.
bool is_hexadecimal(std::string_view text, size_t digits);

// Bytes as lowercase hexadecimal digits that nobody else has.
std::string random_digits(size_t bytes);

}  // namespace onnxtrain::device
