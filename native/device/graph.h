// A graph of the artifacts, and the onnxruntime session that runs it.
//
// The session is made when the graph runs for the first time: a program that takes fused steps never
// pays for the graphs that it does not use.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "model_file.h"
#include "ort.h"
#include "state.h"
#include "wire.h"

namespace onnxtrain::device {

// How sessions are made.
struct Settings {
  const OrtEnv* env = nullptr;
  Held<OrtEnv> own_env;             // that of sessions that are given none
  Held<OrtSessionOptions> options;  // the user's own; null for settings that are good for training
  bool native = true;               // whether native kernels may run
  int threads = 0;                  // 0: as many as onnxruntime chooses
  bool has_memory_limit = false;    // whether they share the allocator that has one
};

class Graph {
 public:
  Graph(ModelFile model, std::shared_ptr<Settings> settings, std::shared_ptr<TrainingState> state);

  const ModelFile& model() const { return model_; }
  const std::string& name() const { return model_.name; }
  // The gradients of a training graph that its session has as outputs beside its own.
  const std::vector<std::string>& gradients() const { return gradients_; }
  // The session, rebuilt if a constant has changed.
  const Held<OrtSession>& session();
  bool is_current() const { return session_ != nullptr && version_ == state_->frozen_version; }

 private:
  Held<OrtSession> new_session(bool with_kernels);
  Held<OrtSessionOptions> new_options() const;
  Held<OrtSessionOptions> training_options() const;
  std::string source(bool with_kernels) const;
  std::string graph_with_constants(WireReader& reader, std::string_view graph,
                                   const std::set<std::string>& changed) const;
  Bytes base_data(const ExternalTensor& tensor);
  void take_interface();

  ModelFile model_;
  std::shared_ptr<Settings> settings_;
  std::shared_ptr<TrainingState> state_;
  ExternalFiles base_files_;
  std::vector<std::string> gradients_;
  std::vector<Held<OrtValue>> constants_;  // what the session reads of the checkpoint
  Held<OrtSession> session_;
  int version_ = -1;
};

}  // namespace onnxtrain::device
