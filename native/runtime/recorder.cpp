#include "recorder.h"

#ifdef ONNXTRAIN_RECORD
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "kernel.h"

namespace onnxtrain {
namespace {

constexpr int kEntries = 279;           // those that every runtime has
constexpr size_t kMostBytes = 1 << 20;  // larger calls are not recorded
constexpr int kMostCases = 60;          // of a kind

const OrtApi* real = nullptr;
thread_local SeenAttributes seen;
thread_local std::map<size_t, OrtValue*> made;
thread_local std::vector<const void*> read;  // where the inputs are

CaseAttribute& note(const char* name, int type) {
  for (CaseAttribute& known : seen)
    if (known.name == name) return known;
  seen.push_back({name, type, {}, 0, {}});
  return seen.back();
}

OrtStatus* read_number(const OrtKernelInfo* info, const char* name, float* value) {
  OrtStatus* status = ONNXTRAIN_CALL(real, KernelInfoGetAttribute_float)(info, name, value);
  if (status == nullptr) note(name, CaseAttribute::kNumber).number = *value;
  return status;
}

OrtStatus* read_integer(const OrtKernelInfo* info, const char* name, int64_t* value) {
  OrtStatus* status = ONNXTRAIN_CALL(real, KernelInfoGetAttribute_int64)(info, name, value);
  if (status == nullptr) note(name, CaseAttribute::kInteger).integers = {*value};
  return status;
}

OrtStatus* read_integers(const OrtKernelInfo* info, const char* name, int64_t* values, size_t* count) {
  OrtStatus* status = ONNXTRAIN_CALL(real, KernelInfoGetAttributeArray_int64)(info, name, values, count);
  if (status == nullptr && values != nullptr)
    note(name, CaseAttribute::kIntegers).integers.assign(values, values + *count);
  if (status == nullptr && values == nullptr) note(name, CaseAttribute::kIntegers);
  return status;
}

OrtStatus* read_text(const OrtKernelInfo* info, const char* name, char* text, size_t* size) {
  OrtStatus* status = ONNXTRAIN_CALL(real, KernelInfoGetAttribute_string)(info, name, text, size);
  if (status == nullptr && text != nullptr) note(name, CaseAttribute::kText).text = text;
  return status;
}

// Writes NaN everywhere, so that what a kernel forgets to write is seen. An optimizer's output may be
// one of its inputs.
void fill(const Tensor& tensor) {
  if (std::find(read.begin(), read.end(), tensor.data) != read.end() || tensor.data == nullptr) return;
  std::memset(tensor.data, 0xff, static_cast<size_t>(tensor.elements * size_of_type(tensor.type)));
}

OrtStatus* make_output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t rank, OrtValue** value) {
  OrtStatus* status = ONNXTRAIN_CALL(real, KernelContext_GetOutput)(context, index, shape, rank, value);
  if (status == nullptr) made[index] = *value;
  if (status == nullptr) fill(tensor_of(real, *value));
  return status;
}

CaseTensor copy_of(const Tensor& tensor) {
  CaseTensor copy;
  copy.type = tensor.type;
  copy.shape = tensor.shape;
  const char* data = static_cast<const char*>(tensor.data);
  if (data != nullptr) copy.bytes.assign(data, data + tensor.elements * size_of_type(tensor.type));
  return copy;
}

size_t size_of(const std::vector<CaseTensor>& tensors) {
  size_t size = 0;
  for (const CaseTensor& tensor : tensors) size += tensor.bytes.size();
  return size;
}

// Calls that differ in the values of float tensors alone are one case.
std::string name_of(const Case& one) {
  uint64_t hash = 1469598103934665603u;
  const auto mix = [&](const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  };
  for (const CaseAttribute& of : one.attributes) {
    mix(of.name.data(), of.name.size());
    mix(of.integers.data(), of.integers.size() * sizeof(int64_t));
    mix(&of.number, sizeof of.number);
    mix(of.text.data(), of.text.size());
  }
  for (const CaseTensor& tensor : one.inputs) {
    mix(&tensor.type, sizeof tensor.type);
    mix(tensor.shape.data(), tensor.shape.size() * sizeof(int64_t));
    if (tensor.type == kInt64 && tensor.bytes.size() <= 64) mix(tensor.bytes.data(), tensor.bytes.size());
  }
  mix(one.error.data(), one.error.size());
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return one.kind + "-" + text;
}

int count_of(const std::filesystem::path& folder, const std::string& kind) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    count += entry.path().filename().string().rfind(kind + "-", 0) == 0;
  return count;
}

