#include "plain_tensors.h"

#include <algorithm>
#include <cstring>

#include "text.h"

namespace onnxtrain::device {

namespace {

std::string names_text(const std::vector<ValueType>& declared) {
  std::vector<std::string> names;
  for (const ValueType& value : declared) names.push_back(quoted(value.name));
  return joined(names, ", ");
}

// The place of a tensor among those that are declared: that of its name, or its own.
size_t place_of(const std::vector<ValueType>& declared, const char* name, size_t index, const char* what) {
  if (name == nullptr) return index;
  const auto has_name = [&](const ValueType& value) { return value.name == name; };
  const auto found = std::find_if(declared.begin(), declared.end(), has_name);
  if (found != declared.end()) return static_cast<size_t>(found - declared.begin());
  throw ArgumentError("there is no " + std::string(what) + " " + quoted(name) + ": there are " + names_text(declared));
}

Held<OrtValue> borrowed(OrtValue* value) {
  return Held<OrtValue>(value, [](OrtValue*) {});
}

}  // namespace

Held<OrtValue> value_of(const RuntimePointer& runtime, const onnxtrain_tensor& tensor, const std::string& what) {
  if (tensor.value != nullptr) return borrowed(tensor.value);
  if (tensor.rank > ONNXTRAIN_MAX_RANK) {
    throw ArgumentError(what + " has " + std::to_string(tensor.rank) + " dimensions, and " +
                        std::to_string(ONNXTRAIN_MAX_RANK) + " are the most: pass an OrtValue");
  }
  const Dims dims(tensor.dims, tensor.dims + tensor.rank);
  if (element_type(tensor.type) == nullptr || tensor.type == kStringCode) {
    throw ArgumentError(what + " is of the element type " + std::to_string(tensor.type) +
                        ", which is not one of ONNX's numbers");
  }
  uint64_t elements = 1;
  for (const int64_t dim : dims) {
    if (dim < 0 || (dim > 0 && elements > (uint64_t{1} << 58) / static_cast<uint64_t>(dim))) {
      throw ArgumentError(what + " has the impossible shape " + list_text(dims));
    }
    elements *= static_cast<uint64_t>(dim);
  }
  const uint64_t needed = data_size(tensor.type, dims);
  if (tensor.size != needed || (needed > 0 && tensor.data == nullptr)) {
    throw ArgumentError(what + ", " + type_text(tensor.type) + " " + list_text(dims) + ", needs " +
                        std::to_string(needed) + " bytes, and " +
                        std::to_string(tensor.data == nullptr ? 0 : tensor.size) + " are given");
  }
  return value_over(runtime, tensor.data, tensor.size, tensor.type, dims);
}

void copy_to(const RuntimePointer& runtime, onnxtrain_tensor& tensor, const Held<OrtValue>& value,
             const std::string& what) {
  const ValueShape found = shape_of(runtime, value.get());
  if (element_type(found.code) == nullptr || found.code == kStringCode || found.dims.size() > ONNXTRAIN_MAX_RANK) {
    throw ArgumentError(what + " is no tensor of numbers with at most " + std::to_string(ONNXTRAIN_MAX_RANK) +
                        " dimensions: read it with ONNX Runtime's training interface");
  }
  const auto size = static_cast<size_t>(data_size(found.code, found.dims));
  tensor.type = found.code;
  tensor.rank = static_cast<uint32_t>(found.dims.size());
  std::copy(found.dims.begin(), found.dims.end(), tensor.dims);
  if (tensor.value == value.get()) return;
  void* target = tensor.data;
  Held<OrtValue> made;
  if (target == nullptr) {
    made = new_value(runtime, found.code, found.dims);
    target = data_of(runtime, made.get());
  } else if (tensor.size < size) {
    throw ArgumentError(what + " has " + std::to_string(size) + " bytes, and there is room for " +
                        std::to_string(tensor.size));
  }
  if (size > 0) std::memcpy(target, data_of(runtime, value.get()), size);
  tensor.size = size;
  if (made != nullptr) tensor.value = released(made);
}

FedInputs::FedInputs(const RuntimePointer& runtime, const std::vector<ValueType>& declared,
                     const onnxtrain_tensor* given, size_t count) {
  values_.assign(count, nullptr);
  for (size_t i = 0; i < count; ++i) {
    const size_t place = place_of(declared, given[i].name, i, "input");
    const std::string what =
        place < declared.size() ? "the input " + quoted(declared[place].name) : "the input " + std::to_string(i);
    held_.push_back(value_of(runtime, given[i], what));
    if (place >= count) continue;  // too few, which the session reports
    if (values_[place] != nullptr) throw ArgumentError(what + " is given twice");
    values_[place] = held_.back().get();
  }
}

AskedOutputs::AskedOutputs(const std::vector<ValueType>& declared, onnxtrain_tensor* asked, size_t count)
    : declared_(declared), asked_(asked), given_(declared.size()) {
  std::vector<bool> is_asked(declared.size());
  for (size_t i = 0; i < count; ++i) {
    const size_t place = place_of(declared, asked[i].name, i, "output");
    if (place >= declared.size()) {
      throw ArgumentError(std::to_string(count) + " outputs are asked for, and there are " +
                          std::to_string(declared.size()));
    }
    if (is_asked[place]) throw ArgumentError("the output " + quoted(declared[place].name) + " is asked for twice");
    is_asked[place] = true;
    places_.push_back(place);
    if (asked[i].value != nullptr) given_[place] = borrowed(asked[i].value);
  }
}

void AskedOutputs::fill(const RuntimePointer& runtime, const Outputs& made) const {
  for (size_t i = 0; i < places_.size(); ++i) {
    copy_to(runtime, asked_[i], made[places_[i]], "the output " + quoted(declared_[places_[i]].name));
  }
}

}  // namespace onnxtrain::device
