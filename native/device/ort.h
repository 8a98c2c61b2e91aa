// onnxruntime's C interface, as far as training needs it: the table comes from the host, and nothing
// is linked. An entry keeps its index in every version (runtime/ort_interface.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "element_types.h"
#include "errors.h"
#include "ort_interface.h"

namespace onnxtrain {

struct OrtEnv;
struct OrtSession;
struct OrtRunOptions;
struct OrtIoBinding;
struct OrtMemoryInfo;
struct OrtAllocator;
struct OrtTypeInfo;
struct OrtSequenceTypeInfo;
struct OrtModelMetadata;

#define ONNXTRAIN_ENTRY(index, name, result, ...) \
  constexpr int k##name = index;                  \
  using name##Function = result(__VA_ARGS__);

ONNXTRAIN_ENTRY(7, CreateSession, OrtStatus*, const OrtEnv*, const char*, const OrtSessionOptions*, OrtSession**)
ONNXTRAIN_ENTRY(8, CreateSessionFromArray, OrtStatus*, const OrtEnv*, const void*, size_t, const OrtSessionOptions*,
                OrtSession**)
ONNXTRAIN_ENTRY(9, Run, OrtStatus*, OrtSession*, const OrtRunOptions*, const char* const*, const OrtValue* const*,
                size_t, const char* const*, size_t, OrtValue**)
ONNXTRAIN_ENTRY(10, CreateSessionOptions, OrtStatus*, OrtSessionOptions**)
ONNXTRAIN_ENTRY(12, CloneSessionOptions, OrtStatus*, const OrtSessionOptions*, OrtSessionOptions**)
ONNXTRAIN_ENTRY(17, DisableMemPattern, OrtStatus*, OrtSessionOptions*)
ONNXTRAIN_ENTRY(22, SetSessionLogSeverityLevel, OrtStatus*, OrtSessionOptions*, int)
ONNXTRAIN_ENTRY(23, SetSessionGraphOptimizationLevel, OrtStatus*, OrtSessionOptions*, int)
ONNXTRAIN_ENTRY(24, SetIntraOpNumThreads, OrtStatus*, OrtSessionOptions*, int)
ONNXTRAIN_ENTRY(30, SessionGetInputCount, OrtStatus*, const OrtSession*, size_t*)
ONNXTRAIN_ENTRY(31, SessionGetOutputCount, OrtStatus*, const OrtSession*, size_t*)
ONNXTRAIN_ENTRY(33, SessionGetInputTypeInfo, OrtStatus*, const OrtSession*, size_t, OrtTypeInfo**)
ONNXTRAIN_ENTRY(34, SessionGetOutputTypeInfo, OrtStatus*, const OrtSession*, size_t, OrtTypeInfo**)
ONNXTRAIN_ENTRY(36, SessionGetInputName, OrtStatus*, const OrtSession*, size_t, OrtAllocator*, char**)
ONNXTRAIN_ENTRY(37, SessionGetOutputName, OrtStatus*, const OrtSession*, size_t, OrtAllocator*, char**)
ONNXTRAIN_ENTRY(39, CreateRunOptions, OrtStatus*, OrtRunOptions**)
ONNXTRAIN_ENTRY(48, CreateTensorAsOrtValue, OrtStatus*, OrtAllocator*, const int64_t*, size_t, int, OrtValue**)
ONNXTRAIN_ENTRY(49, CreateTensorWithDataAsOrtValue, OrtStatus*, const OrtMemoryInfo*, void*, size_t, const int64_t*,
                size_t, int, OrtValue**)
ONNXTRAIN_ENTRY(50, IsTensor, OrtStatus*, const OrtValue*, int*)
ONNXTRAIN_ENTRY(55, CastTypeInfoToTensorInfo, OrtStatus*, const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**)
ONNXTRAIN_ENTRY(63, GetSymbolicDimensions, OrtStatus*, const OrtTensorTypeAndShapeInfo*, const char**, size_t)
ONNXTRAIN_ENTRY(69, CreateCpuMemoryInfo, OrtStatus*, int, int, OrtMemoryInfo**)
ONNXTRAIN_ENTRY(78, GetAllocatorWithDefaultOptions, OrtStatus*, OrtAllocator**)
ONNXTRAIN_ENTRY(94, ReleaseMemoryInfo, void, OrtMemoryInfo*)
ONNXTRAIN_ENTRY(95, ReleaseSession, void, OrtSession*)
ONNXTRAIN_ENTRY(96, ReleaseValue, void, OrtValue*)
ONNXTRAIN_ENTRY(97, ReleaseRunOptions, void, OrtRunOptions*)
ONNXTRAIN_ENTRY(98, ReleaseTypeInfo, void, OrtTypeInfo*)
ONNXTRAIN_ENTRY(100, ReleaseSessionOptions, void, OrtSessionOptions*)
ONNXTRAIN_ENTRY(104, CastTypeInfoToSequenceTypeInfo, OrtStatus*, const OrtTypeInfo*, const OrtSequenceTypeInfo**)
ONNXTRAIN_ENTRY(107, GetSequenceElementType, OrtStatus*, const OrtSequenceTypeInfo*, OrtTypeInfo**)
ONNXTRAIN_ENTRY(111, SessionGetModelMetadata, OrtStatus*, const OrtSession*, OrtModelMetadata**)
ONNXTRAIN_ENTRY(116, ModelMetadataLookupCustomMetadataMap, OrtStatus*, const OrtModelMetadata*, OrtAllocator*,
                const char*, char**)
ONNXTRAIN_ENTRY(118, ReleaseModelMetadata, void, OrtModelMetadata*)
ONNXTRAIN_ENTRY(130, AddSessionConfigEntry, OrtStatus*, OrtSessionOptions*, const char*, const char*)
ONNXTRAIN_ENTRY(133, RunWithBinding, OrtStatus*, OrtSession*, const OrtRunOptions*, const OrtIoBinding*)
ONNXTRAIN_ENTRY(134, CreateIoBinding, OrtStatus*, OrtSession*, OrtIoBinding**)
ONNXTRAIN_ENTRY(135, ReleaseIoBinding, void, OrtIoBinding*)
ONNXTRAIN_ENTRY(136, BindInput, OrtStatus*, OrtIoBinding*, const char*, const OrtValue*)
ONNXTRAIN_ENTRY(137, BindOutput, OrtStatus*, OrtIoBinding*, const char*, const OrtValue*)
ONNXTRAIN_ENTRY(138, BindOutputToDevice, OrtStatus*, OrtIoBinding*, const char*, const OrtMemoryInfo*)
ONNXTRAIN_ENTRY(140, GetBoundOutputValues, OrtStatus*, const OrtIoBinding*, OrtAllocator*, OrtValue***, size_t*)
ONNXTRAIN_ENTRY(210, AddExternalInitializers, OrtStatus*, OrtSessionOptions*, const char* const*,
                const OrtValue* const*, size_t)
#undef ONNXTRAIN_ENTRY

}  // namespace onnxtrain

