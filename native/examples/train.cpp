// Trains the model of a folder that `onnxtrain.prepare` wrote, as programs for ONNX Runtime did:
//
//     train <folder> <inputs: floats> <labels: int64> <samples> <steps> <checkpoint to write>
//
// Prints the loss of each step.
#include <onnxruntime_training_cxx_api.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace {

template <class T>
std::vector<T> read(const char* path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<T> elements(static_cast<size_t>(file.tellg()) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(elements.data()), static_cast<std::streamsize>(elements.size() * sizeof(T)));
  return elements;
}

void train(char** given) {
  const std::string folder = given[1];
  std::vector<float> inputs = read<float>(given[2]);
  std::vector<int64_t> labels = read<int64_t>(given[3]);
  const int64_t samples = std::stoll(given[4]);
  const int64_t steps = std::stoll(given[5]);

  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "train");
  Ort::SessionOptions options;
  Ort::CheckpointState state = Ort::CheckpointState::LoadCheckpoint(folder + "/checkpoint");
  Ort::TrainingSession session(env, options, state, folder + "/training_model.onnx", folder + "/eval_model.onnx",
                               folder + "/optimizer_model.onnx");
  session.RegisterLinearLRScheduler(0, steps, 0.05f);

  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const int64_t shape[] = {samples, static_cast<int64_t>(inputs.size()) / samples};
  std::vector<Ort::Value> batch;
  batch.push_back(Ort::Value::CreateTensor<float>(memory, inputs.data(), inputs.size(), shape, 2));
  batch.push_back(Ort::Value::CreateTensor<int64_t>(memory, labels.data(), labels.size(), shape, 1));
  for (int64_t step = 0; step < steps; ++step) {
    const std::vector<Ort::Value> results = session.TrainStep(batch);
    std::printf("%.9g\n", static_cast<double>(*results[0].GetTensorData<float>()));
    session.OptimizerStep();
    session.SchedulerStep();
    session.LazyResetGrad();
  }
  state.AddProperty("steps", steps);
  Ort::CheckpointState::SaveCheckpoint(state, given[6], true);
}

}  // namespace

int main(int count, char** given) {
  if (count != 7) {
    std::fprintf(stderr, "train <folder> <inputs> <labels> <samples> <steps> <checkpoint to write>\n");
    return 2;
  }
  try {
    train(given);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
