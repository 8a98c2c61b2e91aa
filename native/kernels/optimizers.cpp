// Optimizers: all tensors of a step in one call, in one pass over each.
//
// Inputs: the learning rate (float) and the number of the step (int64), one element each; where the
// attribute max_norm is above 0, the sums of squares of all gradients; then for each tensor the
// parameter, its gradient and its states. Outputs: for each tensor the new parameter and the new
// states, which may be the memory of the old ones. The attribute `chunks` has a number for each
// tensor: its outputs have the shape of the parameter where it is 0, and else the shape
// [chunks, elements of a chunk].
#include <array>
#include <cmath>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "families.h"
#include "optimizers.h"
#include "tensor_list.h"

namespace onnxtrain {
namespace {

// Numbers are computed in double and rounded once: for a small step, 1 − 0.999^step has three good
// digits in float.
struct StepNumbers {
  double rate, step;
  double clip;  // what gradients are multiplied by

  StepNumbers(const Run& run, double rate_scale, double max_norm) : clip(1) {
    const Tensor rates = run.input(0), steps = run.input(1);
    require(rates.elements == 1 && steps.elements == 1,
            "the learning rate and the number of the step have one element each");
    rate = *rates.floats() * rate_scale;
    step = static_cast<double>(*steps.integers());
    if (max_norm > 0) {
      const Tensor squares = run.input(2);
      double total = 0;
      for (int64_t index = 0; index < squares.elements; ++index) total += squares.floats()[index];
      clip = std::min(max_norm / (std::sqrt(total) + 1e-6), 1.0);
    }
  }
};

// Lets numbers below the smallest normal float count as zero on this thread, until it goes. The mean of gradients
// of a word that does not occur any more, or of a dead unit, shrinks to such a number in some hundred steps and
// stays there; AdamW then took 1.5 times as long on a Zen 4.
class DenormalsAsZero {
 public:
  DenormalsAsZero() : before_(mode()) { set_mode(before_ | kAsZero); }
  ~DenormalsAsZero() { set_mode(before_); }
  DenormalsAsZero(const DenormalsAsZero&) = delete;
  DenormalsAsZero& operator=(const DenormalsAsZero&) = delete;