namespace onnxtrain::device {

// The table of onnxruntime's functions, and what all sessions share.
class Runtime {
 public:
  explicit Runtime(const OrtApi* api);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  void check(OrtStatus* status) const;  // raises what onnxruntime reports

  const OrtApi* api;
  OrtMemoryInfo* memory = nullptr;    // of the process
  OrtAllocator* allocator = nullptr;  // onnxruntime's own
};

using RuntimePointer = std::shared_ptr<const Runtime>;

// Objects of onnxruntime that are released with their owner.
template <class T>
using Held = std::shared_ptr<T>;

Held<OrtValue> hold(const RuntimePointer& runtime, OrtValue* value);
Held<OrtSession> hold(const RuntimePointer& runtime, OrtSession* session);
Held<OrtSessionOptions> hold(const RuntimePointer& runtime, OrtSessionOptions* options);
Held<OrtIoBinding> hold(const RuntimePointer& runtime, OrtIoBinding* binding);
Held<OrtRunOptions> hold(const RuntimePointer& runtime, OrtRunOptions* options);

// Gives a value to a caller, who releases it.
OrtValue* released(const Held<OrtValue>& value);

// A tensor of onnxruntime over memory of ours, which has to outlive it.
Held<OrtValue> value_over(const RuntimePointer& runtime, void* data, uint64_t size, int code, const Dims& dims);

// A tensor of onnxruntime with memory of its own.
Held<OrtValue> new_value(const RuntimePointer& runtime, int code, const Dims& dims);

// Element type and shape of a tensor; the type 0 of what is no tensor.
struct ValueShape {
  int code = 0;
  Dims dims;
};
ValueShape shape_of(const RuntimePointer& runtime, const OrtValue* value);

uint8_t* data_of(const RuntimePointer& runtime, const OrtValue* value);

}  // namespace onnxtrain::device
