"""Ridge regression in closed form, with the regularisation that leaves-one-out errors choose.

With features x and targets y, both centred, the weight is (xᵀx + a)⁻¹ xᵀy. One decomposition of
xᵀx (or of xxᵀ, where there are fewer samples than features) gives it for every a, and with it the
prediction for each sample of a head that was computed without that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxtrain.format.checkpoint.content import Array

# Candidates, relative to the mean variance of a direction of the features.
_CANDIDATES = np.logspace(-6, 4, 21)
_NOTHING = 1e-12  # of the largest variance: what is less is rounding


@dataclass(frozen=True)
class LinearHead:
    """A solution, and what it would score for each sample had it not seen that sample."""

    weight: Array  # a column for each score
    bias: Array
    left_out: Array
    regularization: float = 0.0

    def scaled(self, factor: float) -> LinearHead:
        """Return the head whose scores are larger by a factor."""
        return LinearHead(
            self.weight * factor, self.bias * factor, self.left_out * factor, self.regularization
        )


def solve_ridge(
    features: Array, targets: Array, regularization: float | None, has_bias: bool
) -> LinearHead:
    """Return the head of the least squared error; None chooses the regularisation."""
    x, y = features.astype(np.float64), targets.astype(np.float64)
    count = len(x)
    x_mean, y_mean = (v.mean(0) if has_bias else np.zeros(v.shape[1]) for v in (x, y))
    x -= x_mean
    y -= y_mean
    variances, directions = _decomposed(x)
    turned = x @ directions
    projected = turned.T @ y
    own = 1 / count if has_bias else 0.0  # what the mean owes to each sample

    def left_out_errors(a: float) -> Array:
        shrunk = 1 / (variances + a)
        leverage = own + (turned**2) @ shrunk
        residuals = y - turned @ (shrunk[:, None] * projected)
        found: Array = residuals / np.maximum(1 - leverage, _NOTHING)[:, None]
        return found

    if regularization is None:
        scale = float(variances.sum()) / max(1, len(variances)) or 1.0
        candidates = _CANDIDATES * scale
        squared = [float(np.mean(left_out_errors(a) ** 2)) for a in candidates]
        regularization = float(candidates[int(np.argmin(squared))])
    weight = directions @ (projected / (variances + regularization)[:, None])
    left_out = y + y_mean - left_out_errors(regularization)
    return LinearHead(weight, y_mean - x_mean @ weight, left_out, regularization)


def _decomposed(x: Array) -> tuple[Array, Array]:
    """Return the directions in which features vary, as columns, and how much they do."""
    wide = len(x) < x.shape[1]
    variances, vectors = np.linalg.eigh(x @ x.T if wide else x.T @ x)
    kept = variances > _NOTHING * max(float(variances[-1]), np.finfo(np.float64).tiny)
    variances, vectors = variances[kept], vectors[:, kept]
    return variances, x.T @ vectors / np.sqrt(variances) if wide else vectors
