/* Trains the model of a folder that `onnxtrain.prepare` wrote, with whole steps:
 *
 *     train_c <folder> <inputs: floats> <labels: int64> <samples> <features> <steps> <checkpoint to write>
 *
 * Prints the loss of each step. */
#include <onnxtrain.h>

#include <stdio.h>
#include <stdlib.h>

static const OrtApi* ort;

/* Ends the program with the sentence of a status. */
static void check(OrtStatus* status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\n", ort->GetErrorMessage(status));
  ort->ReleaseStatus(status);
  exit(1);
}

static void* contents(const char* path, size_t size) {
  void* data = malloc(size);
  FILE* file = fopen(path, "rb");
  if (data == NULL || file == NULL || fread(data, 1, size, file) != size) {
    fprintf(stderr, "%s cannot be read, or is too short\n", path);
    exit(1);
  }
  fclose(file);
  return data;
}

int main(int count, char** given) {
  if (count != 8) {
    fprintf(stderr, "train_c <folder> <inputs> <labels> <samples> <features> <steps> <checkpoint to write>\n");
    return 2;
  }
  ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  const OrtTrainingApi* training = onnxtrain_training_api(ort);
  const int64_t shape[] = {atoll(given[4]), atoll(given[5])};
  const size_t input_size = (size_t)(shape[0] * shape[1]) * sizeof(float);
  const size_t label_size = (size_t)shape[0] * sizeof(int64_t);
  float* inputs = contents(given[2], input_size);
  int64_t* labels = contents(given[3], label_size);

  OrtEnv* env = NULL;
  OrtMemoryInfo* memory = NULL;
  OrtCheckpointState* state = NULL;
  OrtTrainingSession* session = NULL;
  OrtValue* batch[2] = {NULL, NULL};
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "train", &env));
  check(onnxtrain_open(env, NULL, given[1], NULL, &state, &session));
  check(training->SetLearningRate(session, 0.05f));
  check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  check(ort->CreateTensorWithDataAsOrtValue(memory, inputs, input_size, shape, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                                            &batch[0]));
  check(ort->CreateTensorWithDataAsOrtValue(memory, labels, label_size, shape, 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
                                            &batch[1]));
  for (int step = 0; step < atoi(given[6]); ++step) {
    OrtValue* loss = NULL;
    float* number = NULL;
    check(onnxtrain_step(session, NULL, 2, (const OrtValue* const*)batch, 1, &loss));
    check(ort->GetTensorMutableData(loss, (void**)&number));
    printf("%.9g\n", (double)*number);
    ort->ReleaseValue(loss);
  }
  check(training->SaveCheckpoint(state, given[7], true));

  ort->ReleaseValue(batch[0]);
  ort->ReleaseValue(batch[1]);
  training->ReleaseTrainingSession(session);
  training->ReleaseCheckpointState(state);
  ort->ReleaseMemoryInfo(memory);
  ort->ReleaseEnv(env);
  free(inputs);
  free(labels);
  return 0;
}
