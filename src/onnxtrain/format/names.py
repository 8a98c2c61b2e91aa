"""The names in the graphs of the artifact folder by which both halves know what is what.

`<p>` stands for the name of a parameter; those that begin with `_` or `.` are put behind it.
"""

from __future__ import annotations

LAZY_RESET, RANDOM_SEED = "lazy_reset_grad", "random_seed"
LEARNING_RATE, STEP = "learning_rate", "step"
GRADIENT = "_grad"
BUFFER, ACCUMULATED = "_grad.accumulation.buffer", "_grad.accumulation.out"
UPDATED, MOMENTUM = ".updated", ".momentum"
PROXIMAL_MU, REFERENCE = "proximal_mu", ".reference"
