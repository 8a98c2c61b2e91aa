// Calls every method of ONNX Runtime's training interface in C++, and so all 33 functions of its table, as
// programs for it did:
//
//     upstream_program <folder> <folder to write to>
//
// The model takes 8 inputs and has 3 classes. Prints the version of onnxruntime.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_training_cxx_api.h>
#include <onnxtrain.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Newer headers ask for newer runtimes, unless a program says which it needs.
constexpr uint32_t kVersion = 19;
constexpr size_t kEntries = 280;  // that 1.19 has
constexpr int64_t kBatch = 16, kInputs = 8;

#define REQUIRE(condition) \
  if (!(condition)) throw std::runtime_error("line " + std::to_string(__LINE__) + ": " #condition)

std::vector<uint8_t> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Inputs, and labels of 32 bits, as upstream's sample programs feed them.
std::vector<Ort::Value> batch_of(std::vector<float>& inputs, std::vector<int32_t>& labels) {
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const int64_t shape[] = {kBatch, kInputs};
  std::vector<Ort::Value> batch;
  batch.emplace_back(Ort::Value::CreateTensor<float>(memory, inputs.data(), inputs.size(), shape, 2));
  batch.emplace_back(Ort::Value::CreateTensor<int32_t>(memory, labels.data(), labels.size(), shape, 1));
  return batch;
}

// Newer headers read constant values through an entry that 1.19 lacks.
float element(Ort::Value value, size_t index) { return value.GetTensorMutableData<float>()[index]; }

float loss_of(std::vector<Ort::Value> results) { return element(std::move(results.at(0)), 0); }

void call_all(const std::string& folder, const std::string& target) {
  std::vector<float> inputs(kBatch * kInputs);
  std::vector<int32_t> labels(kBatch);
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<int32_t>(i % 3);
  const std::vector<Ort::Value> batch = batch_of(inputs, labels);

  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "upstream");
  Ort::SessionOptions options;
  Ort::SetSeed(42);
  auto state = Ort::CheckpointState::LoadCheckpoint(folder + "/checkpoint");
  Ort::TrainingSession session(env, options, state, folder + "/training_model.onnx", folder + "/eval_model.onnx",
                               folder + "/optimizer_model.onnx");
  REQUIRE(session.InputNames(true).size() == 2 && session.InputNames(false).size() == 2);
  REQUIRE(!session.OutputNames(true).empty() && !session.OutputNames(false).empty());

  session.RegisterLinearLRScheduler(1, 40, 0.1f);
  const float before = loss_of(session.EvalStep(batch));
  for (int step = 0; step < 20; ++step) {
    session.TrainStep(batch);
    session.OptimizerStep();
    session.SchedulerStep();
    session.LazyResetGrad();
  }
  const float after = loss_of(session.EvalStep(batch));
  REQUIRE(after < before);
  session.SetLearningRate(0.25f);
  REQUIRE(session.GetLearningRate() == 0.25f);

  state.AddProperty("epoch", int64_t{3});
  state.AddProperty("score", 0.5f);
  state.AddProperty("name", std::string("digits"));
  REQUIRE(std::get<int64_t>(state.GetProperty("epoch")) == 3);
  REQUIRE(std::get<float>(state.GetProperty("score")) == 0.5f);
  REQUIRE(std::get<std::string>(state.GetProperty("name")) == "digits");

  Ort::Value weight = state.GetParameter("fc1.weight");
  const size_t size = weight.GetTensorTypeAndShapeInfo().GetElementCount();
  weight.GetTensorMutableData<float>()[size - 1] = 0.125f;
  state.UpdateParameter("fc1.weight", weight);
  REQUIRE(element(state.GetParameter("fc1.weight"), size - 1) == 0.125f);

  OrtTensorTypeAndShapeInfo* info = nullptr;  // the one function that the classes do not use
  Ort::ThrowOnError(Ort::GetTrainingApi().GetParameterTypeAndShape(state, "fc1.weight", &info));
  REQUIRE(Ort::TensorTypeAndShapeInfo(info).GetElementCount() == size);

  for (const bool only_trainable : {true, false}) {
    Ort::Value buffer = session.ToBuffer(only_trainable);
    buffer.GetTensorMutableData<float>()[0] = 0.75f;
    session.FromBuffer(buffer);
    REQUIRE(element(session.ToBuffer(only_trainable), 0) == 0.75f);
  }

  Ort::CheckpointState::SaveCheckpoint(state, target + "/state", true);
  auto resumed = Ort::CheckpointState::LoadCheckpointFromBuffer(bytes_of(target + "/state"));
  Ort::TrainingSession second(env, options, resumed, bytes_of(folder + "/training_model.onnx"),
                              bytes_of(folder + "/eval_model.onnx"), bytes_of(folder + "/optimizer_model.onnx"));
  REQUIRE(std::get<std::string>(resumed.GetProperty("name")) == "digits");
  REQUIRE(loss_of(second.EvalStep(batch)) == loss_of(session.EvalStep(batch)));

  const std::string model = target + "/model.onnx";
  session.ExportModelForInferencing(model, {"output"});
  Ort::Session inference(env, model.c_str(), options);
  REQUIRE(inference.GetOutputCount() == 1 && inference.GetInputCount() == 1);

  bool is_refused = false;
  try {
    Ort::CheckpointState::LoadCheckpoint(target + "/none");
  } catch (const Ort::Exception& error) {
    is_refused = std::string(error.what()).find("none") != std::string::npos;
  }
  REQUIRE(is_refused);

  // The same through the slot of onnxruntime's own table, where Java and others look.
  const OrtApi* table = onnxtrain_install_table(&Ort::GetApi(), kEntries * sizeof(void*));
  REQUIRE(table->GetTrainingApi(kVersion) == &Ort::GetTrainingApi());
}

}  // namespace

int main(int count, char** given) {
  if (count != 3) return 2;
  Ort::InitApi(OrtGetApiBase()->GetApi(kVersion));
  try {
    call_all(given[1], given[2]);
    std::printf("%s\n", OrtGetApiBase()->GetVersionString());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
