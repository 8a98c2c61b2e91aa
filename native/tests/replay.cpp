// Calls kernels again from files that the tests in Python have recorded:
//
//   replay FOLDER [--hostile] [--rounded] [--most BYTES]
//
// Each result is compared with the recorded one, once with tasks in order and once from the last one
// to the first: these two are equal to the bit. With --hostile each case is also run with shapes,
// types, values of int64 inputs and attributes that do not belong together; a kernel returns an
// error then, or a result, and touches nothing outside, which AddressSanitizer and valgrind watch.
// --rounded takes only cases with products of bfloat16, and --most only small ones.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>

#include "fake_runtime.h"
#include "isa.h"
#include "ort_interface.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace onnxtrain {
namespace {

// How far results may be apart, since sums are taken in another order elsewhere: in units of the last
// place of the largest element of the result, or of the inputs, where terms cancel each other. What is
// rounded to bfloat16 on one processor only may be four of its units apart: the gradient of attention
// is a chain of three products, each of rounded numbers.
constexpr double kMostUlps = 512, kMostInputUlps = 16, kMostRoundedUlps = 262144;
constexpr int kMostSeconds = 120;  // of one call, under valgrind or an emulator

std::string now;  // what is running, for the message of a crash

void at_end(int signal_number) {
  const char* what = signal_number == SIGALRM ? "\nDOES NOT END: " : "\nCRASHED: ";
  if (write(2, what, std::strlen(what)) + write(2, now.c_str(), now.size()) + write(2, "\n", 1) < 0) _exit(3);
  _exit(2);
}

// A sanitizer has found something.
[[maybe_unused]] void at_death() {
  if (write(2, "WHILE RUNNING: ", 15) + write(2, now.c_str(), now.size()) + write(2, "\n", 1) < 0) _exit(3);
}

std::string text_of(const CaseTensor& tensor) {
  if (tensor.type == 0) return "none";
  std::string text = "type " + std::to_string(tensor.type) + " [";
  for (const int64_t size : tensor.shape) text += std::to_string(size) + " ";
  return text + "]";
}

std::string text_of(const Case& one) {
  std::string text = one.kind + "(";
  for (const CaseTensor& input : one.inputs) text += text_of(input) + ", ";
  for (const CaseAttribute& of : one.attributes) {
    text += of.name + "=";
    for (const int64_t value : of.integers) text += std::to_string(value) + " ";
    if (of.type == CaseAttribute::kNumber) text += std::to_string(of.number);
    text += of.text + ", ";
  }
  return text + ")";
}

constexpr double kUlp = 1.1920929e-7, kInfinite = std::numeric_limits<double>::infinity();

std::vector<float> floats_of(const CaseTensor& tensor) {
  std::vector<float> values(tensor.type == kFloat ? tensor.bytes.size() / sizeof(float) : 0);
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), values.size() * sizeof(float));
  return values;
}

double largest(const CaseTensor& tensor) {
  double found = 1e-30;
  for (const float value : floats_of(tensor))
    if (std::isfinite(value)) found = std::max(found, std::fabs(double{value}));
  return found;
}

double largest_input(const Case& one) {
  double found = 0;
  for (const CaseTensor& input : one.inputs) found = std::max(found, largest(input));
  return found;
}

// Whether an element has the bits that outputs are filled with before a kernel runs.
bool is_untouched(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits == 0xffffffffu;
}

// The largest difference of two tensors. What a kernel saves for its partner may have room behind
// what is used, of which an instruction set writes more than another one: `may_have_room`.
double difference(const CaseTensor& expected, const CaseTensor& found, bool may_have_room) {
  if (expected.type != found.type || expected.shape != found.shape) return kInfinite;
  if (expected.type != kFloat) return expected.bytes == found.bytes ? 0 : kInfinite;
  const std::vector<float> a = floats_of(expected), b = floats_of(found);
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if ((std::isnan(a[i]) && std::isnan(b[i])) || a[i] == b[i]) continue;
    if (may_have_room && (is_untouched(a[i]) || is_untouched(b[i]))) continue;
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return kInfinite;
    most = std::max(most, std::fabs(double{a[i]} - double{b[i]}));
  }
  return most;
}

