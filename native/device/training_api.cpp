// The border: upstream's table of training functions.
#include <cstdlib>
#include <cstring>
#include <optional>

#include "border.h"
#include "checkpoint.h"
#include "text.h"

namespace onnxtrain::device {

OrtStatus* export_model(OrtTrainingSession* session, const char* path, size_t count, const char* const* names) {
  return guarded([&] {
    require_given(path, "inference_model_path");
    if (count > 0) require_given(names, "graph_output_names");
    std::vector<std::string> wanted;
    for (size_t i = 0; i < count; ++i) {
      require_given(names[i], "a name in graph_output_names");
      wanted.emplace_back(names[i]);
    }
    session->session.export_model(path, wanted);
  });
}

}  // namespace onnxtrain::device

namespace onnxtrain {

constexpr int kGetTrainingApi = 219;

namespace {

using namespace device;

Settings settings_of(const OrtEnv* env, const OrtSessionOptions* options) {
  require_given(env, "env");
  Settings settings;
  settings.env = env;
  if (options == nullptr) return settings;
  const RuntimePointer own = host_runtime();
  OrtSessionOptions* cloned = nullptr;
  own->check(ONNXTRAIN_CALL(own->api, CloneSessionOptions)(options, &cloned));
  settings.options = hold(own, cloned);
  return settings;
}

std::optional<ModelFile> model_at(const char* path) {
  if (path == nullptr || *path == '\0') return std::nullopt;
  return read_model(std::string(path));
}

std::optional<ModelFile> model_in(const void* data, size_t size) {
  if (data == nullptr || size == 0) return std::nullopt;
  return read_model(copied_bytes(data, size));
}

OrtStatus* create_session(const OrtEnv* env, const OrtSessionOptions* options, OrtCheckpointState* checkpoint,
                          const char* train, const char* eval, const char* optimizer, OrtTrainingSession** out) {
  return guarded([&] {
    require_given(train, "train_model_path");
    const Settings settings = settings_of(env, options);
    GraphFiles files{read_model(std::string(train)), model_at(eval), model_at(optimizer), std::nullopt};
    *out = new OrtTrainingSession(host_runtime(), settings, *checkpoint, std::move(files));
  });
}

OrtStatus* create_session_from_buffer(const OrtEnv* env, const OrtSessionOptions* options,
                                      OrtCheckpointState* checkpoint, const void* train, size_t train_size,
                                      const void* eval, size_t eval_size, const void* optimizer, size_t optimizer_size,
                                      OrtTrainingSession** out) {
  return guarded([&] {
    require_given(train, "train_model_data");
    const Settings settings = settings_of(env, options);
    GraphFiles files{read_model(copied_bytes(train, train_size)), model_in(eval, eval_size),
                     model_in(optimizer, optimizer_size), std::nullopt};
    *out = new OrtTrainingSession(host_runtime(), settings, *checkpoint, std::move(files));
  });
}

const std::vector<ValueType>& values_of(const OrtTrainingSession* session, bool training, bool inputs) {
  return inputs ? session->session.inputs(training) : session->session.outputs(training);
}

template <bool kTraining, bool kInputs>
OrtStatus* get_count(const OrtTrainingSession* session, size_t* out) {
  return guarded([&] { *out = values_of(session, kTraining, kInputs).size(); });
}

template <bool kTraining, bool kInputs>
OrtStatus* get_name(const OrtTrainingSession* session, size_t index, OrtAllocator* allocator, char** out) {
  return guarded([&] {
    const std::vector<ValueType>& values = values_of(session, kTraining, kInputs);
    if (index >= values.size()) {
      throw ArgumentError("there is no " + std::string(kInputs ? "input " : "output ") + std::to_string(index) +
                          ": there are " + std::to_string(values.size()));
    }
    *out = copied_text(allocator, values[index].name);
  });
}

// Runs a step: outputs that are not NULL are written to, others are new tensors of the caller's.
template <class Step>
void run_step(size_t input_count, const OrtValue* const* inputs, size_t output_count, OrtValue** outputs,
              const std::vector<ValueType>& declared, const Step& step) {
  if (output_count > declared.size()) {
    throw ArgumentError(std::to_string(output_count) + " outputs are asked for, and there are " +
                        std::to_string(declared.size()));
  }
  Outputs given(output_count);
  for (size_t i = 0; i < output_count; ++i) {
    if (outputs[i] != nullptr) given[i] = Held<OrtValue>(outputs[i], [](OrtValue*) {});
  }
  const Outputs made = step(Inputs(inputs, inputs + input_count), given);
  for (size_t i = 0; i < output_count; ++i) {
    if (outputs[i] == nullptr) outputs[i] = released(made[i]);
  }
}

OrtStatus* train_step(OrtTrainingSession* session, const OrtRunOptions* options, size_t input_count,
                      const OrtValue* const* inputs, size_t output_count, OrtValue** outputs) {
  return guarded([&] {
    run_step(input_count, inputs, output_count, outputs, session->session.outputs(true),
             [&](const Inputs& fed, const Outputs& given) { return session->session.train_step(fed, options, given); });
  });
}

OrtStatus* eval_step(const OrtTrainingSession* session, const OrtRunOptions* options, size_t input_count,
                     const OrtValue* const* inputs, size_t output_count, OrtValue** outputs) {
  return guarded([&] {
    auto& own = const_cast<OrtTrainingSession*>(session)->session;
    run_step(input_count, inputs, output_count, outputs, own.outputs(false),
             [&](const Inputs& fed, const Outputs& given) { return own.eval_step(fed, options, given); });
  });
}

OrtStatus* lazy_reset_grad(OrtTrainingSession* session) {
  return guarded([&] { session->session.lazy_reset_gradients(); });
}

OrtStatus* optimizer_step(OrtTrainingSession* session, const OrtRunOptions* options) {
  return guarded([&] { session->session.optimizer_step(options); });
}

OrtStatus* set_learning_rate(OrtTrainingSession* session, float rate) {
  return guarded([&] { session->session.set_learning_rate(rate); });
}

OrtStatus* get_learning_rate(OrtTrainingSession* session, float* rate) {
  return guarded([&] { *rate = session->session.learning_rate(); });
}

OrtStatus* register_linear_scheduler(OrtTrainingSession* session, int64_t warmup, int64_t total, float rate) {
  return guarded([&] { session->session.register_linear_schedule(warmup, total, rate); });
}

OrtStatus* scheduler_step(OrtTrainingSession* session) {
  return guarded([&] { session->session.schedule_step(); });
}

OrtStatus* get_parameters_size(OrtTrainingSession* session, size_t* out, bool trainable_only) {
  return guarded([&] { *out = static_cast<size_t>(session->session.parameters_size(trainable_only)); });
}

// The elements of a buffer for all parameters.
float* buffer_of(const OrtTrainingSession* session, const OrtValue* buffer, bool trainable_only) {
  require_given(buffer, "parameters_buffer");
  const RuntimePointer own = host_runtime();
  const ValueShape found = shape_of(own, buffer);
  if (found.code != kFloatCode) throw ArgumentError("a buffer is of type float32, not " + type_text(found.code));
  const uint64_t wanted = session->session.parameters_size(trainable_only), size = elements_of(found.dims);
  if (size != wanted) {
    throw ArgumentError("the buffer has " + std::to_string(size) + " elements, and " + std::to_string(wanted) +
                        " are needed");
  }
  return reinterpret_cast<float*>(data_of(own, buffer));
}

OrtStatus* copy_parameters_to_buffer(OrtTrainingSession* session, OrtValue* buffer, bool trainable_only) {
  return guarded(
      [&] { session->session.copy_parameters_to(buffer_of(session, buffer, trainable_only), trainable_only); });
}

OrtStatus* copy_buffer_to_parameters(OrtTrainingSession* session, const OrtValue* buffer, bool trainable_only) {
  return guarded(
      [&] { session->session.copy_to_parameters(buffer_of(session, buffer, trainable_only), trainable_only); });
}

void release_session(OrtTrainingSession* session) { delete session; }
void release_state(OrtCheckpointState* checkpoint) { delete checkpoint; }

OrtStatus* set_process_seed(int64_t seed) {
  return guarded([&] { set_seed(static_cast<uint64_t>(seed)); });
}

// Upstream's table: its order is an interface that programs were compiled against.
struct TrainingApi {
  void* entries[33];
};

template <class Function>
void* entry_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

const TrainingApi& training_api() {
  static const TrainingApi table = {{
      entry_of(load_checkpoint),
      entry_of(save_checkpoint),
      entry_of(create_session),
      entry_of(create_session_from_buffer),
      entry_of(get_count<true, false>),
      entry_of(get_count<false, false>),
      entry_of(get_name<true, false>),
      entry_of(get_name<false, false>),
      entry_of(lazy_reset_grad),
      entry_of(train_step),
      entry_of(eval_step),
      entry_of(set_learning_rate),
      entry_of(get_learning_rate),
      entry_of(optimizer_step),
      entry_of(register_linear_scheduler),
      entry_of(scheduler_step),
      entry_of(get_parameters_size),
      entry_of(copy_parameters_to_buffer),
      entry_of(copy_buffer_to_parameters),
      entry_of(release_session),
      entry_of(release_state),
      entry_of(export_model),
      entry_of(set_process_seed),
      entry_of(get_count<true, true>),
      entry_of(get_count<false, true>),
      entry_of(get_name<true, true>),
      entry_of(get_name<false, true>),
      entry_of(add_property),
      entry_of(get_property),
      entry_of(load_checkpoint_from_buffer),
      entry_of(get_parameter_type_and_shape),
      entry_of(update_parameter),
      entry_of(get_parameter),
  }};
  return table;
}

const void* get_training_api(uint32_t) { return &training_api(); }

}  // namespace

// The table of training functions on the runtime that `api` is of; NULL without one.
ONNXTRAIN_EXPORT const void* onnxtrain_training_api(const OrtApi* api) {
  if (api == nullptr) return nullptr;
  set_host(api);
  return &training_api();
}

// A copy of the first `size` bytes of the runtime's table, in which GetTrainingApi returns ours. It lives
// as long as the process.
ONNXTRAIN_EXPORT const OrtApi* onnxtrain_install_table(const OrtApi* api, size_t size) {
  constexpr size_t kNeeded = (kGetTrainingApi + 1) * sizeof(void*);
  if (onnxtrain_training_api(api) == nullptr || size < kNeeded) return nullptr;
  void* copy = std::malloc(size);
  if (copy == nullptr) return nullptr;
  std::memcpy(copy, api, size);
  static_cast<void**>(copy)[kGetTrainingApi] = entry_of(get_training_api);
  return static_cast<const OrtApi*>(copy);
}

}  // namespace onnxtrain
