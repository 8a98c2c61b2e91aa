// Puts an exported model on disk so that a crash at any moment leaves the old model or the new.
//
// A model alone is replaced by a rename, which is atomic. A model with external data is two files, `P` and
// `P.data`, and a new `P.data` must not be read with the old `P`. So the model is replaced twice: first by
// one that refers to `P.data.<identifier>`, then, when `P.data` is in its place, by one that refers to that.
// docs/format.md describes it all.
#pragma once

#include <functional>
#include <string>

#include "model_layout.h"

namespace onnxtrain::device {

// Says early that a model cannot be written there.
void require_writable(const std::string& path);

// Writes a model that is one file.
void store_model(const std::string& path, const Chunks& model);

// Writes a model and its external data; `model` takes the name of the data file.
void store_with_data(const std::string& path, const std::function<Chunks(const std::string&)>& model,
                     const Chunks& data);

}  // namespace onnxtrain::device
