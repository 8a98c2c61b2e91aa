// The part of onnxruntime's C interface that kernels use, declared by us so that no header of
// onnxruntime is needed to build. `OrtApi` is a table of function pointers that only ever grows at
// its end: an entry keeps its index in every version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain {

// The lowest version that has every entry used here: the library loads into 1.19 and all later.
constexpr uint32_t kOrtVersion = 19;

struct OrtCustomOp;
struct OrtStatus;
struct OrtValue;
struct OrtAllocator;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;

enum OrtErrorCode : int { kFail = 1, kInvalidArgument = 2 };

enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kFloat16 = 10,
  kDouble = 11,
  kBFloat16 = 16,
};

// Bytes of an element.
inline int64_t size_of_type(int type) {
  switch (type) {
    case 2:
    case 3:
    case 9:
      return 1;  // uint8, int8, bool
    case 4:
    case 5:
    case 10:
    case 16:
      return 2;  // uint16, int16, float16, bfloat16
    case 1:
    case 6:
    case 12:
      return 4;  // float, int32, uint32
    case 7:
    case 11:
    case 13:
      return 8;  // int64, double, uint64
    default:
      return 0;  // strings and what no kernel reads
  }
}

enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

struct OrtApi {
  void* entries[512];  // as many as the runtime has; those beyond are not touched
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// Calls entry `index` of the table as a function of type F.
template <class F>
F* entry(const OrtApi* api, int index) {
  return reinterpret_cast<F*>(api->entries[index]);
}

// Each wrapper has the name and the arguments of the entry, behind the table.
#define ONNXTRAIN_ENTRY(index, name, result, ...) \
  constexpr int k##name = index;                  \
  using name##Function = result(__VA_ARGS__);

ONNXTRAIN_ENTRY(0, CreateStatus, OrtStatus*, OrtErrorCode, const char*)
ONNXTRAIN_ENTRY(2, GetErrorMessage, const char*, const OrtStatus*)
ONNXTRAIN_ENTRY(26, CreateCustomOpDomain, OrtStatus*, const char*, OrtCustomOpDomain**)
ONNXTRAIN_ENTRY(27, CustomOpDomain_Add, OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*)
ONNXTRAIN_ENTRY(28, AddCustomOpDomain, OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*)
ONNXTRAIN_ENTRY(51, GetTensorMutableData, OrtStatus*, OrtValue*, void**)
ONNXTRAIN_ENTRY(60, GetTensorElementType, OrtStatus*, const OrtTensorTypeAndShapeInfo*, int*)
ONNXTRAIN_ENTRY(61, GetDimensionsCount, OrtStatus*, const OrtTensorTypeAndShapeInfo*, size_t*)
ONNXTRAIN_ENTRY(62, GetDimensions, OrtStatus*, const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)
ONNXTRAIN_ENTRY(65, GetTensorTypeAndShape, OrtStatus*, const OrtValue*, OrtTensorTypeAndShapeInfo**)
ONNXTRAIN_ENTRY(75, AllocatorAlloc, OrtStatus*, OrtAllocator*, size_t, void**)
ONNXTRAIN_ENTRY(76, AllocatorFree, OrtStatus*, OrtAllocator*, void*)
ONNXTRAIN_ENTRY(85, KernelInfoGetAttribute_float, OrtStatus*, const OrtKernelInfo*, const char*, float*)
ONNXTRAIN_ENTRY(86, KernelInfoGetAttribute_int64, OrtStatus*, const OrtKernelInfo*, const char*, int64_t*)
ONNXTRAIN_ENTRY(87, KernelInfoGetAttribute_string, OrtStatus*, const OrtKernelInfo*, const char*, char*, size_t*)
ONNXTRAIN_ENTRY(88, KernelContext_GetInputCount, OrtStatus*, const OrtKernelContext*, size_t*)
ONNXTRAIN_ENTRY(89, KernelContext_GetOutputCount, OrtStatus*, const OrtKernelContext*, size_t*)
ONNXTRAIN_ENTRY(90, KernelContext_GetInput, OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**)
ONNXTRAIN_ENTRY(91, KernelContext_GetOutput, OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)
ONNXTRAIN_ENTRY(93, ReleaseStatus, void, OrtStatus*)
ONNXTRAIN_ENTRY(99, ReleaseTensorTypeAndShapeInfo, void, OrtTensorTypeAndShapeInfo*)
ONNXTRAIN_ENTRY(132, ReleaseAllocator, void, OrtAllocator*)
ONNXTRAIN_ENTRY(163, KernelInfoGetAttributeArray_int64, OrtStatus*, const OrtKernelInfo*, const char*, int64_t*,
                size_t*)
ONNXTRAIN_ENTRY(249, KernelInfoGetConstantInput_tensor, OrtStatus*, const OrtKernelInfo*, size_t, int*,
                const OrtValue**)
ONNXTRAIN_ENTRY(274, KernelContext_ParallelFor, OrtStatus*, const OrtKernelContext*, void (*)(void*, size_t), size_t,
                size_t, void*)
ONNXTRAIN_ENTRY(278, KernelInfoGetAllocator, OrtStatus*, const OrtKernelInfo*, int, OrtAllocator**)
#undef ONNXTRAIN_ENTRY

#define ONNXTRAIN_CALL(api, name) (::onnxtrain::entry<::onnxtrain::name##Function>(api, ::onnxtrain::k##name))

// The description of a custom operator, as onnxruntime reads it. 208 bytes on 64-bit systems.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // namespace onnxtrain
