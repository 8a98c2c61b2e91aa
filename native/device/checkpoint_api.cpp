// The border: functions of upstream's table that checkpoints have.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "border.h"
#include "checkpoint.h"
#include "text.h"

namespace onnxtrain {

// More of onnxruntime's entries, for what users are given.
constexpr int kGetErrorCode = 1, kCreateTensorTypeAndShapeInfo = 57, kSetTensorElementType = 58, kSetDimensions = 59;
using GetErrorCodeFunction = int(const OrtStatus*);
using CreateTensorTypeAndShapeInfoFunction = OrtStatus*(OrtTensorTypeAndShapeInfo**);
using SetTensorElementTypeFunction = OrtStatus*(OrtTensorTypeAndShapeInfo*, int);
using SetDimensionsFunction = OrtStatus*(OrtTensorTypeAndShapeInfo*, const int64_t*, size_t);

}  // namespace onnxtrain

namespace onnxtrain::device {

namespace {

enum PropertyType : int { kIntProperty = 0, kFloatProperty = 1, kStringProperty = 2 };

// What the runtime of this process is called by.
struct Host {
  std::mutex guard;
  std::atomic<const OrtApi*> api{nullptr};
  RuntimePointer runtime;
};

Host& host() {
  static Host held;
  return held;
}

// What is returned where no runtime makes a status.
char no_runtime[] = "no onnxruntime is attached: call onnxtrain_attach(OrtGetApiBase()) first";

bool is_no_runtime(const OrtStatus* status) { return reinterpret_cast<const char*>(status) == no_runtime; }

}  // namespace

void set_host(const OrtApi* api) {
  Host& own = host();
  const std::lock_guard<std::mutex> lock(own.guard);
  if (own.api != api) own.runtime = nullptr;
  own.api = api;
}

RuntimePointer host_runtime() {
  Host& own = host();
  const std::lock_guard<std::mutex> lock(own.guard);
  if (own.api == nullptr) throw StateError(no_runtime);
  if (own.runtime == nullptr) own.runtime = std::make_shared<const Runtime>(own.api.load());
  return own.runtime;
}

OrtStatus* status_of(int code, const char* sentence) noexcept {
  const OrtApi* api = host().api.load();
  if (api == nullptr) return reinterpret_cast<OrtStatus*>(no_runtime);
  return ONNXTRAIN_CALL(api, CreateStatus)(static_cast<OrtErrorCode>(code), sentence);
}

const char* message_of(const OrtStatus* status) {
  if (status == nullptr) return "";
  return is_no_runtime(status) ? no_runtime : ONNXTRAIN_CALL(host().api.load(), GetErrorMessage)(status);
}

int code_of(const OrtStatus* status) {
  if (status == nullptr) return 0;
  return is_no_runtime(status) ? kStatusFail : ONNXTRAIN_CALL(host().api.load(), GetErrorCode)(status);
}

void release_status(OrtStatus* status) {
  if (status != nullptr && !is_no_runtime(status)) ONNXTRAIN_CALL(host().api.load(), ReleaseStatus)(status);
}

void require_given(const void* given, const char* name) {
  if (given == nullptr) throw ArgumentError(std::string(name) + " is NULL");
}

char* copied_text(OrtAllocator* allocator, const std::string& text) {
  void* memory = nullptr;
  const RuntimePointer own = host_runtime();
  own->check(ONNXTRAIN_CALL(own->api, AllocatorAlloc)(allocator, text.size() + 1, &memory));
  std::memcpy(memory, text.c_str(), text.size() + 1);
  return static_cast<char*>(memory);
}

Bytes copied_bytes(const void* data, size_t size) {
  Bytes made = allocate(size);
  if (size > 0) std::memcpy(made.data, data, size);
  return made;
}

OrtCheckpointState* new_state(CheckpointContent content) {
  auto made = std::make_unique<OrtCheckpointState>();
  made->state = std::make_shared<TrainingState>(std::move(content));
  return made.release();
}

OrtStatus* load_checkpoint(const char* path, OrtCheckpointState** out) {
  return guarded([&] {
    require_given(path, "checkpoint_path");
    *out = new_state(read_checkpoint(std::string(path)));
  });
}

OrtStatus* load_checkpoint_from_buffer(const void* buffer, size_t size, OrtCheckpointState** out) {
  return guarded([&] {
    require_given(buffer, "checkpoint_buffer");
    *out = new_state(read_checkpoint(copied_bytes(buffer, size)));
  });
}

OrtStatus* save_checkpoint(OrtCheckpointState* checkpoint, const char* path, bool with_optimizer) {
  return guarded([&] {
    require_given(path, "checkpoint_path");
    TrainingState& state = *checkpoint->state;
    const std::lock_guard<std::recursive_mutex> lock(state.lock);
    state.require_finite("nothing was saved", with_optimizer);
    write_checkpoint(path, state.content(with_optimizer));
  });
}

OrtStatus* add_property(OrtCheckpointState* checkpoint, const char* name, int type, void* value) {
  return guarded([&] {
    require_given(name, "property_name");
    require_given(value, "property_value");
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
    require_given(name, "property_name");
    const std::lock_guard<std::recursive_mutex> lock(checkpoint->state->lock);
    const Property* found = checkpoint->state->properties.find(name);
    if (found == nullptr) throw ArgumentError("Property " + std::string(name) + " not found.");
    *type = static_cast<int>(found->index());
    if (const Text* text = std::get_if<Text>(found)) {
      *value = copied_text(allocator, **text);
      return;
    }
    const RuntimePointer own = host_runtime();
    own->check(ONNXTRAIN_CALL(own->api, AllocatorAlloc)(allocator, sizeof(int64_t), value));
    if (const auto* number = std::get_if<int64_t>(found)) std::memcpy(*value, number, sizeof *number);
    if (const auto* number = std::get_if<float>(found)) std::memcpy(*value, number, sizeof *number);
  });
}

OrtStatus* get_parameter_type_and_shape(const OrtCheckpointState* checkpoint, const char* name,
                                        OrtTensorTypeAndShapeInfo** out) {
  return guarded([&] {
    require_given(name, "parameter_name");
    const RuntimePointer own = host_runtime();
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
    require_given(name, "parameter_name");
    require_given(value, "parameter");
    const RuntimePointer own = host_runtime();
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
    require_given(name, "parameter_name");
    const RuntimePointer own = host_runtime();
    const std::lock_guard<std::recursive_mutex> lock(checkpoint->state->lock);
    const Tensor& tensor = checkpoint->state->require(name);
    OrtValue* made = nullptr;
    const auto create = ONNXTRAIN_CALL(own->api, CreateTensorAsOrtValue);
    own->check(create(allocator, tensor.dims.data(), tensor.dims.size(), tensor.code, &made));
    if (tensor.data.size > 0) std::memcpy(data_of(own, made), tensor.data.data, static_cast<size_t>(tensor.data.size));
    *out = made;
  });
}

}  // namespace onnxtrain::device
