#include <algorithm>
#include <cmath>

#include "families.h"

namespace onnxtrain {
namespace {
struct AdamW : Kernel {
  float beta1, beta2, epsilon, decay;
  explicit AdamW(const Attributes& of) : beta1(of.number("beta1", 0.9f)), beta2(of.number("beta2", 0.999f)), epsilon(of.number("epsilon", 1e-8f)), decay(of.number("decay", 0)) {}
  void run(Run& run) const override {
    const float rate = run.input(0).floats()[0];
    const Tensor p = run.input(1), m = run.input(2), v = run.input(3), g = run.input(4);
    require(p.elements == m.elements && p.elements == v.elements && p.elements == g.elements, "the sizes of parameter, moments and gradient differ");
    Tensor np = run.output(0, p.shape), nm = run.output(1, p.shape), nv = run.output(2, p.shape);
    constexpr int64_t chunk = 16384;
    const float *pp = p.floats(), *mm = m.floats(), *vv = v.floats(), *gg = g.floats();
    float *po = np.floats(), *mo = nm.floats(), *vo = nv.floats();
    run.parallel((p.elements + chunk - 1) / chunk, [&](int64_t c) {
      for (int64_t i = c * chunk; i < std::min(p.elements, (c + 1) * chunk); ++i) {
        const float nm_ = beta1 * mm[i] + (1 - beta1) * gg[i], nv_ = beta2 * vv[i] + (1 - beta2) * gg[i] * gg[i];
        po[i] = pp[i] * (1 - rate * decay) - rate * nm_ / (std::sqrt(nv_) + epsilon);
        mo[i] = nm_; vo[i] = nv_;
      }
    });
  }
};
}

std::vector<KernelKind> optimizer_kernels() { return {kind_of<AdamW>("AdamW", {kFloat})}; }

}  // namespace onnxtrain
