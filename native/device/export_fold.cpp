// What depends on parameters alone, computed once before a model is exported.
//
// Evaluation graphs of models that train for integers quantize their weights in each run; the exported
// model has the integers instead, and no floats. onnxruntime computes them, so that they are those of
// evaluation to the bit.
#include <algorithm>
#include <cstring>

#include "export_model.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

// onnxruntime holds what it computes from twice, so large models are not computed all at once.
constexpr uint64_t kPart = 1 << 26;

using NameList = std::vector<std::string>;

bool makes_any(const Node& node, const Names& names) {
  return std::any_of(node.outputs.begin(), node.outputs.end(),
                     [&](const std::string& name) { return names.count(name) > 0; });
}

// What the nodes make that make any of the listed values, in the order of the graph.
NameList listed_in(const ModelFile& model, const ModelParts& parts, const NameList& outputs) {
  const Names listed(model.metadata.folded.begin(), model.metadata.folded.end());
  NameList made;
  if (listed.empty()) return made;
  const Names known = parts.value_names();
  for (const std::string& name : listed) {
    if (known.count(name) > 0) continue;
    throw ModelError(model.name + " lists " + quoted(name) +
                     " among what to compute before export ('folded' in its metadata), and has no such value: prepare "
                     "the model anew");
  }
  for (const Node* node : find_needed(parts, outputs).nodes) {
    if (makes_any(*node, listed)) made.insert(made.end(), node->outputs.begin(), node->outputs.end());
  }
  return made;
}

// Refuses to compute what differs from input to input.
void require_parameters_alone(const ModelFile& model, const ModelParts& parts, const NameList& names,
                              const Values& values) {
  NameList free;
  for (const auto& item : parts.inputs) {
    if (!is_parameter(model, values, item.first)) free.push_back(item.first);
  }
  std::sort(free.begin(), free.end());
  const auto read_by = [&](const NameList& some) {
    const Needed needed = find_needed(parts, some);
    const auto found = std::find_if(free.begin(), free.end(), [&](const auto& name) { return needed.has(name); });
    return found == free.end() ? std::string() : *found;
  };
  if (read_by(names).empty()) return;
  for (const std::string& name : names) {
    const std::string read = read_by({name});
    if (read.empty()) continue;
    throw ModelError(
        model.name + " lists " + quoted(name) +
        " among what depends on parameters alone ('folded' in its metadata), and it depends on the input " +
        quoted(read) + ": prepare the model anew");
  }
}

Tensor copied(const RuntimePointer& runtime, const OrtValue* value) {
  const ValueShape shape = shape_of(runtime, value);
  const ElementType* type = element_type(shape.code);
  if (type == nullptr || type->bits == 0) throw Error("a value is of type " + type_text(shape.code));
  Tensor made{shape.code, shape.dims, allocate(data_size(shape.code, shape.dims)), {}};
  if (made.data.size == 0) return made;
  std::memcpy(made.data.data, data_of(runtime, value), static_cast<size_t>(made.data.size));
  // onnxruntime leaves what is behind the last narrow element as it was.
  const uint64_t used = elements_of(shape.dims) * static_cast<uint64_t>(type->bits) % 8;
  if (used > 0) made.data.data[made.data.size - 1] &= static_cast<uint8_t>((1u << used) - 1);
  return made;
}

void compute(const ModelLayout& layout, const NameList& names, const Inference& inference, Named<Tensor>& computed) {
  if (layout.tensor_size() > kMaxFileSize) {
    throw Error(quoted(names[0]) + " is computed from " + with_commas(layout.tensor_size()) +
                " bytes: layers of more than " + with_commas(kMaxFileSize) + " cannot be exported as integers");
  }
  const RuntimePointer& runtime = inference.runtime;
  std::vector<const char*> asked;
  for (const std::string& name : names) asked.push_back(name.c_str());
  try {
    const Held<OrtSession> session = inference.session(layout.file().joined());
    std::vector<OrtValue*> made(names.size());
    const auto run = ONNXTRAIN_CALL(runtime->api, Run);
    runtime->check(run(session.get(), nullptr, nullptr, nullptr, 0, asked.data(), asked.size(), made.data()));
    std::vector<Held<OrtValue>> held;
    for (OrtValue* value : made) held.push_back(hold(runtime, value));
    for (size_t i = 0; i < names.size(); ++i) computed[names[i]] = copied(runtime, made[i]);
  } catch (const Error& error) {
    throw Error(std::string("onnxruntime could not quantize the parameters: ") + error.what());
  }
}

}  // namespace

void fold(const ModelFile& model, ModelParts& parts, const NameList& outputs, const Values& values,
          const Inference& inference) {
  const NameList names = listed_in(model, parts, outputs);
  if (names.empty()) return;
  require_parameters_alone(model, parts, names, values);
  const auto layout = [&](const NameList& some) { return Cut(model, parts, some, values).untyped_layout(); };
  // All layouts are of the graph as it was: what is computed is put into it afterwards.
  Named<Tensor> computed;
  NameList part;
  uint64_t size = 0;
  const bool is_small = layout(names).tensor_size() <= kPart;
  for (const std::string& name : names) {
    const uint64_t own = is_small ? 0 : layout({name}).tensor_size();
    if (!part.empty() && size + own > kPart) {
      compute(layout(part), part, inference, computed);
      part.clear();
      size = 0;
    }
    part.push_back(name);
    size += own;
  }
  compute(layout(part), part, inference, computed);
  parts.computed = std::move(computed);
  const Names made(names.begin(), names.end());
  parts.nodes.erase(
      std::remove_if(parts.nodes.begin(), parts.nodes.end(), [&](const Node& node) { return makes_any(node, made); }),
      parts.nodes.end());
}

}  // namespace onnxtrain::device
