// The adapter that a session trains: taken out of it, or put into it.
//
// The factors that train are parameters of the session. Its graphs multiply their product by a scale,
// alpha / rank; in an adapter B holds that already.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "adapter.h"
#include "session.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

double number_of_half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double size = std::ldexp(fraction + (exponent > 0 ? 1024 : 0), std::max(exponent, 1) - 25);
  if (exponent == 31) size = fraction > 0 ? NAN : INFINITY;
  return bits >= 0x8000 ? -size : size;
}

// The nearest number of 16 bits; of two, the even one.
uint16_t half_of(double number) {
  const int sign = std::signbit(number) ? 0x8000 : 0;
  const double size = std::abs(number);
  if (std::isnan(number)) return static_cast<uint16_t>(sign | 0x7E00);
  if (size == 0) return static_cast<uint16_t>(sign);
  if (size >= 65520) return static_cast<uint16_t>(sign | 0x7C00);
  int exponent = 0;
  std::frexp(size, &exponent);
  exponent = std::max(exponent, -13);  // smaller numbers have fewer digits
  const int units = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  return static_cast<uint16_t>(sign | ((exponent + 13) * 1024 + units));
}

template <class T>
void scale_in_place(T* numbers, uint64_t count, T scale, bool divides) {
  for (uint64_t i = 0; i < count; ++i) numbers[i] = divides ? numbers[i] / scale : numbers[i] * scale;
}

void scale_halves(uint16_t* halves, uint64_t count, double given, bool divides) {
  const auto scale = static_cast<float>(number_of_half(half_of(given)));
  for (uint64_t i = 0; i < count; ++i) {
    const auto number = static_cast<float>(number_of_half(halves[i]));
    halves[i] = half_of(double{divides ? number / scale : number * scale});
  }
}

// A copy of a factor times a scale, or divided by it, in the arithmetic of its type, as numpy does it.
Tensor scaled(const Tensor& factor, double scale, bool divides) {
  Tensor made = factor;
  made.data = allocate(factor.data.size);
  if (factor.data.size == 0) return made;
  uint8_t* data = made.data.data;
  std::memcpy(data, factor.data.data, static_cast<size_t>(factor.data.size));
  const uint64_t count = elements_of(factor.dims);
  if (factor.code == kFloatCode) {
    scale_in_place(reinterpret_cast<float*>(data), count, static_cast<float>(scale), divides);
  } else if (factor.code == kDoubleCode) {
    scale_in_place(reinterpret_cast<double*>(data), count, scale, divides);
  } else if (factor.code == kFloat16Code) {
    scale_halves(reinterpret_cast<uint16_t*>(data), count, scale, divides);
  }
  return made;
}

}  // namespace

// The pairs of factors that train, and the fingerprint of the base, as the evaluation graph or the checkpoint tell
// them.
Factors TrainingSession::factors() const {
  Json told[2];
  const char* const keys[] = {kFactorsKey, kFingerprintKey};
  Factors made;
  try {
    for (int i = 0; i < 2; ++i) {
      const std::string* text = eval_.graph == nullptr ? nullptr : eval_.graph->model().properties.find(keys[i]);
      if (const Property* own = state_->properties.find(keys[i])) {
        if (const Text* held = std::get_if<Text>(own)) text = held->get();
      }
      if (text != nullptr && !parse_json(*text, Numbers::kPlain, told[i])) {
        throw Error("the property " + quoted(keys[i]) + " is not valid JSON");
      }
    }
    made = read_factors(&told[0], &told[1]);
  } catch (const Error& error) {
    throw ModelError(std::string("the metadata of the model cannot be read: ") + error.what());
  }
  const bool are_held = std::all_of(made.pairs.begin(), made.pairs.end(),
                                    [this](const Pair& pair) { return state_->has(pair.a) && state_->has(pair.b); });
  if (made.pairs.empty() || !are_held) {
    throw StateError(
        "the session trains no low-rank factors, so there is no adapter: prepare the model with train='lora'");
  }
  return made;
}

// What trains, in the memory that training works with.
Named<Tensor> TrainingSession::trained_tensors() {
  Named<Tensor> made;
  std::vector<std::string> names;
  for (const auto& item : state_->trainable) names.push_back(item.first);
  for (const std::string& name : names) made[name] = state_->variable(name)->tensor();
  return made;
}

void TrainingSession::export_adapter(const std::string& path) {
  Adapter adapter;
  {
    const Lock lock(state_->lock);
    adapter.factors = factors();
    state_->require_values();
    state_->require_finite("there is no adapter", false);
    const Named<Tensor> trained = trained_tensors();
    for (const Pair& pair : adapter.factors.pairs) {
      adapter.tensors[pair.a] = scaled(*state_->tensor(pair.a), 1, false);
      adapter.tensors[pair.b] = scaled(*state_->tensor(pair.b), pair.scale.as_double(), false);
    }
    for (const auto& [name, tensor] : trained) {
      if (adapter.tensors.find(name) == nullptr) adapter.tensors[name] = scaled(tensor, 1, false);
    }
  }
  require_float_types(adapter.tensors);
  require_consistent(adapter, "the adapter");
  write_adapter(path, adapter);
}

void TrainingSession::load_adapter(const std::string& path) {
  Adapter adapter = read_adapter(path);
  const Lock lock(state_->lock);
  const Factors own = factors();
  state_->require_values();
  require_fits(adapter, trained_tensors(), own.base);
  for (const Pair& pair : own.pairs) {
    Tensor& b = adapter.tensors[pair.b];
    b = scaled(b, pair.scale.as_double(), true);
  }
  for (const auto& [name, tensor] : adapter.tensors) state_->set(name, tensor);
  lazy_reset_gradients();
  reset_optimizer();
}

}  // namespace onnxtrain::device
