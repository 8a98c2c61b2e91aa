#include "kernels.h"

#ifdef ONNXTRAIN_WITH_KERNELS

#include <mutex>
#include <sstream>

#include "text.h"

extern "C" int onnxtrain_expect(const char* names);
extern "C" const char* onnxtrain_accepted();
extern "C" onnxtrain::OrtStatus* RegisterCustomOps(onnxtrain::OrtSessionOptions* options,
                                                   const onnxtrain::OrtApiBase* base);

namespace onnxtrain::device {

namespace {

// One thread at a time says which functions a session has, and registers their kernels.
std::mutex guard;
const OrtApi* present_api = nullptr;

}  // namespace

std::set<std::string> served_functions(const std::vector<std::string>& functions) {
  const std::lock_guard<std::mutex> lock(guard);
  std::set<std::string> served;
  if (functions.empty() || onnxtrain_expect(joined(functions, "\n").c_str()) == 0) return served;
  std::istringstream names(onnxtrain_accepted());
  for (std::string name; std::getline(names, name);) served.insert(name);
  return served;
}

void register_kernels(const RuntimePointer& runtime, OrtSessionOptions* options,
                      const std::vector<std::string>& functions) {
  const std::lock_guard<std::mutex> lock(guard);
  present_api = runtime->api;
  const OrtApiBase base = {[](uint32_t) { return present_api; }, nullptr};
  if (onnxtrain_expect(joined(functions, "\n").c_str()) > 0) runtime->check(RegisterCustomOps(options, &base));
}

}  // namespace onnxtrain::device

#else

namespace onnxtrain::device {

std::set<std::string> served_functions(const std::vector<std::string>&) { return {}; }
void register_kernels(const RuntimePointer&, OrtSessionOptions*, const std::vector<std::string>&) {}

}  // namespace onnxtrain::device

#endif
