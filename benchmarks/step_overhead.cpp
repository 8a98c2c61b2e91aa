// What onnxtrain_step takes beyond onnxruntime's own run of the same graph, both with everything bound:
//
//     step_overhead <folder> <batch>
//
// One thread; microseconds of processor time for a step, the best of many rounds, taken in turns.
#include <onnxruntime_cxx_api.h>
#include <onnxtrain.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

namespace {

constexpr int kRounds = 60, kSteps = 200;

double now() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

void check(OrtStatus* status) {
  if (status == nullptr) return;
  std::fprintf(stderr, "%s\n", onnxtrain_message(status));
  std::exit(1);
}

std::vector<int64_t> sized(std::vector<int64_t> dims, int64_t batch) {
  for (int64_t& dim : dims) dim = dim < 0 ? batch : dim;
  return dims;
}

// A graph with all of its inputs and outputs bound.
struct Bound {
  Ort::Session session;
  Ort::IoBinding binding;
  std::vector<Ort::Value> values;
  Ort::RunOptions options;

  Bound(Ort::Env& env, const std::string& path, const Ort::SessionOptions& settings, int64_t batch)
      : session(env, path.c_str(), settings), binding(session) {
    Ort::AllocatorWithDefaultOptions allocator;
    const auto value = [&](const Ort::TypeInfo& type) -> Ort::Value& {
      const auto info = type.GetTensorTypeAndShapeInfo();
      const std::vector<int64_t> dims = sized(info.GetShape(), batch);
      values.push_back(Ort::Value::CreateTensor(allocator, dims.data(), dims.size(), info.GetElementType()));
      char* bytes = values.back().GetTensorMutableData<char>();
      std::fill(bytes, bytes + values.back().GetTensorSizeInBytes(), 0);
      return values.back();
    };
    for (size_t i = 0; i < session.GetInputCount(); ++i) {
      binding.BindInput(session.GetInputNameAllocated(i, allocator).get(), value(session.GetInputTypeInfo(i)));
    }
    for (size_t i = 0; i < session.GetOutputCount(); ++i) {
      binding.BindOutput(session.GetOutputNameAllocated(i, allocator).get(), value(session.GetOutputTypeInfo(i)));
    }
  }
  void run() { session.Run(options, binding); }
};

}  // namespace

int main(int count, char** given) {
  if (count != 3 || !onnxtrain_attach(OrtGetApiBase())) return 2;
  const std::string folder = given[1];
  const int64_t batch = std::atoll(given[2]);
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "overhead");
  Ort::SessionOptions settings;
  settings.SetIntraOpNumThreads(1);
  Bound plain(env, folder + "/step_model.onnx", settings, batch);

  OrtTrainingSession* session = nullptr;
  onnxtrain_options options = {};
  options.size = sizeof options;
  options.threads = 1;
  options.without_kernels = 1;
  check(onnxtrain_open(folder.c_str(), nullptr, &options, &session));
  std::vector<float> inputs(static_cast<size_t>(batch) * 8);
  std::vector<int64_t> labels(static_cast<size_t>(batch));
  const onnxtrain_tensor fed[] = {
      {nullptr, nullptr, inputs.data(), inputs.size() * sizeof(float), 1, 2, {batch, 8}},
      {nullptr, nullptr, labels.data(), labels.size() * sizeof(int64_t), 7, 1, {batch}},
  };
  float loss = 0;
  onnxtrain_tensor result = {};
  result.data = &loss;
  double best[2] = {1e9, 1e9};
  for (int round = 0; round < kRounds; ++round) {
    double start = now();
    for (int step = 0; step < kSteps; ++step) plain.run();
    best[0] = std::min(best[0], (now() - start) / kSteps);
    start = now();
    for (int step = 0; step < kSteps; ++step) {
      result.size = sizeof loss;
      check(onnxtrain_step(session, fed, 2, &result, 1));
    }
    best[1] = std::min(best[1], (now() - start) / kSteps);
  }
  onnxtrain_close(session);
  std::printf("onnxruntime %.1f us, onnxtrain_step %.1f us: %.1f us more\n", best[0], best[1], best[1] - best[0]);
  return 0;
}
