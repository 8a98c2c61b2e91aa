// A call of a kernel as a file: what it was given, and what it returned. The library writes them
// while the tests in Python run (recorder.cpp), and replay.cpp calls the kernels again.
#pragma once

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_interface.h"

namespace onnxtrain {

struct CaseAttribute {
  enum Type : int32_t { kInteger, kNumber, kIntegers, kText };
  std::string name;
  int32_t type = kInteger;
  std::vector<int64_t> integers;
  float number = 0;
  std::string text;
};

struct CaseTensor {
  int32_t type = 0;  // 0: it was left out
  std::vector<int64_t> shape;
  std::vector<char> bytes;
};

struct Case {
  std::string kind;
  std::vector<CaseAttribute> attributes;
  std::vector<CaseTensor> inputs, outputs;
  std::string error;  // empty if the kernel returned outputs
};

// Reads or writes a file from begin to end; both go through the same function.
class CaseStream {
 public:
  CaseStream(std::FILE* file, bool writes) : file_(file), writes_(writes) {}

  template <class T>
  void number(T& value) {
    bytes(&value, sizeof value);
  }
  template <class T>
  void list(std::vector<T>& values) {
    resize(values);
    bytes(values.data(), values.size() * sizeof(T));
  }
  void text(std::string& value) {
    resize(value);
    bytes(value.data(), value.size());
  }
  template <class T, class F>
  void each(std::vector<T>& values, F one) {
    resize(values);
    for (T& value : values) one(value);
  }

 private:
  template <class C>
  void resize(C& values) {
    uint64_t count = values.size();
    number(count);
    if (count > (uint64_t{1} << 28)) throw std::runtime_error("a case file is damaged");
    values.resize(count);
  }
  void bytes(void* data, size_t size) {
    if (size == 0) return;
    const size_t done = writes_ ? std::fwrite(data, 1, size, file_) : std::fread(data, 1, size, file_);
    if (done != size) throw std::runtime_error("a case file cannot be read or written");
  }
  std::FILE* file_;
  bool writes_;
};

inline void pass(CaseStream& file, CaseTensor& tensor) {
  file.number(tensor.type);
  file.list(tensor.shape);
  file.list(tensor.bytes);
}

inline void pass(CaseStream& file, Case& one) {
  file.text(one.kind);
  file.each(one.attributes, [&](CaseAttribute& of) {
    file.text(of.name);
    file.number(of.type);
    file.list(of.integers);
    file.number(of.number);
    file.text(of.text);
  });
  file.each(one.inputs, [&](CaseTensor& tensor) { pass(file, tensor); });
  file.each(one.outputs, [&](CaseTensor& tensor) { pass(file, tensor); });
  file.text(one.error);
}

}  // namespace onnxtrain
