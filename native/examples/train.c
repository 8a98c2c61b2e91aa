/* Trains the model of a folder that `onnxtrain.prepare` wrote, with whole steps of 32 samples:
 *
 *     train_c <folder> <inputs: floats> <labels: int64> <samples> <steps> <checkpoint> [<model> <output>]
 *
 * Prints the loss of each step, and saves the checkpoint; if that is there already, training goes on from it.
 * The trained model is written with one output, if it is asked for. */
#include <onnxtrain.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 32, FLOAT = 1, INT64 = 7 };

/* The one function of onnxruntime that is linked. */
const OrtApiBase* OrtGetApiBase(void);

/* Ends the program with the sentence of a status. */
static void check(OrtStatus* status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\n", onnxtrain_message(status));
  onnxtrain_release_status(status);
  exit(1);
}

static char* contents(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  char* data = NULL;
  if (file != NULL && fseek(file, 0, SEEK_END) == 0) {
    *size = (size_t)ftell(file);
    rewind(file);
    data = malloc(*size);
    if (data != NULL && fread(data, 1, *size, file) != *size) data = NULL;
    fclose(file);
  }
  if (data == NULL) {
    fprintf(stderr, "%s cannot be read\n", path);
    exit(1);
  }
  return data;
}

static int exists(const char* path) {
  FILE* file = fopen(path, "rb");
  if (file != NULL) fclose(file);
  return file != NULL;
}

int main(int count, char** given) {
  if (count != 7 && count != 9) {
    fprintf(stderr, "train_c <folder> <inputs> <labels> <samples> <steps> <checkpoint> [<model> <output>]\n");
    return 2;
  }
  size_t input_size = 0, label_size = 0;
  char* inputs = contents(given[2], &input_size);
  char* labels = contents(given[3], &label_size);
  const size_t row = input_size / (size_t)atoll(given[4]);
  const char* checkpoint = given[6];
  const int64_t batches = atoll(given[4]) / BATCH, steps = atoll(given[5]);

  if (!onnxtrain_attach(OrtGetApiBase())) {
    fprintf(stderr, "onnxruntime 1.19 or later is needed\n");
    return 1;
  }
  OrtTrainingSession* session = NULL;
  check(onnxtrain_open(given[1], exists(checkpoint) ? checkpoint : NULL, NULL, &session));
  check(onnxtrain_set_learning_rate(session, 0.01f));

  int64_t done = 0;
  check(onnxtrain_step_count(session, &done, NULL));
  for (int64_t step = done; step < done + steps; ++step) {
    const size_t first = (size_t)(step % batches) * BATCH;
    const onnxtrain_tensor batch[] = {
        {NULL, NULL, inputs + first * row, BATCH * row, FLOAT, 2, {BATCH, (int64_t)(row / sizeof(float))}},
        {NULL, NULL, labels + first * sizeof(int64_t), BATCH * sizeof(int64_t), INT64, 1, {BATCH}},
    };
    float loss = 0;
    onnxtrain_tensor result = {0};
    result.data = &loss;
    result.size = sizeof loss;
    check(onnxtrain_step(session, batch, 2, &result, 1));
    printf("%.9g\n", (double)loss);
  }
  check(onnxtrain_save_checkpoint(session, checkpoint, 1));
  if (count == 9) check(onnxtrain_export_model(session, given[7], (const char* const*)&given[8], 1));

  onnxtrain_close(session);
  free(inputs);
  free(labels);
  return 0;
}