 private:
#if defined(__x86_64__)
  using Mode = unsigned;
  static constexpr Mode kAsZero = 0x8040;  // of results, and of what is read
  static Mode mode() { return _mm_getcsr(); }
  static void set_mode(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode kAsZero = Mode{1} << 24;
  static Mode mode() {
    Mode found;
    asm volatile("mrs %0, fpcr" : "=r"(found));
    return found;
  }
  static void set_mode(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  using Mode = int;
  static constexpr Mode kAsZero = 0;
  static Mode mode() { return 0; }
  static void set_mode(Mode) {}
#endif

  const Mode before_;
};

// What all optimizers have in common; each has its own numbers and formula.
class Update : public Kernel {
 public:
  Update(const Attributes& of, int states)
      : chunks_(of.integers("chunks")),
        max_norm_(of.number("max_norm", 0)),
        rate_scale_(of.number("rate_scale", 1)),
        limit_(of.number("limit", 0)),
        states_(states) {}

  bool checks_sharing() const override { return true; }
  void run(Run& run) const override {
    const size_t first = max_norm_ > 0 ? 3 : 2;
    require(run.input_count() >= first + chunks_.size() * (2 + states_),
            "there are fewer inputs than the tensors need");
    require(run.output_count() >= chunks_.size() * (1 + states_), "there are fewer outputs than the tensors need");
    std::vector<Piece> tensors;
    TensorList list;
    Ranges ranges;
    for (size_t index = 0; index < chunks_.size(); ++index) {
      tensors.push_back(tensor(run, index, first));
      list.add(tensors.back().count);
      add_ranges(tensors.back(), ranges);
    }
    ranges.require_apart();
    const auto formula = formula_of(StepNumbers(run, rate_scale_, max_norm_));
    run.parallel(list.pieces(), [&](int64_t piece) {
      const DenormalsAsZero on_this_thread;
      list.in_piece(piece,
                    [&](size_t index, int64_t begin, int64_t count) { formula(part(tensors[index], begin, count)); });
    });
  }

 protected:
  using Formula = std::function<void(const Piece&)>;
  virtual Formula formula_of(const StepNumbers& numbers) const = 0;

  // A weight decay that is a part of the gradient needs the clipped gradient.
  GradientNumbers gradient_numbers(double decay, double clip) const {
    return {limit_, static_cast<float>(decay != 0 ? clip : 1), static_cast<float>(decay)};
  }

 private:
  Piece tensor(Run& run, size_t index, size_t first) const {
    const size_t in = first + index * (2 + states_), out = index * (1 + states_);
    const Tensor parameter = run.input(in), gradient = run.input(in + 1);
    const Shape shape = output_shape(parameter, chunks_[index]);
    require(gradient.elements == parameter.elements, "a gradient has another size than its parameter");
    Piece made{};
    made.count = parameter.elements;
    made.parameter = parameter.floats();
    made.gradient = gradient.floats();
    made.new_parameter = run.output(out, shape).floats();
    for (int k = 0; k < states_; ++k) {
      const Tensor state = run.input(in + 2 + k);
      require(state.elements == parameter.elements, "a state has another size than its parameter");
      made.states[k] = state.floats();
      made.new_states[k] = run.output(out + 1 + k, shape).floats();
    }
    return made;
  }

  static Shape output_shape(const Tensor& parameter, int64_t chunks) {
    if (chunks == 0) return parameter.shape;
    require(chunks > 0 && parameter.elements % chunks == 0, "a parameter cannot be cut into that many chunks");
    return {chunks, parameter.elements / chunks};
  }

  void add_ranges(const Piece& of, Ranges& ranges) const {
    std::vector<const float*> read{of.parameter, of.gradient}, written{of.new_parameter};
    read.insert(read.end(), of.states, of.states + states_);
    written.insert(written.end(), of.new_states, of.new_states + states_);
    ranges.add(read, written, of.count);
  }

  Piece part(Piece of, int64_t begin, int64_t count) const {
    of.count = count;
    of.parameter += begin;
    of.gradient += begin;
    of.new_parameter += begin;
    for (int k = 0; k < states_; ++k) {
      of.states[k] += begin;
      of.new_states[k] += begin;
    }
    return of;
  }

  std::vector<int64_t> chunks_;
  double max_norm_, rate_scale_;
  float limit_;
  int states_;
};

float keep(const StepNumbers& numbers, double decay) { return static_cast<float>(1.0 - numbers.rate * decay); }

// AdamW and Adam. Where one minus a number is small, the attributes have it too, for its digits.
class AdamUpdate : public Update {
 public:
  AdamUpdate(const Attributes& of, bool decoupled)
      : Update(of, 2),
        beta1_(of.number("beta1", 0.9f)),
        beta2_(of.number("beta2", 0.999f)),
        rest1_(of.number("one_minus_beta1", 0.1f)),
        rest2_(of.number("one_minus_beta2", 0.001f)),
        epsilon_(of.number("epsilon", 1e-8f)),
        decay_(of.number("weight_decay", 0)),
        corrects_bias_(of.integer("bias_correction", 1) != 0),
        as_torch_(of.integer("as_torch", 1) != 0),
        decoupled_(decoupled) {}

 protected:
  Formula formula_of(const StepNumbers& numbers) const override {
    double rate = numbers.rate, epsilon = epsilon_;
    if (corrects_bias_) {
      const double c1 = corrected(rest1_, numbers.step), c2 = std::sqrt(corrected(rest2_, numbers.step));
      rate = rate * c2 / c1;
      epsilon = as_torch_ ? epsilon * c2 : epsilon;
    }
    const double decay = decoupled_ ? 0 : decay_, clip = decay != 0 ? 1 : numbers.clip;
    const AdamNumbers made{gradient_numbers(decay, numbers.clip),
                           beta1_,
                           static_cast<float>(clip * rest1_),
                           beta2_,
                           static_cast<float>(clip * std::sqrt(rest2_)),
                           static_cast<float>(rate),
                           static_cast<float>(epsilon),
                           decoupled_ ? keep(numbers, decay_) : 1.0f,
                           as_torch_};
    return [made](const Piece& piece) { optimizers().adam(made, piece); };
  }

 private:
  // 1 − beta^step, from 1 − beta.
  static double corrected(double rest, double step) { return -std::expm1(step * std::log1p(-rest)); }

  float beta1_, beta2_;
  double rest1_, rest2_, epsilon_, decay_;
  bool corrects_bias_, as_torch_, decoupled_;
};

struct AdamW : AdamUpdate {
  explicit AdamW(const Attributes& of) : AdamUpdate(of, true) {}
};

struct Adam : AdamUpdate {
  explicit Adam(const Attributes& of) : AdamUpdate(of, false) {}
};

class Sgd : public Update {
 public:
  explicit Sgd(const Attributes& of)
      : Update(of, of.number("momentum", 0) != 0),
        momentum_(of.number("momentum", 0)),
        dampening_(of.number("dampening", 0)),
        decay_(of.number("weight_decay", 0)),
        nesterov_(of.integer("nesterov", 0) != 0) {}

 protected:
  Formula formula_of(const StepNumbers& numbers) const override {
    SgdNumbers made{gradient_numbers(0, 1), 0, 1, momentum_, 1, 0, nesterov_};
    if (momentum_ == 0) {
      made.rate = static_cast<float>(numbers.clip * numbers.rate);
      made.keep = keep(numbers, decay_);
      return [made](const Piece& piece) { optimizers().sgd(made, piece); };
    }
    const double part = numbers.step == 1 ? 1 : 1 - dampening_;
    made.rate = static_cast<float>(numbers.rate);
    made.to_mean = static_cast<float>(numbers.clip * part);
    made.decay_to_mean = static_cast<float>(part * decay_);
    return [made](const Piece& piece) { optimizers().sgd_momentum(made, piece); };
  }

 private:
  float momentum_;
  double dampening_, decay_;
  bool nesterov_;
};

class Rmsprop : public Update {
 public:
  explicit Rmsprop(const Attributes& of)
      : Update(of, 1 + (of.number("momentum", 0) != 0) + (of.integer("centered", 0) != 0)),
        alpha_(of.number("alpha", 0.99f)),
        rest_(of.number("one_minus_alpha", 0.01f)),
        epsilon_(of.number("epsilon", 1e-8f)),
        momentum_(of.number("momentum", 0)),
        decay_(of.number("weight_decay", 0)),
        centered_(of.integer("centered", 0) != 0) {}

 protected:
  Formula formula_of(const StepNumbers& numbers) const override {
    const double clip = decay_ != 0 ? 1 : numbers.clip;
    const double rate = momentum_ != 0 ? numbers.rate : numbers.rate * clip;
    const RmspropNumbers made{gradient_numbers(decay_, numbers.clip),
                              alpha_,
                              static_cast<float>(clip * rest_),
                              static_cast<float>(clip * std::sqrt(rest_)),
                              static_cast<float>(clip),
                              epsilon_,
                              momentum_,
                              static_cast<float>(rate)};
    const auto formula = optimizers().rmsprop[momentum_ != 0][centered_];
    return [made, formula](const Piece& piece) { formula(made, piece); };
  }

 private:
  float alpha_;
  double rest_;
  float epsilon_, momentum_;
  double decay_;
  bool centered_;
};

class Adagrad : public Update {
 public:
  explicit Adagrad(const Attributes& of)
      : Update(of, 1),
        rate_decay_(of.number("rate_decay", 0)),
        decay_(of.number("weight_decay", 0)),
        initial_(of.number("initial", 0)),
        epsilon_(of.number("epsilon", 1e-10f)) {}

 protected:
  Formula formula_of(const StepNumbers& numbers) const override {
    const AdagradNumbers made{gradient_numbers(decay_, numbers.clip),
                              static_cast<float>(decay_ != 0 ? 1 : numbers.clip), initial_, epsilon_,
                              static_cast<float>(numbers.rate / (1 + (numbers.step - 1) * rate_decay_))};
    return [made](const Piece& piece) { optimizers().adagrad(made, piece); };
  }

 private:
  double rate_decay_, decay_;
  float initial_, epsilon_;
};

class Lion : public Update {
 public:
  explicit Lion(const Attributes& of)
      : Update(of, 1),
        beta2_(of.number("beta2", 0.99f)),
        to_sign_(of.number("gradient_to_sign", 0.11f)),
        rest2_(of.number("one_minus_beta2", 0.01f)),
        decay_(of.number("weight_decay", 0)) {}

 protected:
  Formula formula_of(const StepNumbers& numbers) const override {
    const LionNumbers made{gradient_numbers(0, 1),
                           beta2_,
                           static_cast<float>(numbers.clip * to_sign_),
                           static_cast<float>(numbers.clip * rest2_),
                           static_cast<float>(numbers.rate),
                           keep(numbers, decay_)};
    return [made](const Piece& piece) { optimizers().lion(made, piece); };
  }

 private:
  float beta2_;
  double to_sign_, rest2_, decay_;
};

}  // namespace

std::vector<KernelKind> optimizer_kernels() {
  return {kind_of<AdamW>("AdamW", {kFloat}),     kind_of<Adam>("Adam", {kFloat}),
          kind_of<Sgd>("SGD", {kFloat}),         kind_of<Rmsprop>("RMSprop", {kFloat}),
          kind_of<Adagrad>("Adagrad", {kFloat}), kind_of<Lion>("Lion", {kFloat})};
}

}  // namespace onnxtrain
