// In a build with ONNXTRAIN_RECORD, each call of a kernel is written to the folder that the variable
// of the same name says, for native/tests/replay.cpp. Other builds have nothing of it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ort_interface.h"

#ifdef ONNXTRAIN_RECORD
#include "../tests/case_file.h"
#endif

namespace onnxtrain {

#ifdef ONNXTRAIN_RECORD
using SeenAttributes = std::vector<CaseAttribute>;

// A table that notes which attributes are read and which outputs are made.
const OrtApi* observed(const OrtApi* api);
// The attributes that this thread has read since the last call.
SeenAttributes take_attributes();
// Makes the call, and writes it to a file unless there is one like it.
OrtStatus* recorded(const OrtApi* api, const char* kind, const SeenAttributes& attributes, OrtKernelContext* context,
                    const std::function<OrtStatus*()>& call);
#else
struct SeenAttributes {};
inline const OrtApi* observed(const OrtApi* api) { return api; }
inline SeenAttributes take_attributes() { return {}; }
template <class F>
OrtStatus* recorded(const OrtApi*, const char*, const SeenAttributes&, OrtKernelContext*, F call) {
  return call();
}
#endif

}  // namespace onnxtrain
