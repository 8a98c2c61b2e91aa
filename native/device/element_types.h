// The element types of tensors, by ONNX's numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace onnxtrain::device {

using Dims = std::vector<int64_t>;

constexpr int kFloatCode = 1, kInt64Code = 7, kStringCode = 8, kBoolCode = 9, kFloat16Code = 10, kDoubleCode = 11,
              kUint32Code = 12;

struct ElementType {
  const char* name;  // in ONNX
  int bits;          // a string has none
  bool has_numpy;    // whether Python computes with it; others are bytes there, and here
};

// The type of a number; null if ONNX has none.
const ElementType* element_type(int code);

// "float", or "type 99" for a number that is unknown.
std::string type_text(int code);

uint64_t elements_of(const Dims& dims);

// The size of the elements in bytes; types narrower than a byte are packed.
uint64_t data_size(int code, const Dims& dims);

}  // namespace onnxtrain::device
