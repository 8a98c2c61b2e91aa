/* Training of ONNX models in plain C, on a stock onnxruntime (1.19 and later): a small interface that
 * other languages bind easily. It needs no other header. docs/c-api.md describes it.
 *
 * Functions that return an OrtStatus* return NULL when they succeed. A status is one of onnxruntime's own;
 * onnxtrain_message reads it, and onnxtrain_release_status frees it. Texts are UTF-8.
 *
 * What is here stays as it is: functions and enumerators are only ever added, as are fields at the end of
 * onnxtrain_options, which begins with its size. onnxtrain_tensor never changes. */
#ifndef ONNXTRAIN_H_
#define ONNXTRAIN_H_

#include <stddef.h>
#include <stdint.h>

#ifndef ONNXTRAIN_API
#define ONNXTRAIN_API
#endif

/* Grows by one whenever something is added. */
#define ONNXTRAIN_API_VERSION 1
#define ONNXTRAIN_MAX_RANK 8

#ifdef __cplusplus
extern "C" {
#endif

typedef struct OrtApi OrtApi;
typedef struct OrtApiBase OrtApiBase;
typedef struct OrtEnv OrtEnv;
typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCheckpointState OrtCheckpointState;
typedef struct OrtTrainingSession OrtTrainingSession;

/* ---- the library, and errors ---- */

/* The version as text ("0.1.0"), and the ONNXTRAIN_API_VERSION that the library was built with. */
ONNXTRAIN_API const char* onnxtrain_version(void);
ONNXTRAIN_API uint32_t onnxtrain_api_version(void);

/* Says which onnxruntime to use: pass what its function OrtGetApiBase returns. Call it first. Returns 1, or
 * 0 if that runtime is older than 1.19. */
ONNXTRAIN_API int32_t onnxtrain_attach(const OrtApiBase* base);

/* The sentence of a status, as long as the status is there; "" for NULL. */
ONNXTRAIN_API const char* onnxtrain_message(const OrtStatus* status);
/* The code of a status, an OrtErrorCode: 0 for NULL, 2 for a wrong argument, 9 for what is not there. */
ONNXTRAIN_API int32_t onnxtrain_code(const OrtStatus* status);
ONNXTRAIN_API void onnxtrain_release_status(OrtStatus* status);

/* ---- sessions ---- */

/* How to open a session. Set it to zeros, then `size`; what is zero has its default. */
typedef struct onnxtrain_options {
  size_t size;                              /* sizeof(onnxtrain_options) */
  const OrtEnv* env;                        /* onnxruntime's environment; NULL: the library makes one */
  const OrtSessionOptions* session_options; /* NULL: settings that are good for training */
  int32_t threads;                          /* 0: as many as onnxruntime chooses */
  int32_t without_kernels;                  /* not 0: native kernels do not run */
  /* The bytes that onnxruntime may take for running graphs; a step that needs more fails. onnxruntime has
   * one limit for a process: all sessions that have a limit share it. 0: none */
  uint64_t memory_limit;
} onnxtrain_options;

/* Opens a folder of artifacts: all of its graphs, and its checkpoint, or another one, with which training
 * goes on. `checkpoint` and `options` may be NULL. */
ONNXTRAIN_API OrtStatus* onnxtrain_open(const char* folder, const char* checkpoint, const onnxtrain_options* options,
                                        OrtTrainingSession** session);
ONNXTRAIN_API void onnxtrain_close(OrtTrainingSession* session);

/* What has names. */
typedef enum onnxtrain_kind {
  ONNXTRAIN_INPUTS = 0,  /* of a training step */
  ONNXTRAIN_OUTPUTS = 1, /* the loss is the first */
  ONNXTRAIN_EVAL_INPUTS = 2,
  ONNXTRAIN_EVAL_OUTPUTS = 3,
  ONNXTRAIN_PARAMETERS = 4, /* in the order of onnxtrain_get_parameters */
  ONNXTRAIN_TRAINABLE = 5   /* those that train */
} onnxtrain_kind;

ONNXTRAIN_API OrtStatus* onnxtrain_count(const OrtTrainingSession* session, int32_t kind, size_t* count);
/* The name lives as long as the session. */
ONNXTRAIN_API OrtStatus* onnxtrain_name(const OrtTrainingSession* session, int32_t kind, size_t index,
                                        const char** name);

/* The bytes of all tensors that this library holds in the process (parameters, gradients, states of
 * optimizers), and the most that there were. onnxruntime's own memory comes on top. */
ONNXTRAIN_API void onnxtrain_memory(uint64_t* held, uint64_t* most);

/* ---- steps ---- */

/* A tensor: one of onnxruntime's (`value`), or elements in memory (`data`). */
typedef struct onnxtrain_tensor {
  const char* name; /* of the input, output or parameter; NULL: the one at this position */
  OrtValue* value;  /* NULL: the elements are at `data` */
  void* data;       /* the elements, row by row */
  uint64_t size;    /* the bytes at `data` */
  int32_t type;     /* ONNX's number of the element type: 1 is float, 6 int32, 7 int64 */
  uint32_t rank;    /* how many dimensions there are */
  int64_t dims[ONNXTRAIN_MAX_RANK];
} onnxtrain_tensor;

/* The three steps take all inputs of the graph, and return the outputs that are asked for. Set an output to
 * zeros, then either `data` and `size`, where its elements are written to, or neither: `value` becomes a tensor
 * that onnxtrain_release_value frees. Its type and shape are filled in.
 *
 * A whole step in one run: forward, backward and update. Gradients that onnxtrain_train_step has
 * accumulated are neither used nor lost. */
ONNXTRAIN_API OrtStatus* onnxtrain_step(OrtTrainingSession* session, const onnxtrain_tensor* inputs, size_t input_count,
                                        onnxtrain_tensor* outputs, size_t output_count);
/* Forward and backward: gradients are added to those since onnxtrain_lazy_reset_grad. */
ONNXTRAIN_API OrtStatus* onnxtrain_train_step(OrtTrainingSession* session, const onnxtrain_tensor* inputs,
                                              size_t input_count, onnxtrain_tensor* outputs, size_t output_count);
/* The evaluation graph, which changes nothing. */
ONNXTRAIN_API OrtStatus* onnxtrain_eval_step(OrtTrainingSession* session, const onnxtrain_tensor* inputs,
                                             size_t input_count, onnxtrain_tensor* outputs, size_t output_count);
/* Updates the parameters from the accumulated gradients. */
ONNXTRAIN_API OrtStatus* onnxtrain_optimizer_step(OrtTrainingSession* session);
/* Lets the next onnxtrain_train_step begin from gradients of zero. */
ONNXTRAIN_API OrtStatus* onnxtrain_lazy_reset_grad(OrtTrainingSession* session);
/* How many updates there were, and how many were left out because a batch was not finite. */
ONNXTRAIN_API OrtStatus* onnxtrain_step_count(const OrtTrainingSession* session, int64_t* done, int64_t* skipped);
ONNXTRAIN_API void onnxtrain_release_value(OrtValue* value);

/* ---- learning rate, random numbers ---- */

ONNXTRAIN_API OrtStatus* onnxtrain_set_learning_rate(OrtTrainingSession* session, float rate);
ONNXTRAIN_API OrtStatus* onnxtrain_get_learning_rate(const OrtTrainingSession* session, float* rate);
/* The rate rises from 0 to `rate` during the warm-up, then falls to 0. */
ONNXTRAIN_API OrtStatus* onnxtrain_register_linear_lr_scheduler(OrtTrainingSession* session, int64_t warmup_steps,
                                                                int64_t total_steps, float rate);
ONNXTRAIN_API OrtStatus* onnxtrain_scheduler_step(OrtTrainingSession* session);
/* Determines everything that is random in training from here on, in this process. */
ONNXTRAIN_API void onnxtrain_set_seed(int64_t seed);

/* ---- parameters and properties ---- */

/* A copy of a parameter: into `data`, or a new `value`, as with outputs. Only `name` counts, not the position. */
ONNXTRAIN_API OrtStatus* onnxtrain_get_parameter(const OrtTrainingSession* session, onnxtrain_tensor* parameter);
ONNXTRAIN_API OrtStatus* onnxtrain_update_parameter(OrtTrainingSession* session, const onnxtrain_tensor* parameter);
/* All parameters one after another, or those that train: how many floats there are, and the floats. */
ONNXTRAIN_API OrtStatus* onnxtrain_parameters_size(const OrtTrainingSession* session, int32_t trainable_only,
                                                   size_t* count);
ONNXTRAIN_API OrtStatus* onnxtrain_get_parameters(const OrtTrainingSession* session, int32_t trainable_only,
                                                  float* buffer, size_t count);
ONNXTRAIN_API OrtStatus* onnxtrain_set_parameters(OrtTrainingSession* session, int32_t trainable_only,
                                                  const float* buffer, size_t count);

/* The type of a property, and what `value` points to. */
typedef enum onnxtrain_property {
  ONNXTRAIN_INT = 0,   /* int64_t */
  ONNXTRAIN_FLOAT = 1, /* float */
  ONNXTRAIN_TEXT = 2   /* char: a text that ends with a zero */
} onnxtrain_property;

/* Values that are saved in checkpoints, by name. */
ONNXTRAIN_API OrtStatus* onnxtrain_set_property(OrtTrainingSession* session, const char* name, int32_t type,
                                                const void* value);
/* `size` is that of the memory at `value`, and becomes that of the property, which is written if it fits:
 * ask for the size alone with `value` NULL. */
ONNXTRAIN_API OrtStatus* onnxtrain_get_property(const OrtTrainingSession* session, const char* name, int32_t* type,
                                                void* value, size_t* size);

/* ---- files ---- */

/* Replaces a checkpoint atomically; training goes on from it when it is given to onnxtrain_open, in any
 * language. */
ONNXTRAIN_API OrtStatus* onnxtrain_save_checkpoint(const OrtTrainingSession* session, const char* path,
                                                   int32_t with_optimizer);
/* Writes the trained model for inference, with these outputs. */
ONNXTRAIN_API OrtStatus* onnxtrain_export_model(OrtTrainingSession* session, const char* path,
                                                const char* const* output_names, size_t output_count);

/* Where low-rank factors train (LoRA): writes what trains as it is now to an .onnx_adapter file, which
 * onnxruntime's own functions for adapters load. The file is replaced atomically. */
ONNXTRAIN_API OrtStatus* onnxtrain_export_adapter(OrtTrainingSession* session, const char* path);
/* Goes on from an .onnx_adapter file of the same base, layers and rank, or switches to it. Accumulated
 * gradients are dropped, and the optimizer starts over; the learning rate stays. A file that does not fit
 * changes nothing. */
ONNXTRAIN_API OrtStatus* onnxtrain_load_adapter(OrtTrainingSession* session, const char* path);

/* ---- beside ONNX Runtime's own training interface ---- */

/* The state of a session, for the functions of onnxruntime_training_c_api.h, which take the session itself
 * too. Release it with ReleaseCheckpointState. */
ONNXTRAIN_API OrtStatus* onnxtrain_state(OrtTrainingSession* session, OrtCheckpointState** state);

/* A copy of the first `size` bytes of the runtime's table, in which GetTrainingApi returns that of
 * training; NULL if that entry is not among them. It lives as long as the process. */
ONNXTRAIN_API const OrtApi* onnxtrain_install_table(const OrtApi* api, size_t size);

#ifdef ORT_API_VERSION
/* The same, with as many entries as the program was compiled for. Hand it to whoever looks for
 * OrtApi::GetTrainingApi. */
static inline const OrtApi* onnxtrain_install(const OrtApi* api) {
  return onnxtrain_install_table(api, sizeof(OrtApi));
}
#endif

#ifdef __cplusplus
}
#endif

#endif /* ONNXTRAIN_H_ */
