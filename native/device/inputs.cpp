#include "inputs.h"

#include <algorithm>
#include <map>

#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr int kInt32Code = 6;

std::string dims_text(const ValueType& value) {
  if (!value.has_shape) return "of any shape";
  std::vector<std::string> shown;
  for (const Dimension& dim : value.dims) {
    shown.push_back(dim.is_number() ? std::to_string(dim.size) : dim.symbol.empty() ? "?" : dim.symbol);
  }
  return "[" + joined(shown, ", ") + "]";
}

std::string expected_text(const std::vector<ValueType>& inputs) {
  std::vector<std::string> shown;
  for (const ValueType& value : inputs) {
    const std::string type = element_type(value.code) == nullptr ? "?" : type_text(value.code);
    shown.push_back(value.name + ": " + type + " " + dims_text(value));
  }
  return "The inputs are, in this order: " + joined(shown, "; ");
}

std::string given_text(const RuntimePointer& runtime, const std::vector<const OrtValue*>& given) {
  std::vector<std::string> shown;
  for (const OrtValue* value : given) {
    if (value == nullptr) {
      shown.push_back("NULL");
      continue;
    }
    const ValueShape found = shape_of(runtime, value);
    shown.push_back("OrtValue of tensor(" + type_text(found.code) + ") " + list_text(found.dims));
  }
  return shown.empty() ? "none" : joined(shown, "; ");
}

// Says what to do where a tensor has another number of samples than the graph is made for.
std::string fixed_batch(const ValueType& value, const Dims& shape) {
  if (value.dims.empty() || !value.dims[0].is_number() || shape.size() != value.dims.size()) return "";
  const int64_t batch = value.dims[0].size;
  if (shape[0] == batch) return "";
  std::string settings = "batch_size=" + std::to_string(batch);
  settings += shape[0] > batch ? ", accumulate=" + std::to_string(shape[0] / batch) : ", drop_last=True";
  return ": it takes batches of " + std::to_string(batch) + ", so pass " + settings +
         " to fit, or export the model with a symbolic batch";
}

struct Symbol {
  int64_t size;
  std::string input;
};

void check_shape(const ValueType& value, const Dims& shape, std::map<std::string, Symbol>& symbols) {
  if (!value.has_shape) return;
  bool fits = shape.size() == value.dims.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = !value.dims[i].is_number() || value.dims[i].size == shape[i];
  if (!fits) {
    throw ArgumentError("the input " + quoted(value.name) + " has the shape " + dims_text(value) + ", and the array " +
                        list_text(shape) + fixed_batch(value, shape));
  }
  for (size_t i = 0; i < shape.size(); ++i) {
    const std::string& name = value.dims[i].symbol;
    if (name.empty()) continue;
    const Symbol& known = symbols.emplace(name, Symbol{shape[i], value.name}).first->second;
    if (known.size == shape[i]) continue;
    throw ArgumentError("the dimension " + quoted(name) + " is " + std::to_string(known.size) + " in " +
                        quoted(known.input) + " and " + std::to_string(shape[i]) + " in " + quoted(value.name) +
                        ": it is the same in all inputs");
  }
}

// Integers of 32 bits where the graph has 64, as programs for ONNX Runtime feed labels.
Held<OrtValue> widened(const RuntimePointer& runtime, const OrtValue* value, const Dims& dims) {
  Held<OrtValue> made = new_value(runtime, kInt64Code, dims);
  const auto* from = reinterpret_cast<const int32_t*>(data_of(runtime, value));
  std::copy(from, from + elements_of(dims), reinterpret_cast<int64_t*>(data_of(runtime, made.get())));
  return made;
}

Held<OrtValue> borrowed(const OrtValue* value) {
  return Held<OrtValue>(const_cast<OrtValue*>(value), [](OrtValue*) {});
}

// The symbolic dimension that the inputs begin with, if it is one and has a name.
std::string batch_symbol(const std::vector<ValueType>& inputs) {
  std::string found;
  for (const ValueType& value : inputs) {
    if (value.dims.empty() || value.dims[0].symbol.empty()) continue;
    if (!found.empty() && found != value.dims[0].symbol) return "";
    found = value.dims[0].symbol;
  }
  return found;
}

}  // namespace

std::vector<Held<OrtValue>> prepared(const RuntimePointer& runtime, const std::vector<ValueType>& inputs,
                                     const std::vector<const OrtValue*>& given) {
  if (given.size() != inputs.size()) {
    throw ArgumentError(std::to_string(given.size()) + " inputs were given (" + given_text(runtime, given) +
                        "), and there are " + std::to_string(inputs.size()) + ". " + expected_text(inputs));
  }
  std::vector<Held<OrtValue>> made;
  std::map<std::string, Symbol> symbols;
  try {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (given[i] == nullptr) throw ArgumentError("the input " + quoted(inputs[i].name) + " is None");
      const ValueShape found = shape_of(runtime, given[i]);
      const bool can_widen = found.code == kInt32Code && inputs[i].code == kInt64Code;
      if (element_type(inputs[i].code) != nullptr && found.code != inputs[i].code && !can_widen) {
        throw ArgumentError("the input " + quoted(inputs[i].name) + " is tensor(" + type_text(inputs[i].code) +
                            "), but the OrtValue is tensor(" + type_text(found.code) + ")");
      }
      check_shape(inputs[i], found.dims, symbols);
      made.push_back(can_widen ? widened(runtime, given[i], found.dims) : borrowed(given[i]));
    }
    // The mean loss of no samples is not a number.
    const auto batch = symbols.find(batch_symbol(inputs));
    if (batch != symbols.end() && batch->second.size == 0) {
      throw ArgumentError("the input " + quoted(batch->second.input) + " has no samples");
    }
  } catch (const ArgumentError& error) {
    throw ArgumentError(std::string(error.what()) + ". " + expected_text(inputs) +
                        ". Given: " + given_text(runtime, given));
  }
  return made;
}

}  // namespace onnxtrain::device
