/* Training in C, on a stock onnxruntime: the names and the binary layout of ONNX Runtime's training
 * interface (1.19), provided by libonnxtrain. Use it together with onnxruntime's own headers.
 *
 * The order of the entries is an interface that programs were compiled against: it never changes. */
#ifndef ONNXTRAIN_TRAINING_C_API_H_
#define ONNXTRAIN_TRAINING_C_API_H_

#include <stdbool.h>

#include "onnxruntime_c_api.h"

ORT_RUNTIME_CLASS(TrainingSession);
ORT_RUNTIME_CLASS(CheckpointState);

/* The type of a property of a checkpoint, and what its `void*` points to. */
typedef enum OrtPropertyType {
  OrtIntProperty = 0,   /* int64_t */
  OrtFloatProperty = 1, /* float */
  OrtStringProperty = 2 /* char: a text that ends with a zero */
} OrtPropertyType;

struct OrtTrainingApi {
  /* Checkpoints. The state has to be there as long as a session of it is. */
  ORT_API2_STATUS(LoadCheckpoint, _In_ const ORTCHAR_T* checkpoint_path,
                  _Outptr_ OrtCheckpointState** checkpoint_state);
  ORT_API2_STATUS(SaveCheckpoint, _In_ OrtCheckpointState* checkpoint_state, _In_ const ORTCHAR_T* checkpoint_path,
                  const bool include_optimizer_state);

  /* Sessions. The evaluation and the optimizer model may be left out: NULL. */
  ORT_API2_STATUS(CreateTrainingSession, _In_ const OrtEnv* env, _In_ const OrtSessionOptions* options,
                  _Inout_ OrtCheckpointState* checkpoint_state, _In_ const ORTCHAR_T* train_model_path,
                  _In_ const ORTCHAR_T* eval_model_path, _In_ const ORTCHAR_T* optimizer_model_path,
                  _Outptr_result_maybenull_ OrtTrainingSession** out);
  ORT_API2_STATUS(CreateTrainingSessionFromBuffer, _In_ const OrtEnv* env, _In_ const OrtSessionOptions* options,
                  _Inout_ OrtCheckpointState* checkpoint_state, _In_ const void* train_model_data,
                  size_t train_data_length, _In_ const void* eval_model_data, size_t eval_data_length,
                  _In_ const void* optim_model_data, size_t optim_data_length,
                  _Outptr_result_maybenull_ OrtTrainingSession** out);

  /* Names of outputs are freed with the allocator. */
  ORT_API2_STATUS(TrainingSessionGetTrainingModelOutputCount, _In_ const OrtTrainingSession* sess, _Out_ size_t* out);
  ORT_API2_STATUS(TrainingSessionGetEvalModelOutputCount, _In_ const OrtTrainingSession* sess, _Out_ size_t* out);
  ORT_API2_STATUS(TrainingSessionGetTrainingModelOutputName, _In_ const OrtTrainingSession* sess, size_t index,
                  _Inout_ OrtAllocator* allocator, _Outptr_ char** output);
  ORT_API2_STATUS(TrainingSessionGetEvalModelOutputName, _In_ const OrtTrainingSession* sess, size_t index,
                  _Inout_ OrtAllocator* allocator, _Outptr_ char** output);

  /* Steps. An output that is NULL is allocated, and released by the caller. */
  ORT_API2_STATUS(LazyResetGrad, _Inout_ OrtTrainingSession* session);
  ORT_API2_STATUS(TrainStep, _Inout_ OrtTrainingSession* sess, _In_opt_ const OrtRunOptions* run_options,
                  _In_ size_t inputs_len, _In_reads_(inputs_len) const OrtValue* const* inputs, _In_ size_t outputs_len,
                  _Inout_updates_all_(outputs_len) OrtValue** outputs);
  ORT_API2_STATUS(EvalStep, _In_ const OrtTrainingSession* sess, _In_opt_ const OrtRunOptions* run_options,
                  _In_ size_t inputs_len, _In_reads_(inputs_len) const OrtValue* const* inputs, _In_ size_t outputs_len,
                  _Inout_updates_all_(outputs_len) OrtValue** outputs);

