#include "element_types.h"

#include <cctype>

namespace onnxtrain::device {

namespace {

constexpr ElementType kTypes[] = {
    {nullptr, 0, false},          {"FLOAT", 32, true},        {"UINT8", 8, true},           {"INT8", 8, true},
    {"UINT16", 16, true},         {"INT16", 16, true},        {"INT32", 32, true},          {"INT64", 64, true},
    {"STRING", 0, true},          {"BOOL", 8, true},          {"FLOAT16", 16, true},        {"DOUBLE", 64, true},
    {"UINT32", 32, true},         {"UINT64", 64, true},       {"COMPLEX64", 64, true},      {"COMPLEX128", 128, true},
    {"BFLOAT16", 16, false},      {"FLOAT8E4M3FN", 8, false}, {"FLOAT8E4M3FNUZ", 8, false}, {"FLOAT8E5M2", 8, false},
    {"FLOAT8E5M2FNUZ", 8, false}, {"UINT4", 4, false},        {"INT4", 4, false},           {"FLOAT4E2M1", 4, false},
    {"FLOAT8E8M0", 8, false},     {"UINT2", 2, false},        {"INT2", 2, false},
};

}  // namespace

const ElementType* element_type(int code) {
  constexpr int kCount = sizeof kTypes / sizeof *kTypes;
  return code > 0 && code < kCount ? &kTypes[code] : nullptr;
}

std::string type_text(int code) {
  const ElementType* type = element_type(code);
  if (type == nullptr) return "type " + std::to_string(code);
  std::string name = type->name;
  for (char& letter : name) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return name;
}

uint64_t elements_of(const Dims& dims) {
  uint64_t count = 1;
  for (const int64_t dim : dims) count *= static_cast<uint64_t>(dim);
  return count;
}

uint64_t data_size(int code, const Dims& dims) {
  const auto bits = static_cast<uint64_t>(element_type(code)->bits);
  const uint64_t count = elements_of(dims);
  return bits >= 8 ? count * (bits / 8) : (count * bits + 7) / 8;
}

}  // namespace onnxtrain::device
