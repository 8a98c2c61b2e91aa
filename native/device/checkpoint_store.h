// The files of a checkpoint on the disk: one, or two that an identifier links.
//
// A rename replaces one file atomically, and no file system renames two at once. The identifier is a
// property of the checkpoint P and the last bytes of P.data. A save
// 1. writes P.data.<new identifier> and a temporary file for P, and syncs both;
// 2. locks the folder, and renames P.data to P.data.old;
// 3. renames the temporary file to P, which makes the new checkpoint valid;
// 4. renames P.data.<new identifier> to P.data;
// 5. deletes P.data.old.
// `open_data` looks for the data under all three names.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "files.h"

namespace onnxtrain::device {

std::string data_path(const std::string& path, const std::string& suffix = "");

std::unique_ptr<OpenFile> open_checkpoint(const std::string& path);

// Opens the external data of a checkpoint. Without an identifier (""), or if ONNX Runtime has rewritten
// both files, the name decides. Data with the identifier of another checkpoint are never returned.
std::unique_ptr<OpenFile> open_data(const std::string& path, const std::string& identifier, bool may_be_unmarked);

// Writes a checkpoint and, if `data` is given, its external data. `live_identifier` returns that of
// the present checkpoint, or "".
void store_checkpoint(const std::string& path, const Write& main, const Write& data, const std::string& identifier,
                      const std::function<std::string()>& live_identifier);

}  // namespace onnxtrain::device
