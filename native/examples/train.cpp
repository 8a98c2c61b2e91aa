// Trains the model of a folder that `onnxtrain.prepare` wrote, as programs for ONNX Runtime did:
//
//     train <folder> <inputs: floats> <labels: int64> <samples> <steps> <checkpoint> [<model> <output>]
//
// Prints the loss of each step, and saves the checkpoint; if that is there already, training goes on from it.
// The trained model is written with one output, if it is asked for.
#include <onnxruntime_training_cxx_api.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <variant>
#include <vector>

namespace {

constexpr int64_t kBatch = 32;

template <class T>
std::vector<T> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<T> elements(static_cast<size_t>(file.tellg()) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(elements.data()), static_cast<std::streamsize>(elements.size() * sizeof(T)));
  return elements;
}

void train(const std::vector<std::string>& given) {
  const std::string folder = given[1], checkpoint = given[6];
  std::vector<float> inputs = read<float>(given[2]);
  std::vector<int64_t> labels = read<int64_t>(given[3]);
  const int64_t samples = std::stoll(given[4]);
  const int64_t steps = std::stoll(given[5]);

  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "train");
  Ort::SessionOptions options;
  const bool resumes = std::ifstream(checkpoint).good();
  Ort::CheckpointState state = Ort::CheckpointState::LoadCheckpoint(resumes ? checkpoint : folder + "/checkpoint");
  Ort::TrainingSession session(env, options, state, folder + "/training_model.onnx", folder + "/eval_model.onnx",
                               folder + "/optimizer_model.onnx");
  session.SetLearningRate(0.01f);

  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const int64_t features = static_cast<int64_t>(inputs.size()) / samples, batches = samples / kBatch;
  const int64_t shape[] = {kBatch, features};
  const int64_t done = resumes ? std::get<int64_t>(state.GetProperty("steps")) : 0;
  for (int64_t step = done; step < done + steps; ++step) {
    const int64_t first = step % batches * kBatch;
    float* rows = inputs.data() + first * features;
    std::vector<Ort::Value> batch;
    batch.push_back(Ort::Value::CreateTensor<float>(memory, rows, kBatch * features, shape, 2));
    batch.push_back(Ort::Value::CreateTensor<int64_t>(memory, labels.data() + first, kBatch, shape, 1));
    const std::vector<Ort::Value> results = session.TrainStep(batch);
    std::printf("%.9g\n", static_cast<double>(*results[0].GetTensorData<float>()));
    session.OptimizerStep();
    session.LazyResetGrad();
  }
  state.AddProperty("steps", done + steps);
  Ort::CheckpointState::SaveCheckpoint(state, checkpoint, true);
  if (given.size() > 7) session.ExportModelForInferencing(given[7], {given[8]});
}

}  // namespace

int main(int count, char** given) {
  if (count != 7 && count != 9) {
    std::fprintf(stderr, "train <folder> <inputs> <labels> <samples> <steps> <checkpoint> [<model> <output>]\n");
    return 2;
  }
  try {
    train({given, given + count});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