  /* The optimizer. */
  ORT_API2_STATUS(SetLearningRate, _Inout_ OrtTrainingSession* sess, _In_ float learning_rate);
  ORT_API2_STATUS(GetLearningRate, _Inout_ OrtTrainingSession* sess, _Out_ float* learning_rate);
  ORT_API2_STATUS(OptimizerStep, _Inout_ OrtTrainingSession* sess, _In_opt_ const OrtRunOptions* run_options);
  ORT_API2_STATUS(RegisterLinearLRScheduler, _Inout_ OrtTrainingSession* sess, _In_ const int64_t warmup_step_count,
                  _In_ const int64_t total_step_count, _In_ const float initial_lr);
  ORT_API2_STATUS(SchedulerStep, _Inout_ OrtTrainingSession* sess);

  /* All parameters in one tensor of floats. */
  ORT_API2_STATUS(GetParametersSize, _Inout_ OrtTrainingSession* sess, _Out_ size_t* out, bool trainable_only);
  ORT_API2_STATUS(CopyParametersToBuffer, _Inout_ OrtTrainingSession* sess, _Inout_ OrtValue* parameters_buffer,
                  bool trainable_only);
  ORT_API2_STATUS(CopyBufferToParameters, _Inout_ OrtTrainingSession* sess, _In_ const OrtValue* parameters_buffer,
                  bool trainable_only);

  ORT_CLASS_RELEASE(TrainingSession);
  ORT_CLASS_RELEASE(CheckpointState);

  ORT_API2_STATUS(ExportModelForInferencing, _Inout_ OrtTrainingSession* sess,
                  _In_ const ORTCHAR_T* inference_model_path, size_t graph_outputs_len,
                  _In_reads_(graph_outputs_len) const char* const* graph_output_names);

  ORT_API2_STATUS(SetSeed, _In_ const int64_t seed);

  /* Names of inputs. */
  ORT_API2_STATUS(TrainingSessionGetTrainingModelInputCount, _In_ const OrtTrainingSession* sess, _Out_ size_t* out);
  ORT_API2_STATUS(TrainingSessionGetEvalModelInputCount, _In_ const OrtTrainingSession* sess, _Out_ size_t* out);
  ORT_API2_STATUS(TrainingSessionGetTrainingModelInputName, _In_ const OrtTrainingSession* sess, size_t index,
                  _In_ OrtAllocator* allocator, _Outptr_ char** output);
  ORT_API2_STATUS(TrainingSessionGetEvalModelInputName, _In_ const OrtTrainingSession* sess, size_t index,
                  _In_ OrtAllocator* allocator, _Outptr_ char** output);

  /* Properties of a checkpoint; a value that is returned is freed with the allocator. */
  ORT_API2_STATUS(AddProperty, _Inout_ OrtCheckpointState* checkpoint_state, _In_ const char* property_name,
                  _In_ enum OrtPropertyType property_type, _In_ void* property_value);
  ORT_API2_STATUS(GetProperty, _In_ const OrtCheckpointState* checkpoint_state, _In_ const char* property_name,
                  _Inout_ OrtAllocator* allocator, _Out_ enum OrtPropertyType* property_type,
                  _Outptr_ void** property_value);

  ORT_API2_STATUS(LoadCheckpointFromBuffer, _In_ const void* checkpoint_buffer, _In_ const size_t num_bytes,
                  _Outptr_ OrtCheckpointState** checkpoint_state);

  /* Single parameters. A tensor that is returned is a copy, and released by the caller. */
  ORT_API2_STATUS(GetParameterTypeAndShape, _In_ const OrtCheckpointState* checkpoint_state,
                  _In_ const char* parameter_name, _Outptr_ OrtTensorTypeAndShapeInfo** parameter_type_and_shape);
  ORT_API2_STATUS(UpdateParameter, _Inout_ OrtCheckpointState* checkpoint_state, _In_ const char* parameter_name,
                  _In_ OrtValue* parameter);
  ORT_API2_STATUS(GetParameter, _In_ const OrtCheckpointState* checkpoint_state, _In_ const char* parameter_name,
                  _Inout_ OrtAllocator* allocator, _Outptr_ OrtValue** parameter);
};

typedef struct OrtTrainingApi OrtTrainingApi;

#ifdef __cplusplus
extern "C" {
#endif

/* The table of training functions, on the runtime that `api` is of. It lives as long as the process. */
const OrtTrainingApi* onnxtrain_training_api(const OrtApi* api);

#ifdef __cplusplus
}
#endif

#endif /* ONNXTRAIN_TRAINING_C_API_H_ */
