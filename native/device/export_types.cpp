// The types of outputs: as a model states them, else as onnxruntime finds them.
#include "export_model.h"
#include "session_types.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr int kFatalOnly = 4, kNoOptimization = 0;

// What onnxruntime knows of an output.
struct Found {
  ValueType type;
  bool is_sequence = false;
};

// Whether a ValueInfoProto has a type, and whether that has a shape where it is a tensor.
struct Stated {
  bool type = false, shape = false;
};

Stated stated_in(WireReader& reader, std::string_view message) {
  std::string_view declared, tensor;
  if (!reader.only(message, 2, "value", declared) || declared.empty()) return {};
  if (!reader.only(declared, 1, "value", tensor)) return {true, true};
  const ValueType found = read_value_type(reader, message, "value");
  return {found.code != 0, found.has_shape};
}

std::vector<Found> outputs_of(const RuntimePointer& runtime, OrtSession* session, size_t count) {
  std::vector<Found> made;
  for (size_t index = 0; index < count; ++index) {
    const OrtApi* api = runtime->api;
    OrtTypeInfo* info = nullptr;
    runtime->check(ONNXTRAIN_CALL(api, SessionGetOutputTypeInfo)(session, index, &info));
    Held<OrtTypeInfo> held = hold(runtime, info);
    Found found;
    const OrtSequenceTypeInfo* sequence = nullptr;
    runtime->check(ONNXTRAIN_CALL(api, CastTypeInfoToSequenceTypeInfo)(info, &sequence));
    if (sequence != nullptr) {
      runtime->check(ONNXTRAIN_CALL(api, GetSequenceElementType)(sequence, &info));
      held = hold(runtime, info);
      found.is_sequence = true;
    }
    found.type = declared_type(runtime, info);
    found.type.has_shape = !found.type.dims.empty();  // a scalar and an unknown shape look alike
    made.push_back(found);
  }
  return made;
}

}  // namespace

Held<OrtSession> Inference::session(const std::string& model) const {
  if (runtime == nullptr) throw NotImplementedError("there is no onnxruntime here");
  const OrtApi* api = runtime->api;
  OrtSessionOptions* made = nullptr;
  runtime->check(ONNXTRAIN_CALL(api, CreateSessionOptions)(&made));
  const Held<OrtSessionOptions> options = hold(runtime, made);
  runtime->check(ONNXTRAIN_CALL(api, SetSessionLogSeverityLevel)(made, kFatalOnly));
  runtime->check(ONNXTRAIN_CALL(api, SetSessionGraphOptimizationLevel)(made, kNoOptimization));
  OrtSession* session = nullptr;
  runtime->check(ONNXTRAIN_CALL(api, CreateSessionFromArray)(env, model.data(), model.size(), made, &session));
  return hold(runtime, session);
}

Cut::Types Cut::output_types(const Inference& inference) {
  std::map<std::string, std::string> stated;
  std::vector<std::string> unsure;
  bool is_any_unknown = false;
  for (const std::string& name : outputs_) {
    const std::string type = stated[name] = stated_type(name);
    is_any_unknown |= type.empty();
    if (type.empty() || !stated_in(reader_, type).shape) unsure.push_back(name);
  }
  if (!unsure.empty()) {
    try {
      for (const auto& [name, type] : inferred(inference, unsure)) stated[name] = type;
    } catch (const ModelError&) {
      if (is_any_unknown) throw;  // else a type without a shape will do
    }
  }
  Types made;
  for (const std::string& name : outputs_) made.push_back(stated[name]);
  return made;
}

std::string Cut::stated_type(const std::string& name) {
  for (const Pieces* pieces : {&parts_.outputs, &parts_.value_infos, &parts_.inputs}) {
    const std::string_view* message = pieces->find(name);
    if (message != nullptr && stated_in(reader_, *message).type) return std::string(*message);
  }
  if (const Tensor* computed = parts_.computed.find(name)) {
    return value_info(name, type_of(computed->code, computed->dims));
  }
  return parts_.initializers.find(name) == nullptr ? "" : initializer_type(name);
}

std::string Cut::initializer_type(const std::string& name) {
  const auto [code, dims] = read_tensor_type(reader_, *parts_.initializers.find(name), name);
  return value_info(name, type_of(code, dims));
}

// Lets onnxruntime find types; parameters stay inputs, so that no data are needed.
std::map<std::string, std::string> Cut::inferred(const Inference& inference, const std::vector<std::string>& names) {
  std::vector<std::string> inputs;
  std::vector<std::string_view> copied;
  for (const auto& [name, data] : parts_.inputs) {
    if (needed_.has(name)) inputs.emplace_back(data);
  }
  for (const auto& [name, data] : parts_.initializers) {
    if (!needed_.has(name)) continue;
    if (model_.external.find(name) == nullptr)
      copied.push_back(data);
    else if (parts_.inputs.find(name) == nullptr)
      inputs.push_back(initializer_type(name));
  }
  for (const auto& [name, value] : parts_.computed) {
    if (needed_.has(name)) inputs.push_back(value_info(name, type_of(value.code, value.dims)));
  }
  const auto asked = [&](const std::vector<std::string>& outputs, const std::vector<std::string>& more,
                         const std::vector<std::string>& about) {
    Types types;
    for (const std::string& name : outputs) types.push_back(bytes_field(1, name));
    ModelLayout layout = assembled(outputs, inputs, types);
    layout.copied = copied;
    layout.more_nodes = more;
    try {
      const Held<OrtSession> session = inference.session(layout.file().joined());
      return outputs_of(inference.runtime, session.get(), outputs.size());
    } catch (const NotImplementedError&) {
      throw;
    } catch (const Error& error) {
      std::vector<std::string> shown;
      for (const std::string& name : about) shown.push_back(quoted(name));
      throw ModelError(model_.name + " does not say of which type " + joined(shown, ", ") +
                       " is, and onnxruntime cannot tell: " + error.what());
    }
  };
  std::vector<Found> found = asked(names, {}, names);
  // Of Shape's result, the shape says whether a value is a scalar.
  std::vector<size_t> flat;
  std::vector<std::string> ranks, nodes, flat_names;
  for (size_t i = 0; i < names.size(); ++i) {
    if (found[i].type.code == 0 || found[i].is_sequence || found[i].type.has_shape) continue;
    const std::string rank = "rank of " + names[i];
    flat.push_back(i);
    flat_names.push_back(names[i]);
    ranks.push_back(rank);
    nodes.push_back(bytes_field(1, names[i]) + bytes_field(2, rank) + bytes_field(4, "Shape"));
  }
  if (!flat.empty()) {
    const std::vector<Found> shapes = asked(ranks, nodes, flat_names);
    for (size_t k = 0; k < flat.size(); ++k) {
      const std::vector<Dimension>& dims = shapes[k].type.dims;
      found[flat[k]].type.has_shape = dims.size() == 1 && dims[0].size == 0;
    }
  }
  std::map<std::string, std::string> made;
  for (size_t i = 0; i < names.size(); ++i) {
    const Found& one = found[i];
    if (one.type.code == 0) {
      throw ModelError(model_.name + ": " + quoted(names[i]) + " is neither a tensor nor a sequence of tensors, and " +
                       "cannot be exported");
    }
    if (!one.type.has_shape && !stated_type(names[i]).empty()) continue;
    std::string type = tensor_type(one.type);
    if (one.is_sequence) type = bytes_field(4, bytes_field(1, type));
    made[names[i]] = bytes_field(1, names[i]) + bytes_field(2, type);
  }
  return made;
}

}  // namespace onnxtrain::device
