// As much of onnxruntime as kernels use: calls them on tensors whose memory ends where their
// elements end, so that AddressSanitizer and valgrind see each step outside.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "case_file.h"

namespace onnxtrain {

// How tasks of a kernel run: in order, from the last one, or on several threads.
enum class Order { forward, backward, threads };

struct Result {
  std::vector<CaseTensor> outputs;
  std::string error;
};

// Runs the kernel of a case on its inputs. With `misaligned`, tensors begin at no multiple of more
// than the size of an element.
Result run_case(const Case& one, Order order, bool misaligned);

}  // namespace onnxtrain
