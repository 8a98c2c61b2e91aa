"""Optimizers: ten steps equal torch's, each option; convergence; types, norms, groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxtrain.errors import BlockError, UnknownNameError
from onnxtrain.onnxblock.optim import (
    BY_NAME,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ClipGradNorm,
    ClipGradValue,
    Lion,
    MeZO,
    Optimizer,
    ParameterGroup,
    RMSprop,
)
from optimizer_cases import OF_SIZE, RATE, SHAPES, STEPS, Case, of_cases, sized, values
from optimizing import Array, Training


@of_cases
def test_ten_steps(case: Case) -> None:
    start, gradients = values(0), [values(i + 1) for i in range(STEPS)]
    training = Training(case.optimizer, start)
    for step in gradients:
        training.step(step, RATE)
    expected = case.reference(start, gradients)
    for name in SHAPES:
        np.testing.assert_allclose(
            training.arrays[name], expected[name], rtol=3e-6, atol=1e-6, err_msg=name
        )


@of_cases
def test_ten_steps_in_float64(case: Case) -> None:
    """The formulas themselves, without rounding; the learning rate is a float32."""
    start, gradients = values(0, np.float64), [values(i + 1, np.float64) for i in range(STEPS)]
    training = Training(case.optimizer, start)
    rate = float(np.float32(RATE))
    assert abs(rate - RATE) < 1e-9
    for step in gradients:
        training.step(step, RATE)
    expected = case.reference(start, gradients)
    for name in SHAPES:
        np.testing.assert_allclose(training.arrays[name], expected[name], rtol=1e-7, atol=1e-7)


@of_cases
def test_states(case: Case) -> None:
    states = case.optimizer.states(ir.DataType.FLOAT)
    assert [s.name for s in states] == [f"momentum{i}" for i in range(case.states)]
    assert {s.dtype for s in states} <= {ir.DataType.FLOAT}


def test_states_are_those_of_torch() -> None:
    """What is kept is what a checkpoint of ONNX Runtime has: the plain m and v."""
    start, gradients = values(0), [values(i + 1) for i in range(STEPS)]
    training = Training(AdamW(), start)
    tensor = torch.from_numpy(start["w"].copy()).requires_grad_()
    optimizer = torch.optim.AdamW([tensor])
    for step in gradients:
        training.step(step, RATE)
        tensor.grad = torch.from_numpy(step["w"])
        optimizer.step()
    kept = optimizer.state[tensor]
    np.testing.assert_allclose(
        training.arrays["w.momentum0"], kept["exp_avg"], rtol=2e-6, atol=1e-7
    )
    np.testing.assert_allclose(training.arrays["w.momentum1"], kept["exp_avg_sq"], rtol=2e-6)


@of_cases
def test_states_start_at_zero(case: Case) -> None:
    """A device that has no state of an optimizer begins with zeros, whatever the optimizer."""
    assert all(state.initial == 0.0 for state in case.optimizer.states(ir.DataType.FLOAT))


# ---- objectives ---------------------------------------------------------------------------------


def parabola(x: Array) -> tuple[float, Array]:
    target, curvature = np.array([1.0, -2.0, 0.5]), np.array([1.0, 3.0, 0.3])
    return float((curvature * (x - target) ** 2).sum()), 2 * curvature * (x - target)


def rosenbrock(x: Array) -> tuple[float, Array]:
    a, b = x
    return (
        float((1 - a) ** 2 + 20 * (b - a**2) ** 2),
        np.array([-2 * (1 - a) - 80 * a * (b - a**2), 40 * (b - a**2)]),
    )


# optimizer: the learning rate for the parabola and for Rosenbrock's valley
CONVERGING: dict[str, tuple[Optimizer, float, float]] = {
    "AdamW": (AdamW(), 0.1, 0.05),
    "AdamW-torch": (AdamW.torch(weight_decay=0.0), 0.1, 0.05),
    "Adam": (Adam(), 0.1, 0.05),
    "SGD": (SGD(), 0.1, 0.01),
    "SGD-momentum": (SGD(momentum=0.9), 0.02, 0.001),
    "SGD-nesterov": (SGD(momentum=0.9, nesterov=True), 0.02, 0.001),
    "SGD-norm": (SGD(ClipGradNorm(1.0)), 0.05, 0.01),
    "SGD-value": (SGD(ClipGradValue(1.0)), 0.05, 0.01),
    "RMSprop": (RMSprop(), 0.03, 0.01),
    "RMSprop-centered": (RMSprop(centered=True, momentum=0.5), 0.01, 0.003),
    "Adagrad": (Adagrad(), 0.8, 0.8),
    "Lion": (Lion(), 0.03, 0.03),
}


@pytest.mark.parametrize("objective", [parabola, rosenbrock], ids=["parabola", "rosenbrock"])
@pytest.mark.parametrize("name", CONVERGING)
def test_convergence(name: str, objective: Callable[[Array], tuple[float, Array]]) -> None:
    optimizer, *rates = CONVERGING[name]
    on_parabola = objective is parabola
    x = np.zeros(3, np.float32) if on_parabola else np.array([-0.5, 0.8], np.float32)
    rate, steps = rates[0] if on_parabola else rates[1], 1500
    training = Training(optimizer, {"x": x}, in_place=True)
    first = objective(x)[0]
    for step in range(steps):
        gradient = objective(training.arrays["x"])[1].astype(np.float32)
        training.step({"x": gradient}, rate * (1 - step / steps))
    assert objective(training.arrays["x"])[0] < 2e-3 * first


# ---- types --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_short_types_move_by_less_than_their_precision(dtype: ir.DataType) -> None:
    """The weight is kept to float32: many small steps add up."""
    start = {"w": np.ones(8, dtype.numpy())}
    training = Training(SGD(), start, in_place=True)
    for _ in range(1000):
        training.step({"w": np.ones(8, dtype.numpy())}, 1e-5)  # far below half a unit of 1.0
    np.testing.assert_allclose(training.arrays["w"].astype(np.float64), 0.99, atol=4e-3)
    whole = training.arrays["w"].astype(np.float64) + training.arrays["w.momentum0"]
    np.testing.assert_allclose(whole, 0.99, rtol=3e-5)


@of_cases
def test_float16_is_float32_rounded(case: Case) -> None:
    """Step by step the parameter is what float32 would be, rounded, for the same gradients."""
    start, gradients = sized(0, np.float16), [sized(i + 1, np.float16) for i in range(STEPS)]
    exact = Training(case.optimizer, {n: a.astype(np.float32) for n, a in start.items()})
    training = Training(case.optimizer, start)
    for step in gradients:
        exact.step({n: a.astype(np.float32) for n, a in step.items()}, RATE)
        training.step(step, RATE)
    for name in OF_SIZE:
        np.testing.assert_array_equal(
            training.arrays[name], exact.arrays[name].astype(np.float16), err_msg=name
        )


def test_type_without_optimizer() -> None:
    with pytest.raises(BlockError, match="INT32"):
        SGD().states(ir.DataType.INT32)


# ---- clipping and groups ------------------------------------------------------------------------


def test_norm_of_many_elements_is_exact() -> None:
    gradient = np.random.default_rng(0).standard_normal((1024, 768)).astype(np.float32)
    training = Training(SGD(ClipGradNorm(1.0)), {"w": np.zeros_like(gradient)})
    training.step({"w": gradient}, 1.0)
    norm = np.linalg.norm(gradient.astype(np.float64))
    np.testing.assert_allclose(-training.arrays["w"], gradient / (norm + 1e-6), rtol=1e-6)


def test_groups() -> None:
    """torch with the same groups; the first that matches counts."""
    optimizer = AdamW(
        weight_decay=0.1,
        flavour="torch",
        eps=1e-8,
        groups=[
            ParameterGroup("b", weight_decay=0.0, lr_scale=2.0),
            ParameterGroup(["b", "s*"], lr_scale=0.5),
            ParameterGroup("on?", weight_decay=0.4),
        ],
    )
    start, gradients = values(0), [values(i + 1) for i in range(STEPS)]
    training = Training(optimizer, start)
    tensors = {n: torch.from_numpy(np.array(a)).requires_grad_() for n, a in start.items()}
    reference = torch.optim.AdamW(
        [
            {"params": [tensors["w"]]},
            {"params": [tensors["b"]], "weight_decay": 0.0, "lr": 2 * RATE},
            {"params": [tensors["scale"]], "lr": RATE / 2},
            {"params": [tensors["one"]], "weight_decay": 0.4},
        ],
        lr=RATE,
        weight_decay=0.1,
    )
    for step in gradients:
        training.step(step, RATE)
        for name, tensor in tensors.items():
            tensor.grad = torch.from_numpy(np.array(step[name]))
        reference.step()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(
            training.arrays[name], tensor.detach(), rtol=3e-6, atol=1e-6, err_msg=name
        )


def test_group_that_matches_nothing() -> None:
    optimizer = SGD(groups=[ParameterGroup("w"), ParameterGroup("*.bias")])
    with pytest.raises(UnknownNameError, match=r"'\*\.bias' matches no trainable parameter"):
        Training(optimizer, values(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamW(betas=(1.0, 0.9)),
        lambda: AdamW(eps=-1.0),
        lambda: AdamW(flavour="keras"),  # type: ignore[arg-type]
        lambda: AdamW(clip_grad=1.0),  # type: ignore[arg-type]
        lambda: SGD(weight_decay=-0.1),
        lambda: SGD(weight_decay=float("nan")),
        lambda: SGD(nesterov=True),
        lambda: SGD(momentum=0.9, dampening=0.1, nesterov=True),
        lambda: RMSprop(alpha=1.0),
        lambda: Lion(betas=(0.0, 0.9)),
        lambda: MeZO(epsilon=0.0),
        lambda: MeZO(distribution="cauchy"),
        lambda: ClipGradNorm(0.0),
        lambda: ClipGradValue(-1.0),
        lambda: ParameterGroup("w", weight_decay=-1.0),
        lambda: ParameterGroup("w", lr_scale=-1.0),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], object]) -> None:
    with pytest.raises(BlockError):
        make()


def test_every_optimizer_has_a_name() -> None:
    ours = [k for k in Optimizer.__subclasses__() if k.__module__ == AdamW.__module__]
    assert {kind.__name__.lower(): kind for kind in (*ours, MeZO)} == BY_NAME
    for kind in BY_NAME.values():
        assert kind().groups == ()