// bfloat16 has 16 bits less; processors without it compute in float32.
bool is_rounded(const Case& one) {
  return std::any_of(one.attributes.begin(), one.attributes.end(), [](const CaseAttribute& of) {
    const int64_t number = of.integers.empty() ? 0 : of.integers[0];
    return (of.name == "bf16" && number != 0) || (of.name == "accuracy_level" && number >= 3);
  });
}

bool agrees(const Case& one, const Result& result) {
  if (one.error.empty() != result.error.empty()) {
    std::printf("FAILED %s\n  expected %s, got %s\n", text_of(one).c_str(),
                one.error.empty() ? "a result" : one.error.c_str(),
                result.error.empty() ? "a result" : result.error.c_str());
    return false;
  }
  for (size_t i = 0; i < one.outputs.size() && one.error.empty(); ++i) {
    const double apart = difference(one.outputs[i], result.outputs[i], i > 0);
    const double ulps = is_rounded(one) ? kMostRoundedUlps : kMostUlps;
    const double allowed = kUlp * std::max(ulps * largest(one.outputs[i]), kMostInputUlps * largest_input(one));
    if (apart <= allowed) continue;
    std::printf("FAILED %s\n  output %zu, %s, is %.3g away, which is %.3g ulps\n", text_of(one).c_str(), i,
                text_of(result.outputs[i]).c_str(), apart, apart / kUlp / largest(one.outputs[i]));
    return false;
  }
  return true;
}

bool equal(const Case& one, const Result& a, const Result& b, const char* what) {
  bool same = a.error == b.error && a.outputs.size() == b.outputs.size();
  for (size_t i = 0; same && i < a.outputs.size(); ++i) same = a.outputs[i].bytes == b.outputs[i].bytes;
  if (!same) std::printf("FAILED %s\n  the result is another one %s\n", text_of(one).c_str(), what);
  return same;
}

bool check(const Case& one) {
  const Result first = run_case(one, Order::forward, false);
  if (!agrees(one, first)) return false;
  if (!equal(one, first, run_case(one, Order::backward, false), "with tasks in another order")) return false;
  if (!equal(one, first, run_case(one, Order::threads, false), "with two threads")) return false;
  return agrees(one, run_case(one, Order::forward, true));
}

// ---- hostile cases -------------------------------------------------------------------------------

using Try = std::function<void(const Case&)>;

const std::vector<int64_t> kWrong = {0,
                                     1,
                                     -1,
                                     2,
                                     7,
                                     int64_t{1} << 15,
                                     int64_t{1} << 31,
                                     int64_t{1} << 40,
                                     std::numeric_limits<int64_t>::min(),
                                     std::numeric_limits<int64_t>::max()};

void vary_shapes(const Case& one, size_t index, const Try& attempt) {
  const CaseTensor& input = one.inputs[index];
  const auto with_shape = [&](std::vector<int64_t> shape) {
    Case changed = one;
    changed.inputs[index].shape = std::move(shape);
    attempt(changed);
  };
  for (size_t axis = 0; axis < input.shape.size(); ++axis)
    for (const int64_t size : {input.shape[axis] + 1, input.shape[axis] - 1, int64_t{0}, 2 * input.shape[axis]}) {
      std::vector<int64_t> shape = input.shape;
      shape[axis] = std::max<int64_t>(size, 0);
      with_shape(std::move(shape));
    }
  int64_t count = 1;
  for (const int64_t size : input.shape) count *= size;
  with_shape({count});
  with_shape({1, count});
  with_shape({});
  std::vector<int64_t> longer = input.shape;
  longer.insert(longer.begin(), 1);
  with_shape(longer);
  longer.insert(longer.end(), 8, 1);
  with_shape(longer);
  if (input.shape.size() > 1) with_shape({input.shape.begin() + 1, input.shape.end()});
  if (input.shape.size() > 1) with_shape({input.shape.begin(), input.shape.end() - 1});
}

void vary_values(const Case& one, size_t index, const Try& attempt) {
  const size_t count = std::min<size_t>(one.inputs[index].bytes.size() / sizeof(int64_t), 8);
  if (one.inputs[index].type != kInt64) return;
  for (size_t i = 0; i < count; ++i)
    for (const int64_t wrong : kWrong) {
      Case changed = one;
      std::memcpy(changed.inputs[index].bytes.data() + i * sizeof wrong, &wrong, sizeof wrong);
      attempt(changed);
    }
}

