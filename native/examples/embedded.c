/* Training on a small board: one thread, a bound for the memory, and what it takes told. Everything is linked
 * statically but onnxruntime.
 *
 *     embedded <folder> <steps> <bytes of memory for onnxruntime> <checkpoint>
 *
 * The model has 8 inputs and 3 classes; the samples are made here, where a board would read a sensor. */
#include <onnxtrain.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 16, INPUTS = 8, CLASSES = 3, FLOAT = 1, INT64 = 7 };

const OrtApiBase* OrtGetApiBase(void);

static float inputs[BATCH][INPUTS];
static int64_t labels[BATCH];

/* Numbers between -1 and 1; the class is the largest of the first three. */
static void read_sensor(void) {
  static uint32_t random = 1;
  for (int i = 0; i < BATCH; ++i) {
    for (int k = 0; k < INPUTS; ++k) {
      random = random * 1664525u + 1013904223u;
      inputs[i][k] = (float)(random >> 8) / (1 << 23) - 1;
    }
    labels[i] = 0;
    for (int k = 1; k < CLASSES; ++k) {
      if (inputs[i][k] > inputs[i][labels[i]]) labels[i] = k;
    }
  }
}

static int report(OrtStatus* status) {
  fprintf(stderr, "%s\n", onnxtrain_message(status));
  onnxtrain_release_status(status);
  return 1;
}

int main(int count, char** given) {
  if (count != 5 || !onnxtrain_attach(OrtGetApiBase())) return 2;
  onnxtrain_options options = {0};
  options.size = sizeof options;
  options.threads = 1;
  options.memory_limit = (uint64_t)atoll(given[3]);
  OrtTrainingSession* session = NULL;
  OrtStatus* status = onnxtrain_open(given[1], NULL, &options, &session);
  if (status != NULL) return report(status);

  const onnxtrain_tensor batch[] = {
      {NULL, NULL, inputs, sizeof inputs, FLOAT, 2, {BATCH, INPUTS}},
      {NULL, NULL, labels, sizeof labels, INT64, 1, {BATCH}},
  };
  float loss = 0;
  onnxtrain_tensor result = {0};
  result.data = &loss;
  result.size = sizeof loss;
  for (int step = 0; step < atoi(given[2]) && status == NULL; ++step) {
    read_sensor();
    status = onnxtrain_step(session, batch, 2, &result, 1);
    if (status == NULL && step % 100 == 0) printf("step %d: %.4f\n", step, (double)loss);
  }
  if (status == NULL) status = onnxtrain_save_checkpoint(session, given[4], 1);

  uint64_t held = 0, most = 0;
  onnxtrain_memory(&held, &most);
  onnxtrain_close(session);
  if (status != NULL) return report(status);
  printf("loss %.4f, %llu bytes of tensors, %llu at most\n", (double)loss, (unsigned long long)held,
         (unsigned long long)most);
  return 0;
}
