// Tensors of the plain interface: memory of the program's, or values of onnxruntime.
#pragma once

#include <string>
#include <vector>

#include "border.h"
#include "plain_interface.h"

namespace onnxtrain::device {

// What a program gives as a tensor; its memory is not copied.
Held<OrtValue> value_of(const RuntimePointer& runtime, const onnxtrain_tensor& tensor, const std::string& what);

// Writes elements to where the program wants them, with type and shape; a new value if that is nowhere.
void copy_to(const RuntimePointer& runtime, onnxtrain_tensor& tensor, const Held<OrtValue>& value,
             const std::string& what);

// The inputs of a step, in the order of the graph.
class FedInputs {
 public:
  FedInputs(const RuntimePointer& runtime, const std::vector<ValueType>& declared, const onnxtrain_tensor* given,
            size_t count);
  const Inputs& values() const { return values_; }

 private:
  std::vector<Held<OrtValue>> held_;
  Inputs values_;
};

// The outputs that a program asks for.
class AskedOutputs {
 public:
  AskedOutputs(const std::vector<ValueType>& declared, onnxtrain_tensor* asked, size_t count);
  const Outputs& given() const { return given_; }
  void fill(const RuntimePointer& runtime, const Outputs& made) const;

 private:
  const std::vector<ValueType>& declared_;
  onnxtrain_tensor* asked_;
  std::vector<size_t> places_;  // in the graph, by the place in what is asked for
  Outputs given_;
};

}  // namespace onnxtrain::device