void vary_inputs(const Case& one, const Try& attempt) {
  for (size_t index = 0; index < one.inputs.size(); ++index) {
    vary_shapes(one, index, attempt);
    vary_values(one, index, attempt);
    for (const int type : {0, 1, 6, 7, 9, 11}) {
      Case changed = one;
      changed.inputs[index].type = type;
      attempt(changed);
    }
    Case fewer = one;
    fewer.inputs.resize(index);
    attempt(fewer);
  }
  Case empty = one;
  for (CaseTensor& input : empty.inputs)
    if (!input.shape.empty()) input.shape[0] = 0;
  attempt(empty);
}

void vary_attributes(const Case& one, const Try& attempt) {
  for (size_t index = 0; index < one.attributes.size(); ++index) {
    const auto with = [&](const std::function<void(CaseAttribute&)>& change) {
      Case changed = one;
      change(changed.attributes[index]);
      attempt(changed);
    };
    for (size_t i = 0; i < one.attributes[index].integers.size(); ++i)
      for (const int64_t wrong : kWrong) with([&](CaseAttribute& of) { of.integers[i] = wrong; });
    if (one.attributes[index].type == CaseAttribute::kIntegers) {
      with([](CaseAttribute& of) { of.integers.clear(); });
      with([](CaseAttribute& of) { of.integers.push_back(1); });
      with([](CaseAttribute& of) { of.integers.resize(40, 3); });
    }
    for (const float wrong : {0.f, -1.f, 1e30f, INFINITY, NAN}) with([&](CaseAttribute& of) { of.number = wrong; });
    with([](CaseAttribute& of) { of.name = "another"; });
    with([](CaseAttribute& of) { of.text = "what nobody expects"; });
  }
}

int64_t attempts = 0;

void run_hostile(const Case& one) {
  const Try attempt = [](const Case& changed) {
    now = text_of(changed);
    alarm(kMostSeconds);
    ++attempts;
    run_case(changed, Order::forward, false);
  };
  vary_inputs(one, attempt);
  vary_attributes(one, attempt);
}

size_t size_of(const Case& one) {
  size_t size = 0;
  for (const CaseTensor& input : one.inputs) size += input.bytes.size();
  return size;
}

Case read(const std::filesystem::path& path) {
  Case one;
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) throw std::runtime_error(path.string() + " cannot be read");
  CaseStream stream(file, false);
  pass(stream, one);
  std::fclose(file);
  return one;
}

int replay(const std::filesystem::path& folder, bool hostile, bool rounded, size_t most) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".case") paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  int failed = 0;
  std::map<std::string, int> counts;
  for (const auto& path : paths) {
    const Case one = read(path);
    if (size_of(one) > most || (rounded && !is_rounded(one))) continue;
    now = text_of(one);
    alarm(kMostSeconds);
    failed += !check(one);
    if (hostile && one.error.empty() && counts[one.kind] < 12 && size_of(one) < 60000) run_hostile(one);
    ++counts[one.kind];
  }
  for (const auto& [kind, count] : counts) std::printf("%-32s %4d\n", kind.c_str(), count);
  std::printf("%s: %d failed; %lld hostile calls\n", isa_name(isa()), failed, static_cast<long long>(attempts));
  return failed > 0 || counts.empty();
}

}  // namespace
}  // namespace onnxtrain

int main(int count, char** arguments) {
  signal(SIGALRM, onnxtrain::at_end);
  signal(SIGABRT, onnxtrain::at_end);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(onnxtrain::at_death);
#else
  signal(SIGSEGV, onnxtrain::at_end);
  signal(SIGFPE, onnxtrain::at_end);
#endif
  bool hostile = false, rounded = false;
  size_t most = size_t{1} << 40;
  for (int i = 2; i < count; ++i) {
    if (std::strcmp(arguments[i], "--hostile") == 0) hostile = true;
    if (std::strcmp(arguments[i], "--rounded") == 0) rounded = true;
    if (std::strcmp(arguments[i], "--most") == 0 && i + 1 < count) most = std::strtoull(arguments[++i], nullptr, 10);
  }
  if (count < 2) {
    std::puts("replay FOLDER [--hostile] [--rounded] [--most BYTES]");
    return 2;
  }
  return onnxtrain::replay(arguments[1], hostile, rounded, most);
}
