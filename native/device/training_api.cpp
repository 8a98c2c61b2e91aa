// The border of the library: upstream's table of training functions, and functions of our own, in C.
// No exception crosses it; every failure is a status with a sentence.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "checkpoint.h"
#include "errors.h"
#include "files.h"
#include "folder_lock.h"
#include "session.h"
#include "text.h"

#define ONNXTRAIN_EXPORT extern "C" __attribute__((visibility("default")))

namespace onnxtrain {

// More of onnxruntime's entries, for what users are given.
constexpr int kCreateTensorTypeAndShapeInfo = 57, kSetTensorElementType = 58, kSetDimensions = 59;
using CreateTensorTypeAndShapeInfoFunction = OrtStatus*(OrtTensorTypeAndShapeInfo**);
using SetTensorElementTypeFunction = OrtStatus*(OrtTensorTypeAndShapeInfo*, int);
using SetDimensionsFunction = OrtStatus*(OrtTensorTypeAndShapeInfo*, const int64_t*, size_t);
constexpr int kGetTrainingApi = 219;

struct OrtCheckpointState {
  std::shared_ptr<device::TrainingState> state;
};

struct OrtTrainingSession {
  OrtTrainingSession(const device::RuntimePointer& runtime, const device::Settings& settings,
                     const OrtCheckpointState& checkpoint, device::GraphFiles files)
      : session(runtime, settings, checkpoint.state, std::move(files)) {}
  device::TrainingSession session;
};

namespace {

using namespace device;

enum PropertyType : int { kIntProperty = 0, kFloatProperty = 1, kStringProperty = 2 };
enum StatusCode : int { kStatusFail = 1, kStatusInvalidArgument = 2, kStatusNotImplemented = 9 };

// What the runtime that this process has is called by; it is given to `onnxtrain_install`.
struct Host {
  std::mutex guard;
  std::atomic<const OrtApi*> api{nullptr};
  RuntimePointer runtime;
};

Host& host() {
  static Host held;
  return held;
}

RuntimePointer runtime() {
  Host& own = host();
  const std::lock_guard<std::mutex> lock(own.guard);
  if (own.runtime == nullptr) own.runtime = std::make_shared<const Runtime>(own.api.load());
  return own.runtime;
}

OrtStatus* status_of(int code, const char* sentence) {
  return ONNXTRAIN_CALL(host().api.load(), CreateStatus)(static_cast<OrtErrorCode>(code), sentence);
}

template <class Function>
OrtStatus* guarded(const Function& call) noexcept {
  try {
    call();
    return nullptr;
  } catch (const ArgumentError& error) {
    return status_of(kStatusInvalidArgument, error.what());
  } catch (const NotImplementedError& error) {
    return status_of(kStatusNotImplemented, error.what());
  } catch (const OsError& error) {
    return status_of(kStatusFail, reason_of(error).c_str());
  } catch (const std::bad_alloc&) {
    return status_of(kStatusFail, "there is not enough memory");
  } catch (const std::exception& error) {
    return status_of(kStatusFail, error.what());
  } catch (...) {
    return status_of(kStatusFail, "something went wrong that has no name");
  }
}

void require(const void* given, const char* name) {
  if (given == nullptr) throw ArgumentError(std::string(name) + " is NULL");
}

// A text in memory that the caller frees with the allocator.
char* copied_text(OrtAllocator* allocator, const std::string& text) {
  void* memory = nullptr;
  const RuntimePointer own = runtime();
  own->check(ONNXTRAIN_CALL(own->api, AllocatorAlloc)(allocator, text.size() + 1, &memory));
  std::memcpy(memory, text.c_str(), text.size() + 1);
  return static_cast<char*>(memory);
}

Bytes copied_bytes(const void* data, size_t size) {
  Bytes made = allocate(size);
  if (size > 0) std::memcpy(made.data, data, size);
  return made;
}

// ---- checkpoints ----

OrtCheckpointState* new_state(CheckpointContent content) {
  auto made = std::make_unique<OrtCheckpointState>();
  made->state = std::make_shared<TrainingState>(std::move(content));
  return made.release();
}

OrtStatus* load_checkpoint(const char* path, OrtCheckpointState** out) {
  return guarded([&] {
    require(path, "checkpoint_path");
    *out = new_state(read_checkpoint(std::string(path)));
  });
}

OrtStatus* load_checkpoint_from_buffer(const void* buffer, size_t size, OrtCheckpointState** out) {
  return guarded([&] {
    require(buffer, "checkpoint_buffer");
    *out = new_state(read_checkpoint(copied_bytes(buffer, size)));
  });
}

OrtStatus* save_checkpoint(OrtCheckpointState* checkpoint, const char* path, bool with_optimizer) {
  return guarded([&] {
    require(path, "checkpoint_path");
    TrainingState& state = *checkpoint->state;
    const std::lock_guard<std::recursive_mutex> lock(state.lock);
    state.require_finite("nothing was saved", with_optimizer);
    write_checkpoint(path, state.content(with_optimizer));
  });
}

OrtStatus* add_property(OrtCheckpointState* checkpoint, const char* name, int type, void* value) {
  return guarded([&] {
    require(name, "property_name");
    require(value, "property_value");
    const std::string key = name;
    if (key.empty()) throw ArgumentError("the name of a property is a text, not ''");
    if (starts_with(key, kReservedPrefix)) {
      throw ArgumentError("names that begin with " + quoted(kReservedPrefix) + " are reserved");
    }
    Property made;
    if (type == kIntProperty)
      made = *static_cast<const int64_t*>(value);
    else if (type == kFloatProperty)
      made = *static_cast<const float*>(value);
    else if (type == kStringProperty)
      made = std::make_shared<const std::string>(static_cast<const char*>(value));
    else
      throw ArgumentError("the type of the property " + quoted(key) + " is unknown: " + std::to_string(type));
    const Text* text = std::get_if<Text>(&made);
    if (utf8_error(key) != key.npos || (text != nullptr && utf8_error(**text) != key.npos)) {
      throw ArgumentError("the property " + quoted(key) + " is not a text in UTF-8");
    }
    const std::lock_guard<std::recursive_mutex> lock(checkpoint->state->lock);
    checkpoint->state->properties[key] = made;
  });
}

OrtStatus* get_property(const OrtCheckpointState* checkpoint, const char* name, OrtAllocator* allocator, int* type,
                        void** value) {
  return guarded([&] {
    require(name, "property_name");
    const std::lock_guard<std::recursive_mutex> lock(checkpoint->state->lock);
    const Property* found = checkpoint->state->properties.find(name);
    if (found == nullptr) throw ArgumentError("Property " + std::string(name) + " not found.");
    *type = static_cast<int>(found->index());
    if (const Text* text = std::get_if<Text>(found)) {
      *value = copied_text(allocator, **text);
      return;
    }
    const RuntimePointer own = runtime();
    own->check(ONNXTRAIN_CALL(own->api, AllocatorAlloc)(allocator, sizeof(int64_t), value));
    if (const auto* number = std::get_if<int64_t>(found)) std::memcpy(*value, number, sizeof *number);
    if (const auto* number = std::get_if<float>(found)) std::memcpy(*value, number, sizeof *number);
  });
}

OrtStatus* get_parameter_type_and_shape(const OrtCheckpointState* checkpoint, const char* name,
                                        OrtTensorTypeAndShapeInfo** out) {
  return guarded([&] {
    require(name, "parameter_name");
    const RuntimePointer own = runtime();
    const std::lock_guard<std::recursive_mutex> lock(checkpoint->state->lock);
    const Tensor& tensor = checkpoint->state->require(name);
    OrtTensorTypeAndShapeInfo* info = nullptr;
    own->check(ONNXTRAIN_CALL(own->api, CreateTensorTypeAndShapeInfo)(&info));
    std::unique_ptr<OrtTensorTypeAndShapeInfo, ReleaseTensorTypeAndShapeInfoFunction*> held(
        info, ONNXTRAIN_CALL(own->api, ReleaseTensorTypeAndShapeInfo));
    own->check(ONNXTRAIN_CALL(own->api, SetTensorElementType)(info, tensor.code));
    own->check(ONNXTRAIN_CALL(own->api, SetDimensions)(info, tensor.dims.data(), tensor.dims.size()));
    *out = held.release();
  });
}

OrtStatus* update_parameter(OrtCheckpointState* checkpoint, const char* name, OrtValue* value) {
  return guarded([&] {
    require(name, "parameter_name");
    require(value, "parameter");
    const RuntimePointer own = runtime();
    const ValueShape found = shape_of(own, value);
    Tensor tensor{found.code, found.dims, {}, {}};
    if (element_type(found.code) != nullptr && found.code != kStringCode) {
      tensor.data.data = data_of(own, value);
      tensor.data.size = data_size(found.code, found.dims);
    }
    const std::lock_guard<std::recursive_mutex> lock(checkpoint->state->lock);
    checkpoint->state->set(name, tensor);
  });
}

OrtStatus* get_parameter(const OrtCheckpointState* checkpoint, const char* name, OrtAllocator* allocator,
                         OrtValue** out) {
  return guarded([&] {
    require(name, "parameter_name");
    const RuntimePointer own = runtime();
    const std::lock_guard<std::recursive_mutex> lock(checkpoint->state->lock);
    const Tensor& tensor = checkpoint->state->require(name);
    OrtValue* made = nullptr;
    const auto create = ONNXTRAIN_CALL(own->api, CreateTensorAsOrtValue);
    own->check(create(allocator, tensor.dims.data(), tensor.dims.size(), tensor.code, &made));
    if (tensor.data.size > 0) std::memcpy(data_of(own, made), tensor.data.data, static_cast<size_t>(tensor.data.size));
    *out = made;
  });
}

// ---- sessions ----

Settings settings_of(const OrtEnv* env, const OrtSessionOptions* options) {
  require(env, "env");
  Settings settings;
  settings.env = env;
  if (options == nullptr) return settings;
  const RuntimePointer own = runtime();
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
    require(train, "train_model_path");
    const Settings settings = settings_of(env, options);
    GraphFiles files{read_model(std::string(train)), model_at(eval), model_at(optimizer), std::nullopt};
    *out = new OrtTrainingSession(runtime(), settings, *checkpoint, std::move(files));
  });
}

