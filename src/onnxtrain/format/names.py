"""Names of inputs and outputs in the graphs of an artifact folder.

Those that begin with `_` or `.` are suffixes of the name of a parameter.
"""

from __future__ import annotations

LAZY_RESET, RANDOM_SEED = "lazy_reset_grad", "random_seed"
LEARNING_RATE, STEP = "learning_rate", "step"
GRADIENT = "_grad"
BUFFER, ACCUMULATED = "_grad.accumulation.buffer", "_grad.accumulation.out"
UPDATED, MOMENTUM = ".updated", ".momentum"
PROXIMAL_MU, REFERENCE = "proximal_mu", ".reference"
UPDATED_FLAG, FINITE_CHECK = "updated_flag", "finite_check"
GRADIENTS_CHECKED = "gradients_checked"
SAMPLE_WEIGHT = "sample_weight"
# Running statistics of a model that trains for integers: the ranges of all activations, [n, 2], and
# how fast they follow, [1], which is 0 once they are frozen.
RANGES, RANGE_MOMENTUM = "quantization.ranges", "quantization.momentum"

# The domain of functions that native kernels stand in for.
FUNCTION_DOMAIN = "ai.onnxtrain"
