/* What libonnxtrain has beyond ONNX Runtime's training interface (onnxruntime_training_c_api.h). */
#ifndef ONNXTRAIN_H_
#define ONNXTRAIN_H_

#include "onnxruntime_training_c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A copy of the first `size` bytes of the runtime's table, in which GetTrainingApi returns that of
 * training; NULL if that entry is not among them. It lives as long as the process. */
const OrtApi* onnxtrain_install_table(const OrtApi* api, size_t size);

/* The same, with as many entries as the program was compiled for. Hand it to whoever looks for
 * OrtApi::GetTrainingApi. */
static inline const OrtApi* onnxtrain_install(const OrtApi* api) {
  return onnxtrain_install_table(api, sizeof(OrtApi));
}

/* Opens a folder of artifacts: all of its graphs, and its checkpoint, or the one that is given instead.
 * Without options (NULL), the session has settings that are good for training. Release the session
 * before the state. */
OrtStatus* onnxtrain_open(const OrtEnv* env, const OrtSessionOptions* options, const char* folder,
                          const char* checkpoint, OrtCheckpointState** state, OrtTrainingSession** session);

/* Takes a whole step in one run: forward, backward and update. Gradients that TrainStep has
 * accumulated are neither used nor lost. Inputs and outputs are those of TrainStep. */
OrtStatus* onnxtrain_step(OrtTrainingSession* session, const OrtRunOptions* run_options, size_t inputs_len,
                          const OrtValue* const* inputs, size_t outputs_len, OrtValue** outputs);

#ifdef __cplusplus
}
#endif

#endif /* ONNXTRAIN_H_ */
