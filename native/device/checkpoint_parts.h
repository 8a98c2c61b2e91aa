// What the reader and the writer of checkpoints share.
#pragma once

#include <string>
#include <string_view>

namespace onnxtrain::device {

constexpr std::string_view kIdentifier = "ODTC";
constexpr int32_t kVersion = 2;
constexpr std::string_view kDataIdentifier = "__onnxtrain__.external_data";

// The identifier that links the checkpoint at `path` to its external data; "" if there is none.
std::string live_identifier(const std::string& path);

}  // namespace onnxtrain::device
