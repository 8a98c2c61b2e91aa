#include "binding.h"

#include <algorithm>
#include <cstring>

namespace onnxtrain::device {

bool BoundOutput::has_shape(const Symbols& symbols) const {
  return type_.has_shape && std::all_of(type_.dims.begin(), type_.dims.end(), [&](const Dimension& dim) {
           return dim.is_number() || symbols.count(dim.symbol) > 0;
         });
}

Dims BoundOutput::shape_of(const Symbols& symbols) const {
  Dims sizes;
  for (const Dimension& dim : type_.dims) sizes.push_back(dim.is_number() ? dim.size : symbols.at(dim.symbol));
  return sizes;
}

Held<OrtValue> BoundOutput::bind(const RuntimePointer& runtime, OrtIoBinding* binding, const Symbols& symbols,
                                 const Held<OrtValue>& given) const {
  const OrtApi* api = runtime->api;
  Held<OrtValue> value = given;
  if (value == nullptr && is_declared_right_ && has_shape(symbols))
    value = new_value(runtime, type_.code, shape_of(symbols));
  if (value == nullptr) {
    runtime->check(ONNXTRAIN_CALL(api, BindOutputToDevice)(binding, name().c_str(), runtime->memory));
  } else {
    runtime->check(ONNXTRAIN_CALL(api, BindOutput)(binding, name().c_str(), value.get()));
  }
  return value;
}

Binding::Binding(std::shared_ptr<Graph> graph, const RuntimePointer& runtime, Variables state, Variables results,
                 std::vector<ValueType> inputs, const std::vector<ValueType>& outputs,
                 const std::vector<ValueType>& check)
    : graph_(std::move(graph)),
      runtime_(runtime),
      state_(std::move(state)),
      results_(std::move(results)),
      inputs_(std::move(inputs)),
      checks_(check.size()) {
  for (const ValueType& value : outputs) outputs_.emplace_back(value);
  for (const ValueType& value : check) outputs_.emplace_back(value);
  OrtRunOptions* options = nullptr;
  runtime->check(ONNXTRAIN_CALL(runtime->api, CreateRunOptions)(&options));
  run_options_ = hold(runtime, options);
}

void Binding::bind() {
  const OrtApi* api = runtime_->api;
  session_ = nullptr;  // frees the memory of the old ones first
  binding_ = nullptr;
  kept_.clear();
  copied_.clear();
  const Held<OrtSession> session = graph_->session();
  OrtIoBinding* made = nullptr;
  runtime_->check(ONNXTRAIN_CALL(api, CreateIoBinding)(session.get(), &made));
  binding_ = hold(runtime_, made);
  for (const auto& [name, variable] : state_) {
    runtime_->check(ONNXTRAIN_CALL(api, BindInput)(made, name.c_str(), variable->value()));
  }
  // Other graphs do not see to it that nobody reads a parameter when its update is written.
  const bool is_in_place = graph_->model().metadata.target != "webgpu";
  size_t index = 0;
  for (const auto& [name, variable] : results_) {
    // A large tensor is updated as a list of pieces of it: the graph declares which shape.
    const ValueType* declared = graph_->model().output(name);
    const bool is_known = declared != nullptr && declared->is_fixed();
    Held<OrtValue> memory = is_in_place ? variable->in_shape(is_known ? declared->sizes() : variable->dims) : nullptr;
    if (memory == nullptr) {
      copied_.push_back({index, name, variable});
      runtime_->check(ONNXTRAIN_CALL(api, BindOutputToDevice)(made, name.c_str(), runtime_->memory));
    } else {
      runtime_->check(ONNXTRAIN_CALL(api, BindOutput)(made, name.c_str(), memory.get()));
      kept_.push_back(std::move(memory));
    }
    ++index;
  }
  session_ = session;
}

Outputs Binding::run(const std::vector<Held<OrtValue>>& values, const OrtRunOptions* options, const Outputs& given) {
  const OrtApi* api = runtime_->api;
  if (session_ == nullptr || !graph_->is_current() || session_ != graph_->session()) bind();
  Symbols symbols;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    runtime_->check(ONNXTRAIN_CALL(api, BindInput)(binding_.get(), inputs_[i].name.c_str(), values[i].get()));
    const Dims sizes = shape_of(runtime_, values[i].get()).dims;
    for (size_t axis = 0; axis < std::min(sizes.size(), inputs_[i].dims.size()); ++axis) {
      const std::string& symbol = inputs_[i].dims[axis].symbol;
      if (!symbol.empty()) symbols[symbol] = sizes[axis];
    }
  }
  Outputs made;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    made.push_back(outputs_[i].bind(runtime_, binding_.get(), symbols, i < given.size() ? given[i] : nullptr));
  }
  try {
    const OrtRunOptions* chosen = options == nullptr ? run_options_.get() : options;
    runtime_->check(ONNXTRAIN_CALL(api, RunWithBinding)(session_.get(), chosen, binding_.get()));
  } catch (const Error& error) {
    session_ = nullptr;
    std::string message = "onnxruntime failed to run " + graph_->name() + ": " + error.what();
    if (!results_.empty()) {
      message +=
          ". What the graph had written by then stays written: continue from a checkpoint, unless the error is one of "
          "the inputs";
    }
    throw Error(message);
  }
  const bool has_allocated = std::any_of(made.begin(), made.end(), [](const auto& value) { return value == nullptr; });
  if (has_allocated || !copied_.empty()) take_allocated(made, symbols);
  read_check(made);
  return made;
}

// Takes what onnxruntime has allocated, and learns whether that was as declared.
void Binding::take_allocated(Outputs& made, const Symbols& symbols) {
  OrtValue** values = nullptr;
  size_t count = 0;
  const OrtApi* api = runtime_->api;
  runtime_->check(ONNXTRAIN_CALL(api, GetBoundOutputValues)(binding_.get(), runtime_->allocator, &values, &count));
  std::vector<Held<OrtValue>> found;
  for (size_t i = 0; i < count; ++i) found.push_back(hold(runtime_, values[i]));
  runtime_->check(ONNXTRAIN_CALL(api, AllocatorFree)(runtime_->allocator, values));
  const size_t first = results_.size();
  for (size_t i = 0; i < made.size(); ++i) {
    if (made[i] != nullptr) continue;
    made[i] = found.at(first + i);
    outputs_[i].learn(onnxtrain::device::shape_of(runtime_, made[i].get()).dims, symbols);
  }
  const bool has_changed = checks_ == 0 || *data_of(runtime_, made[made.size() - checks_].get()) != 0;
  for (const Copied& copied : copied_) {
    const Bytes& memory = copied.variable->data;
    const uint8_t* data = data_of(runtime_, found.at(copied.index).get());
    if (has_changed && memory.size > 0) std::memcpy(memory.data, data, static_cast<size_t>(memory.size));
    const auto bind_anew = ONNXTRAIN_CALL(api, BindOutputToDevice);
    runtime_->check(bind_anew(binding_.get(), copied.name.c_str(), runtime_->memory));
  }
}

// Keeps what the graph says about the run, and leaves the other outputs.
void Binding::read_check(Outputs& made) {
  if (checks_ == 0) return;
  const size_t count = made.size() - checks_;
  passed_ = *data_of(runtime_, made[count].get()) != 0;
  made.resize(count);
}

}  // namespace onnxtrain::device
