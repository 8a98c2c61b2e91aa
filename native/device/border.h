// What the functions at the border of the library share: no exception crosses it, and every failure is
// a status with a sentence.
#pragma once

#include <new>
#include <string>

#include "errors.h"
#include "files.h"
#include "session.h"

#define ONNXTRAIN_EXPORT extern "C" __attribute__((visibility("default")))

namespace onnxtrain {

struct OrtCheckpointState {
  std::shared_ptr<device::TrainingState> state;
};

struct OrtTrainingSession {
  OrtTrainingSession(const device::RuntimePointer& runtime, const device::Settings& settings,
                     const OrtCheckpointState& checkpoint, device::GraphFiles files)
      : session(runtime, settings, checkpoint.state, std::move(files)) {}
  device::TrainingSession session;
};

}  // namespace onnxtrain

namespace onnxtrain::device {

enum StatusCode : int { kStatusFail = 1, kStatusInvalidArgument = 2, kStatusNotImplemented = 9 };

// Takes the table of the runtime that this process has.
void set_host(const OrtApi* api);
RuntimePointer host_runtime();
OrtStatus* status_of(int code, const char* sentence) noexcept;

// A status can be one that says that there is no runtime to make it.
const char* message_of(const OrtStatus* status);
int code_of(const OrtStatus* status);
void release_status(OrtStatus* status);

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

// Refuses an argument that is NULL.
void require_given(const void* given, const char* name);

// A text in memory that the caller frees with the allocator.
char* copied_text(OrtAllocator* allocator, const std::string& text);

Bytes copied_bytes(const void* data, size_t size);

OrtCheckpointState* new_state(CheckpointContent content);

// ---- the functions of checkpoints in upstream's table ----

OrtStatus* load_checkpoint(const char* path, OrtCheckpointState** out);
OrtStatus* load_checkpoint_from_buffer(const void* buffer, size_t size, OrtCheckpointState** out);
OrtStatus* save_checkpoint(OrtCheckpointState* checkpoint, const char* path, bool with_optimizer);
OrtStatus* add_property(OrtCheckpointState* checkpoint, const char* name, int type, void* value);
OrtStatus* get_property(const OrtCheckpointState* checkpoint, const char* name, OrtAllocator* allocator, int* type,
                        void** value);
OrtStatus* get_parameter_type_and_shape(const OrtCheckpointState* checkpoint, const char* name,
                                        OrtTensorTypeAndShapeInfo** out);
OrtStatus* update_parameter(OrtCheckpointState* checkpoint, const char* name, OrtValue* value);
OrtStatus* get_parameter(const OrtCheckpointState* checkpoint, const char* name, OrtAllocator* allocator,
                         OrtValue** out);

OrtStatus* export_model(OrtTrainingSession* session, const char* path, size_t output_count,
                        const char* const* output_names);

}  // namespace onnxtrain::device
