// The border: the plain interface of onnxtrain.h.
#include <cstring>
#include <optional>

#include "border.h"
#include "checkpoint.h"
#include "folder_lock.h"
#include "memory_limit.h"
#include "plain_tensors.h"
#include "text.h"

namespace onnxtrain {

namespace {

using namespace device;

using StateLock = std::lock_guard<std::recursive_mutex>;

// The options of a program that was compiled with an older header end earlier.
onnxtrain_options read_options(const onnxtrain_options* given) {
  onnxtrain_options made = {};
  if (given == nullptr) return made;
  if (given->size < offsetof(onnxtrain_options, env))
    throw ArgumentError("set options.size to sizeof(onnxtrain_options)");
  std::memcpy(&made, given, std::min(given->size, sizeof made));
  return made;
}

Settings settings_of(const onnxtrain_options& options) {
  if (options.threads < 0) throw ArgumentError("threads is at least 0, not " + std::to_string(options.threads));
  const RuntimePointer own = host_runtime();
  Settings settings;
  settings.env = options.env;
  if (options.env == nullptr) {
    settings.own_env = new_env(own);
    settings.env = settings.own_env.get();
  }
  if (options.session_options != nullptr) {
    OrtSessionOptions* cloned = nullptr;
    own->check(ONNXTRAIN_CALL(own->api, CloneSessionOptions)(options.session_options, &cloned));
    settings.options = hold(own, cloned);
  }
  settings.threads = options.threads;
  settings.native = options.without_kernels == 0;
  if (options.memory_limit > 0) {
    limit_memory(own, options.memory_limit);
    settings.has_memory_limit = true;
  }
  return settings;
}

GraphFiles files_of(const std::string& folder) {
  const auto graph = [&](const char* name) -> std::optional<ModelFile> {
    for (const char* format : {".onnx", ".ort"}) {
      const std::string file = folder + "/" + name + format;
      if (is_file(file)) return read_model(file);
    }
    return std::nullopt;
  };
  GraphFiles files{graph("training_model"), graph("eval_model"), graph("optimizer_model"), graph("step_model")};
  if (!files.train.has_value()) {
    throw ModelError("there is no 'training_model.onnx' in " + quoted(folder) +
                     ": it is not a folder of training artifacts");
  }
  return files;
}

std::string checkpoint_in(const std::string& folder) {
  for (const char* name : {"/checkpoint", "/nominal_checkpoint"}) {
    if (is_file(folder + name)) return folder + name;
  }
  throw ArgumentError("there is no 'checkpoint' in " + quoted(folder));
}

TrainingSession& used(const OrtTrainingSession* session) {
  require_given(session, "session");
  return const_cast<OrtTrainingSession*>(session)->session;
}

OrtCheckpointState state_of(const OrtTrainingSession* session) { return {used(session).state()}; }

// Calls with the names of a kind: how many there are, and a function that returns one.
template <class Function>
void with_names(const OrtTrainingSession* session, int32_t kind, const Function& call) {
  const TrainingSession& own = used(session);
  if (kind == ONNXTRAIN_PARAMETERS || kind == ONNXTRAIN_TRAINABLE) {
    const std::vector<std::string>& names = own.parameter_names(kind == ONNXTRAIN_TRAINABLE);
    return call(names.size(), [&](size_t index) { return names[index].c_str(); });
  }
  if (kind < ONNXTRAIN_INPUTS || kind > ONNXTRAIN_TRAINABLE) {
    throw ArgumentError("there is no kind " + std::to_string(kind) + " of names: see onnxtrain_kind");
  }
  const bool training = kind == ONNXTRAIN_INPUTS || kind == ONNXTRAIN_OUTPUTS;
  const bool inputs = kind == ONNXTRAIN_INPUTS || kind == ONNXTRAIN_EVAL_INPUTS;
  const std::vector<ValueType>& values = inputs ? own.inputs(training) : own.outputs(training);
  call(values.size(), [&](size_t index) { return values[index].name.c_str(); });
}

using Step = Outputs (TrainingSession::*)(const Inputs&, const OrtRunOptions*, const Outputs&);

OrtStatus* run_step(Step step, bool training, OrtTrainingSession* session, const onnxtrain_tensor* inputs,
                    size_t input_count, onnxtrain_tensor* outputs, size_t output_count) {
  return guarded([&] {
    TrainingSession& own = used(session);
    if (input_count > 0) require_given(inputs, "inputs");
    if (output_count > 0) require_given(outputs, "outputs");
    const RuntimePointer runtime = host_runtime();
    const FedInputs fed(runtime, own.inputs(training), inputs, input_count);
    const AskedOutputs asked(own.outputs(training), outputs, output_count);
    asked.fill(runtime, (own.*step)(fed.values(), nullptr, asked.given()));
  });
}

void require_count(const TrainingSession& session, bool trainable_only, const void* buffer, size_t count) {
  require_given(buffer, "buffer");
  const uint64_t wanted = session.parameters_size(trainable_only);
  if (count == wanted) return;
  throw ArgumentError("the buffer has " + std::to_string(count) + " elements, and " + std::to_string(wanted) +
                      " are needed");
}

}  // namespace

// ---- the library, and errors ----

ONNXTRAIN_EXPORT uint32_t onnxtrain_api_version() { return ONNXTRAIN_API_VERSION; }

ONNXTRAIN_EXPORT int32_t onnxtrain_attach(const OrtApiBase* base) {
  const OrtApi* api = base == nullptr ? nullptr : base->GetApi(kOrtVersion);
  if (api == nullptr) return 0;
  set_host(api);
  return 1;
}

ONNXTRAIN_EXPORT const char* onnxtrain_message(const OrtStatus* status) { return message_of(status); }
ONNXTRAIN_EXPORT int32_t onnxtrain_code(const OrtStatus* status) { return code_of(status); }
ONNXTRAIN_EXPORT void onnxtrain_release_status(OrtStatus* status) { release_status(status); }

// ---- sessions ----

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_open(const char* folder, const char* checkpoint, const onnxtrain_options* options,
                                           OrtTrainingSession** session) {
  return guarded([&] {
    require_given(folder, "folder");
    require_given(session, "session");
    const Settings settings = settings_of(read_options(options));
    const std::string path = tidy_path(folder);
    if (!is_folder(path)) throw ModelError("there is no folder " + quoted(path));
    settle(path);
    const FolderLock reading(path, FolderLock::kShared);
    GraphFiles files = files_of(path);
    const std::unique_ptr<OrtCheckpointState> state(
        new_state(read_checkpoint(checkpoint != nullptr ? checkpoint : checkpoint_in(path))));
    *session = new OrtTrainingSession(host_runtime(), settings, *state, std::move(files));
  });
}

ONNXTRAIN_EXPORT void onnxtrain_close(OrtTrainingSession* session) { delete session; }

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_count(const OrtTrainingSession* session, int32_t kind, size_t* count) {
  return guarded([&] {
    require_given(count, "count");
    with_names(session, kind, [&](size_t size, const auto&) { *count = size; });
  });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_name(const OrtTrainingSession* session, int32_t kind, size_t index,
                                           const char** name) {
  return guarded([&] {
    require_given(name, "name");
    with_names(session, kind, [&](size_t size, const auto& name_at) {
      if (index >= size) {
        throw ArgumentError("there is no name " + std::to_string(index) + " of this kind: there are " +
                            std::to_string(size));
      }
      *name = name_at(index);
    });
  });
}

ONNXTRAIN_EXPORT void onnxtrain_memory(uint64_t* held, uint64_t* most) {
  const HeldMemory now = held_memory();
  if (held != nullptr) *held = now.held;
  if (most != nullptr) *most = now.most;
}

// ---- steps ----

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_step(OrtTrainingSession* session, const onnxtrain_tensor* inputs,
                                           size_t input_count, onnxtrain_tensor* outputs, size_t output_count) {
  return run_step(&TrainingSession::step, true, session, inputs, input_count, outputs, output_count);
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_train_step(OrtTrainingSession* session, const onnxtrain_tensor* inputs,
                                                 size_t input_count, onnxtrain_tensor* outputs, size_t output_count) {
  return run_step(&TrainingSession::train_step, true, session, inputs, input_count, outputs, output_count);
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_eval_step(OrtTrainingSession* session, const onnxtrain_tensor* inputs,
                                                size_t input_count, onnxtrain_tensor* outputs, size_t output_count) {
  return run_step(&TrainingSession::eval_step, false, session, inputs, input_count, outputs, output_count);
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_optimizer_step(OrtTrainingSession* session) {
  return guarded([&] { used(session).optimizer_step(); });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_lazy_reset_grad(OrtTrainingSession* session) {
  return guarded([&] { used(session).lazy_reset_gradients(); });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_step_count(const OrtTrainingSession* session, int64_t* done, int64_t* skipped) {
  return guarded([&] {
    const TrainingSession& own = used(session);
    const StateLock lock(own.state()->lock);
    if (done != nullptr) *done = own.step_count();
    if (skipped != nullptr) *skipped = own.skipped_steps();
  });
}

ONNXTRAIN_EXPORT void onnxtrain_release_value(OrtValue* value) {
  if (value != nullptr) ONNXTRAIN_CALL(host_runtime()->api, ReleaseValue)(value);
}

// ---- learning rate, random numbers ----

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_set_learning_rate(OrtTrainingSession* session, float rate) {
  return guarded([&] { used(session).set_learning_rate(rate); });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_get_learning_rate(const OrtTrainingSession* session, float* rate) {
  return guarded([&] {
    require_given(rate, "rate");
    *rate = used(session).learning_rate();
  });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_register_linear_lr_scheduler(OrtTrainingSession* session, int64_t warmup_steps,
                                                                   int64_t total_steps, float rate) {
  return guarded([&] { used(session).register_linear_schedule(warmup_steps, total_steps, rate); });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_scheduler_step(OrtTrainingSession* session) {
  return guarded([&] { used(session).schedule_step(); });
}

ONNXTRAIN_EXPORT void onnxtrain_set_seed(int64_t seed) { set_seed(static_cast<uint64_t>(seed)); }

// ---- parameters and properties ----

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_get_parameter(const OrtTrainingSession* session, onnxtrain_tensor* parameter) {
  return guarded([&] {
    require_given(parameter, "parameter");
    require_given(parameter->name, "parameter.name");
    const OrtCheckpointState own = state_of(session);
    const StateLock lock(own.state->lock);
    const RuntimePointer runtime = host_runtime();
    const Tensor& tensor = own.state->require(parameter->name);
    const Held<OrtValue> view = value_over(runtime, tensor.data.data, tensor.data.size, tensor.code, tensor.dims);
    copy_to(runtime, *parameter, view, "the parameter " + quoted(parameter->name));
  });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_update_parameter(OrtTrainingSession* session, const onnxtrain_tensor* parameter) {
  OrtStatus* status = nullptr;
  OrtStatus* failed = guarded([&] {
    require_given(parameter, "parameter");
    OrtCheckpointState own = state_of(session);
    const Held<OrtValue> value = value_of(host_runtime(), *parameter, "the parameter");
    status = update_parameter(&own, parameter->name, value.get());
  });
  return failed != nullptr ? failed : status;
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_parameters_size(const OrtTrainingSession* session, int32_t trainable_only,
                                                      size_t* count) {
  return guarded([&] {
    require_given(count, "count");
    *count = static_cast<size_t>(used(session).parameters_size(trainable_only != 0));
  });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_get_parameters(const OrtTrainingSession* session, int32_t trainable_only,
                                                     float* buffer, size_t count) {
  return guarded([&] {
    require_count(used(session), trainable_only != 0, buffer, count);
    used(session).copy_parameters_to(buffer, trainable_only != 0);
  });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_set_parameters(OrtTrainingSession* session, int32_t trainable_only,
                                                     const float* buffer, size_t count) {
  return guarded([&] {
    require_count(used(session), trainable_only != 0, buffer, count);
    used(session).copy_to_parameters(buffer, trainable_only != 0);
  });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_set_property(OrtTrainingSession* session, const char* name, int32_t type,
                                                   const void* value) {
  if (session == nullptr) return guarded([&] { require_given(session, "session"); });
  OrtCheckpointState own = state_of(session);
  return add_property(&own, name, type, const_cast<void*>(value));
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_get_property(const OrtTrainingSession* session, const char* name, int32_t* type,
                                                   void* value, size_t* size) {
  return guarded([&] {
    require_given(name, "name");
    require_given(size, "size");
    const OrtCheckpointState own = state_of(session);
    const StateLock lock(own.state->lock);
    const Property* found = own.state->properties.find(name);
    if (found == nullptr) throw ArgumentError("Property " + std::string(name) + " not found.");
    if (type != nullptr) *type = static_cast<int32_t>(found->index());
    const size_t room = *size;
    const auto write = [&](const void* source, size_t needed) {
      *size = needed;
      if (value == nullptr) return;
      if (room < needed) {
        throw ArgumentError("the property " + quoted(name) + " has " + std::to_string(needed) +
                            " bytes, and there is room for " + std::to_string(room));
      }
      std::memcpy(value, source, needed);
    };
    if (const Text* text = std::get_if<Text>(found)) return write((*text)->c_str(), (*text)->size() + 1);
    if (const auto* number = std::get_if<int64_t>(found)) return write(number, sizeof *number);
    write(std::get_if<float>(found), sizeof(float));
  });
}

// ---- files ----

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_save_checkpoint(const OrtTrainingSession* session, const char* path,
                                                      int32_t with_optimizer) {
  if (session == nullptr) return guarded([&] { require_given(session, "session"); });
  OrtCheckpointState own = state_of(session);
  return save_checkpoint(&own, path, with_optimizer != 0);
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_export_model(OrtTrainingSession* session, const char* path,
                                                   const char* const* output_names, size_t output_count) {
  if (session == nullptr) return guarded([&] { require_given(session, "session"); });
  return export_model(session, path, output_count, output_names);
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_export_adapter(OrtTrainingSession* session, const char* path) {
  return guarded([&] {
    TrainingSession& own = used(session);
    require_given(path, "path");
    own.export_adapter(path);
  });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_load_adapter(OrtTrainingSession* session, const char* path) {
  return guarded([&] {
    TrainingSession& own = used(session);
    require_given(path, "path");
    own.load_adapter(path);
  });
}

ONNXTRAIN_EXPORT OrtStatus* onnxtrain_state(OrtTrainingSession* session, OrtCheckpointState** state) {
  return guarded([&] {
    require_given(state, "state");
    *state = new OrtCheckpointState(state_of(session));
  });
}

}  // namespace onnxtrain
