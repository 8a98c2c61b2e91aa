"""The optimizers with each of their options, and what each is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from onnxtrain.onnxblock.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ClipGradNorm,
    ClipGradValue,
    Lion,
    Optimizer,
    RMSprop,
)
from optimizing import Array

RATE = 0.05
STEPS = 10
SHAPES = {"w": (3, 4), "b": (4,), "scale": (), "one": (1,)}


def values(seed: int, dtype: Any = np.float32, factor: float = 1.0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {n: np.asarray(factor * rng.standard_normal(s), dtype) for n, s in SHAPES.items()}


# ---- references ---------------------------------------------------------------------------------

Reference = Callable[[dict[str, Array], list[dict[str, Array]]], dict[str, Array]]


def by_torch(kind: Any, clip: Callable[[Any], Any] | None = None, **settings: Any) -> Reference:
    def run(start: dict[str, Array], gradients: list[dict[str, Array]]) -> dict[str, Array]:
        tensors = {n: torch.from_numpy(np.array(a)).requires_grad_() for n, a in start.items()}
        optimizer = kind(tensors.values(), lr=RATE, **settings)
        for step in gradients:
            for name, tensor in tensors.items():
                tensor.grad = torch.from_numpy(np.array(step[name]))
            if clip is not None:
                clip(list(tensors.values()))
            optimizer.step()
        return {name: t.detach().numpy() for name, t in tensors.items()}

    return run


def by_numpy(formula: Callable[..., Any], states: int) -> Reference:
    """Run a formula on float64 numbers; it gets t, p, g and the states, and returns the new."""

    def run(start: dict[str, Array], gradients: list[dict[str, Array]]) -> dict[str, Array]:
        result = {}
        for name, array in start.items():
            p, kept = array.astype(np.float64), [np.zeros(array.shape)] * states
            for t, step in enumerate(gradients, 1):
                p, *kept = formula(t, p, step[name].astype(np.float64), *kept)
            result[name] = p
        return result

    return run


def huggingface(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    decay: float = 0.0,
    correct: bool = True,
) -> Reference:
    def formula(t: int, p: Array, g: Array, m: Array, v: Array) -> tuple[Array, ...]:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        rate = RATE * (1 - b2**t) ** 0.5 / (1 - b1**t) if correct else RATE
        p = p - rate * m / (np.sqrt(v) + eps)
        return p - RATE * decay * p, m, v

    return by_numpy(formula, 2)


def lion(b1: float = 0.9, b2: float = 0.99, decay: float = 0.0) -> Reference:
    def formula(t: int, p: Array, g: Array, m: Array) -> tuple[Array, ...]:
        p = p * (1 - RATE * decay) - RATE * np.sign(b1 * m + (1 - b1) * g)
        return p, b2 * m + (1 - b2) * g

    return by_numpy(formula, 1)


def norm_to(limit: float) -> Callable[[Any], Any]:
    return lambda tensors: torch.nn.utils.clip_grad_norm_(tensors, limit)


def values_to(limit: float) -> Callable[[Any], Any]:
    return lambda tensors: torch.nn.utils.clip_grad_value_(tensors, limit)


@dataclass(frozen=True)
class Case:
    """An optimizer with its options, and what it is compared with."""

    name: str
    optimizer: Optimizer
    reference: Reference
    states: int


t = torch.optim
CASES = [
    Case("AdamW", AdamW(), huggingface(), 2),
    Case("AdamW-betas", AdamW(betas=(0.5, 0.9)), huggingface(0.5, 0.9), 2),
    Case("AdamW-no-betas", AdamW(betas=(0.0, 0.0)), huggingface(0.0, 0.0), 2),
    Case("AdamW-eps", AdamW(eps=0.1), huggingface(eps=0.1), 2),
    Case("AdamW-decay", AdamW(weight_decay=0.3), huggingface(decay=0.3), 2),
    Case("AdamW-uncorrected", AdamW(False), huggingface(correct=False), 2),
    Case("AdamW-torch", AdamW.torch(), by_torch(t.AdamW), 2),
    Case(
        "AdamW-torch-options",
        AdamW(True, (0.8, 0.99), 0.1, 0.2, flavour="torch"),
        by_torch(t.AdamW, betas=(0.8, 0.99), eps=0.1, weight_decay=0.2),
        2,
    ),
    Case(
        "AdamW-torch-norm",
        AdamW.torch(clip_grad=ClipGradNorm(0.5)),
        by_torch(t.AdamW, norm_to(0.5)),
        2,
    ),
    Case("Adam", Adam(), by_torch(t.Adam), 2),
    Case(
        "Adam-decay-norm",
        Adam((0.8, 0.99), 1e-3, 0.2, ClipGradNorm(0.5)),
        by_torch(t.Adam, norm_to(0.5), betas=(0.8, 0.99), eps=1e-3, weight_decay=0.2),
        2,
    ),
    Case("SGD", SGD(), by_torch(t.SGD), 0),
    Case("SGD-decay", SGD(weight_decay=0.3), by_torch(t.SGD, weight_decay=0.3), 0),
    Case("SGD-norm", SGD(ClipGradNorm(0.5)), by_torch(t.SGD, norm_to(0.5)), 0),
    Case("SGD-norm-idle", SGD(ClipGradNorm(1e3)), by_torch(t.SGD, norm_to(1e3)), 0),
    Case("SGD-value", SGD(ClipGradValue(0.4)), by_torch(t.SGD, values_to(0.4)), 0),
    Case(
        "SGD-decay-norm",
        SGD(ClipGradNorm(0.5), weight_decay=0.3),
        by_torch(t.SGD, norm_to(0.5), weight_decay=0.3),
        0,
    ),
    Case("SGD-momentum", SGD(momentum=0.9), by_torch(t.SGD, momentum=0.9), 1),
    Case(
        "SGD-dampening",
        SGD(momentum=0.9, dampening=0.4),
        by_torch(t.SGD, momentum=0.9, dampening=0.4),
        1,
    ),
    Case(
        "SGD-dampening-decay-norm",
        SGD(ClipGradNorm(0.5), momentum=0.9, dampening=0.4, weight_decay=0.3),
        by_torch(t.SGD, norm_to(0.5), momentum=0.9, dampening=0.4, weight_decay=0.3),
        1,
    ),
    Case(
        "SGD-nesterov",
        SGD(momentum=0.9, nesterov=True),
        by_torch(t.SGD, momentum=0.9, nesterov=True),
        1,
    ),
    Case(
        "SGD-nesterov-decay-norm",
        SGD(ClipGradNorm(0.5), momentum=0.9, nesterov=True, weight_decay=0.3),
        by_torch(t.SGD, norm_to(0.5), momentum=0.9, nesterov=True, weight_decay=0.3),
        1,
    ),
    Case("RMSprop", RMSprop(), by_torch(t.RMSprop), 1),
    Case(
        "RMSprop-norm",
        RMSprop(0.9, 1e-3, clip_grad=ClipGradNorm(0.5)),
        by_torch(t.RMSprop, norm_to(0.5), alpha=0.9, eps=1e-3),
        1,
    ),
    Case("RMSprop-decay", RMSprop(weight_decay=0.3), by_torch(t.RMSprop, weight_decay=0.3), 1),
    Case("RMSprop-centered", RMSprop(centered=True), by_torch(t.RMSprop, centered=True), 2),
    Case(
        "RMSprop-momentum-norm",
        RMSprop(momentum=0.5, clip_grad=ClipGradNorm(0.5)),
        by_torch(t.RMSprop, norm_to(0.5), momentum=0.5),
        2,
    ),
    Case(
        "RMSprop-everything",
        RMSprop(0.9, 1e-3, 0.3, 0.5, True, ClipGradNorm(0.5)),
        by_torch(
            t.RMSprop,
            norm_to(0.5),
            alpha=0.9,
            eps=1e-3,
            weight_decay=0.3,
            momentum=0.5,
            centered=True,
        ),
        3,
    ),
    Case("Adagrad", Adagrad(), by_torch(t.Adagrad), 1),
    Case(
        "Adagrad-options",
        Adagrad(0.2, 0.3, 0.4, 1e-3, ClipGradNorm(0.5)),
        by_torch(
            t.Adagrad,
            norm_to(0.5),
            lr_decay=0.2,
            weight_decay=0.3,
            eps=1e-3,
            initial_accumulator_value=0.4,
        ),
        1,
    ),
    Case("Lion", Lion(), lion(), 1),
    Case("Lion-options", Lion((0.8, 0.95), 0.3), lion(0.8, 0.95, 0.3), 1),
]
of_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

OF_SIZE = {"table": (64, 24), "vector": (96,), "prime": (31,)}
TYPES = [np.float32, np.float64, np.float16]


def sized(seed: int, dtype: Any = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(dtype) for n, s in OF_SIZE.items()}