OrtStatus* create_session_from_buffer(const OrtEnv* env, const OrtSessionOptions* options,
                                      OrtCheckpointState* checkpoint, const void* train, size_t train_size,
                                      const void* eval, size_t eval_size, const void* optimizer, size_t optimizer_size,
                                      OrtTrainingSession** out) {
  return guarded([&] {
    require(train, "train_model_data");
    const Settings settings = settings_of(env, options);
    GraphFiles files{read_model(copied_bytes(train, train_size)), model_in(eval, eval_size),
                     model_in(optimizer, optimizer_size), std::nullopt};
    *out = new OrtTrainingSession(runtime(), settings, *checkpoint, std::move(files));
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
  require(buffer, "parameters_buffer");
  const RuntimePointer own = runtime();
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

OrtStatus* export_model(OrtTrainingSession*, const char*, size_t, const char* const*) {
  return guarded([] {
    throw NotImplementedError(
        "models are not exported here yet: save the state with SaveCheckpoint, and export it in Python with "
        "TrainingSession.export_model_for_inferencing");
  });
}

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
  Host& own = host();
  const std::lock_guard<std::mutex> lock(own.guard);
  if (own.api != api) own.runtime = nullptr;
  own.api = api;
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

// Opens a folder of artifacts, with another checkpoint than its own if one is given.
ONNXTRAIN_EXPORT OrtStatus* onnxtrain_open(const OrtEnv* env, const OrtSessionOptions* options, const char* folder,
                                           const char* checkpoint, OrtCheckpointState** state,
                                           OrtTrainingSession** session) {
  return guarded([&] {
    require(folder, "folder");
    const std::string path = tidy_path(folder);
    if (!is_folder(path)) throw ModelError("there is no folder " + quoted(path));
    settle(path);
    const FolderLock reading(path, FolderLock::kShared);
    const auto graph = [&](const char* name) -> std::optional<ModelFile> {
      const std::string file = path + "/" + name;
      if (!is_file(file)) return std::nullopt;
      return read_model(file);
    };
    GraphFiles files{graph("training_model.onnx"), graph("eval_model.onnx"), graph("optimizer_model.onnx"),
                     graph("step_model.onnx")};
    if (!files.train.has_value()) {
      throw ModelError("there is no 'training_model.onnx' in " + quoted(path) +
                       ": it is not a folder of training artifacts");
    }
    std::string file = checkpoint != nullptr ? checkpoint : path + "/checkpoint";
    if (checkpoint == nullptr && !is_file(file)) file = path + "/nominal_checkpoint";
    if (checkpoint == nullptr && !is_file(file)) throw ArgumentError("there is no 'checkpoint' in " + quoted(path));
    const std::unique_ptr<OrtCheckpointState> held(new_state(read_checkpoint(file)));
    *session = new OrtTrainingSession(runtime(), settings_of(env, options), *held, std::move(files));
    *state = new OrtCheckpointState(*held);
  });
}

// A whole step in one run: forward, backward and update.
ONNXTRAIN_EXPORT OrtStatus* onnxtrain_step(OrtTrainingSession* session, const OrtRunOptions* options,
                                           size_t input_count, const OrtValue* const* inputs, size_t output_count,
                                           OrtValue** outputs) {
  return guarded([&] {
    run_step(input_count, inputs, output_count, outputs, session->session.outputs(true),
             [&](const Inputs& fed, const Outputs& given) { return session->session.step(fed, options, given); });
  });
}

}  // namespace onnxtrain
