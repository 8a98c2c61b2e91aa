"""The formulas of the schedulers, over hundreds of steps, against torch's and HuggingFace's."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as theirs

from onnxtrain.device import schedulers as ours
from onnxtrain.device.session import TrainingSession

STEPS = 400
RATE = 0.0123


@pytest.fixture
def optimizer():
    session = TrainingSession.from_folder(Path(__file__).parents[1] / "golden" / "mlp")
    return session.optimizer


def torch_rates(make, rate=RATE, values=None) -> list[float]:
    """The rates that a scheduler of torch gives, the first before any step."""
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate, momentum=0.9)
    scheduler = make(opt)
    rates = [opt.param_groups[0]["lr"]]
    for value in values or [None] * (STEPS - 1):
        opt.step()
        scheduler.step(*([] if value is None else [value]))
        rates.append(opt.param_groups[0]["lr"])
    return rates


def huggingface_cosine(warmup, total, cycles=0.5, floor=0.0):
    """The factor of transformers' get_cosine_with_min_lr_schedule_with_warmup."""

    def factor(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        progress = float(step - warmup) / float(max(1, total - warmup))
        wave = 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * progress))
        return max(0, wave * (1 - floor) + floor)

    return factor


def huggingface_linear(warmup, total):
    """The factor of transformers' get_linear_schedule_with_warmup."""

    def factor(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        return max(0.0, float(total - step) / float(max(1, total - warmup)))

    return factor


def one_cycle(**settings):
    def make(opt):
        return theirs.OneCycleLR(opt, RATE, STEPS, **settings)

    def own(opt):
        return ours.OneCycleLRScheduler(opt, RATE, STEPS, **settings)

    return own, make


LAMBDA = theirs.LambdaLR
CASES = {
    "linear": (
        lambda o: ours.LinearLRScheduler(o, 37, 350, RATE),
        lambda o: LAMBDA(o, huggingface_linear(37, 350)),
    ),
    "linear-no-warm-up": (
        lambda o: ours.LinearLRScheduler(o, 0, 400, RATE),
        lambda o: LAMBDA(o, huggingface_linear(0, 400)),
    ),
    "constant": (
        lambda o: ours.ConstantLRScheduler(o, 50, RATE),
        lambda o: LAMBDA(o, lambda s: s / 50 if s < 50 else 1.0),
    ),
    "cosine": (
        lambda o: ours.CosineLRScheduler(o, 40, 400, RATE),
        lambda o: LAMBDA(o, huggingface_cosine(40, 400)),
    ),
    "cosine-waves": (
        lambda o: ours.CosineLRScheduler(o, 10, 400, RATE, cycles=2.5),
        lambda o: LAMBDA(o, huggingface_cosine(10, 400, 2.5)),
    ),
    "cosine-minimum": (
        lambda o: ours.CosineLRScheduler(o, 40, 400, RATE, min_lr=RATE / 8),
        lambda o: LAMBDA(o, huggingface_cosine(40, 400, floor=0.125)),
    ),
    "cosine-annealing": (
        lambda o: ours.CosineLRScheduler(o, 0, 399, RATE, min_lr=1e-4),
        lambda o: theirs.CosineAnnealingLR(o, 399, 1e-4),
    ),
    "step": (lambda o: ours.StepLRScheduler(o, 30, 0.7, RATE), lambda o: theirs.StepLR(o, 30, 0.7)),
    "multistep": (
        lambda o: ours.MultiStepLRScheduler(o, [5, 80, 81, 300], 0.3, RATE),
        lambda o: theirs.MultiStepLR(o, [5, 80, 81, 300], 0.3),
    ),
    "exponential": (
        lambda o: ours.ExponentialLRScheduler(o, 0.987, RATE),
        lambda o: theirs.ExponentialLR(o, 0.987),
    ),
    "onecycle": one_cycle(),
    "onecycle-linear": one_cycle(anneal_strategy="linear", pct_start=0.17),
    "onecycle-three": one_cycle(three_phase=True),
    "onecycle-three-linear": one_cycle(
        three_phase=True, anneal_strategy="linear", pct_start=0.43, div_factor=7,
        final_div_factor=31,
    ),
    "onecycle-only-up": one_cycle(pct_start=1.0),
    "onecycle-only-down": one_cycle(pct_start=0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_formula(name, optimizer) -> None:
    own, make = CASES[name]
    scheduler = own(optimizer)
    rates = [scheduler.learning_rate(step) for step in range(STEPS)]
    np.testing.assert_allclose(rates, torch_rates(make), rtol=1e-12, atol=1e-17)
    assert len(set(rates)) > 3


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"patience": 3, "factor": 0.9, "cooldown": 4},
        {"patience": 0, "factor": 0.8, "threshold": 0.05, "min_lr": 1e-4},
        {"patience": 2, "factor": 0.5, "eps": 1e-4},
    ],
)
def test_plateau(mode, threshold_mode, settings, optimizer) -> None:
    rng = np.random.default_rng(5)
    values = list(rng.normal(size=300) * 0.2 + np.linspace(2, 1, 300) ** 2)
    optimizer.set_learning_rate(RATE)
    common = {"mode": mode, "threshold_mode": threshold_mode, **settings}
    scheduler = ours.PlateauLRScheduler(optimizer, initial_lr=RATE, **common)
    rates = [scheduler.state()["rate"]]
    for value in values:
        scheduler.step(value)
        rates.append(scheduler.state()["rate"])
        assert optimizer.get_learning_rate() == np.float32(rates[-1])
    expected = torch_rates(lambda o: theirs.ReduceLROnPlateau(o, **common), values=values)
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
    assert len(set(rates)) > 2
