#pragma once

#include <cstdint>
#include <functional>

namespace onnxtrain {

// Calls work(0) … work(count - 1), perhaps at once.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& work)>;

}  // namespace onnxtrain