void write(Case& one) {
  const char* given = std::getenv("ONNXTRAIN_RECORD");
  if (given == nullptr || size_of(one.inputs) + size_of(one.outputs) > kMostBytes) return;
  const std::filesystem::path folder(given);
  std::filesystem::create_directories(folder);
  const std::filesystem::path path = folder / (name_of(one) + ".case");
  if (std::filesystem::exists(path) || count_of(folder, one.kind) >= kMostCases) return;
  const std::filesystem::path draft = path.string() + "." + std::to_string(getpid());
  std::FILE* file = std::fopen(draft.c_str(), "wb");
  if (file == nullptr) return;
  CaseStream stream(file, true);
  pass(stream, one);
  std::fclose(file);
  std::filesystem::rename(draft, path);
}

std::vector<CaseTensor> inputs_of(const Run& run) {
  std::vector<CaseTensor> inputs;
  const size_t count = run.input_count();
  size_t size = 0;
  read.clear();
  for (size_t i = 0; i < count; ++i) {
    const Tensor tensor = run.input(i);
    read.push_back(tensor.data);
    size += static_cast<size_t>(tensor.elements * size_of_type(tensor.type));
    if (size <= kMostBytes) inputs.push_back(copy_of(tensor));
  }
  return size <= kMostBytes ? inputs : std::vector<CaseTensor>();
}

}  // namespace

const OrtApi* observed(const OrtApi* api) {
  static const OrtApi* const table = [&] {
    OrtApi* copy = new OrtApi{};
    std::copy_n(api->entries, kEntries, copy->entries);
    real = api;
    copy->entries[kKernelInfoGetAttribute_float] = reinterpret_cast<void*>(&read_number);
    copy->entries[kKernelInfoGetAttribute_int64] = reinterpret_cast<void*>(&read_integer);
    copy->entries[kKernelInfoGetAttributeArray_int64] = reinterpret_cast<void*>(&read_integers);
    copy->entries[kKernelInfoGetAttribute_string] = reinterpret_cast<void*>(&read_text);
    copy->entries[kKernelContext_GetOutput] = reinterpret_cast<void*>(&make_output);
    return copy;
  }();
  return table;
}

SeenAttributes take_attributes() {
  SeenAttributes taken;
  taken.swap(seen);
  return taken;
}

OrtStatus* recorded(const OrtApi* api, const char* kind, const SeenAttributes& attributes, OrtKernelContext* context,
                    const std::function<OrtStatus*()>& call) {
  Case one;
  one.kind = kind;
  one.attributes = attributes;
  try {
    one.inputs = inputs_of(Run(api, context));
  } catch (...) {
  }
  made.clear();
  OrtStatus* status = call();
  if (one.inputs.empty()) return status;
  try {
    // A case does not tell which outputs are left out, so an error between them cannot be called again.
    if (status != nullptr && !made.empty()) return status;
    if (status != nullptr) {
      one.error = ONNXTRAIN_CALL(api, GetErrorMessage)(status);
    } else {
      for (const auto& [index, value] : made) {
        one.outputs.resize(std::max(one.outputs.size(), index + 1));
        one.outputs[index] = copy_of(tensor_of(api, value));
      }
    }
    static std::mutex guard;
    const std::lock_guard<std::mutex> lock(guard);
    write(one);
  } catch (...) {
  }
  return status;
}

}  // namespace onnxtrain
#endif
