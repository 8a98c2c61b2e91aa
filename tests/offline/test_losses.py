"""Every loss in every reduction, in values and gradients against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto

from loss_models import build, evaluate
from onnxtrain import onnxblock
from onnxtrain.onnxblock import loss

REDUCTIONS = ["mean", "sum", "none"]
KIND = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}


def expect(
    block: onnxblock.Block,
    torch_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: np.ndarray,
    target: np.ndarray,
    target_name: str = "target",
    rtol: float = 1e-5,
    shape: Any = None,
) -> None:
    built = build(block, x.shape if shape is None else shape, KIND[x.dtype.type])
    found, gradient = evaluate(built, {"x": x, target_name: target})
    wide = torch.tensor(x.astype(np.float64), requires_grad=True)
    aim = target.astype(np.float64) if target.dtype == np.float32 else target
    expected = torch_loss(wide, torch.tensor(aim))
    expected.sum().backward()
    assert found.shape == tuple(expected.shape)
    assert found.dtype == gradient.dtype == x.dtype
    np.testing.assert_allclose(found, expected.detach(), rtol=rtol, atol=rtol)
    np.testing.assert_allclose(gradient, wide.grad, rtol=rtol, atol=rtol)


# ---- losses of numbers -------------------------------------------------------------------------

rng = np.random.default_rng(1)
WEIGHT = rng.random((4, 1)).astype(np.float32) + 0.5
POSITIVE = np.array([0.5, 2.0, 7.0], np.float32)


def bce(weight: np.ndarray | None = None, positive: np.ndarray | None = None) -> Callable[..., Any]:
    def make(reduction: str) -> tuple[onnxblock.Block, Callable[..., torch.Tensor]]:
        tensors = [None if a is None else torch.tensor(a.astype(float)) for a in (weight, positive)]
        ours = loss.BCEWithLogitsLoss(weight, reduction, positive)

        def theirs(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return F.binary_cross_entropy_with_logits(
                x, t, tensors[0], reduction=reduction, pos_weight=tensors[1]
            )

        return ours, theirs

    return make


ELEMENTWISE: dict[str, Callable[[str], tuple[onnxblock.Block, Callable[..., torch.Tensor]]]] = {
    "mse": lambda r: (loss.MSELoss(r), torch.nn.MSELoss(reduction=r)),
    "l1": lambda r: (loss.L1Loss(r), torch.nn.L1Loss(reduction=r)),
    "huber": lambda r: (loss.HuberLoss(r), torch.nn.HuberLoss(reduction=r)),
    "huber-delta": lambda r: (loss.HuberLoss(r, 0.3), torch.nn.HuberLoss(r, 0.3)),
    "smooth-l1": lambda r: (loss.SmoothL1Loss(r), torch.nn.SmoothL1Loss(reduction=r)),
    "smooth-l1-beta": lambda r: (
        loss.SmoothL1Loss(r, 0.3),
        torch.nn.SmoothL1Loss(reduction=r, beta=0.3),
    ),
    "smooth-l1-0": lambda r: (
        loss.SmoothL1Loss(r, 0.0),
        torch.nn.SmoothL1Loss(reduction=r, beta=0.0),
    ),
    "bce": bce(),
    "bce-weight": bce(WEIGHT),
    "bce-pos": bce(None, POSITIVE),
    "bce-both": bce(WEIGHT, POSITIVE),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_loss(name: str, reduction: str, dtype: type) -> None:
    ours, theirs = ELEMENTWISE[name](reduction)
    x = rng.standard_normal((4, 3)).astype(dtype)
    target = rng.random((4, 3)).astype(dtype)
    x[0, 0] = target[0, 0]  # where |x - t| has a kink
    x[0, 1] = 0.0
    expect(ours, theirs, x, target, rtol=1e-5 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_loss_of_symbolic_shape(name: str) -> None:
    ours, theirs = ELEMENTWISE[name]("mean")
    x, target = rng.standard_normal((2, 4, 3)).astype(np.float32)
    expect(ours, theirs, x, target, shape=["batch", 3])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("positive", [None, POSITIVE], ids=["plain", "pos_weight"])
def test_bce_of_large_logits(positive: np.ndarray | None, dtype: type) -> None:
    ours, theirs = bce(None, positive)("none")
    x = np.array([100, -100, 100, -100, 30, -30, 20, -20, 15, -15, 0, 88], dtype).reshape(4, 3)
    target = np.array([1, 0, 0, 1, 1, 0, 0, 1, 0.25, 0.75, 0.5, 1], dtype).reshape(4, 3)
    # onnxruntime's Sigmoid in float32 is wrong by up to 1e-7, which the gradient shows.
    expect(ours, theirs, x, target, rtol=1e-6 if dtype == np.float32 else 1e-12)


def test_confident_bce_keeps_its_digits() -> None:
    built = build(loss.BCEWithLogitsLoss(reduction="none"), [2])
    found, _ = evaluate(
        built, {"x": np.array([-16, 16], np.float32), "target": np.array([0, 1], np.float32)}
    )
    np.testing.assert_allclose(found, [np.exp(-16.0)] * 2, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "batchmean"])
def test_kl_divergence(reduction: str, log_target: bool) -> None:
    scores, targets = rng.standard_normal((2, 4, 3, 2))
    x = torch.log_softmax(torch.tensor(scores), 1).numpy()
    target = torch.softmax(torch.tensor(targets), 1).numpy()
    target[0, 0] = 0.0 if not log_target else 1e-3
    if log_target:
        target = np.log(target)
    for shape in (x.shape, ["batch", 3, "n"]):
        expect(
            loss.KLDivLoss(reduction, log_target),
            torch.nn.KLDivLoss(reduction=reduction, log_target=log_target),
            x, target, rtol=1e-12, shape=shape,
        )  # fmt: skip


# ---- losses of labels --------------------------------------------------------------------------

CLASSES = 5
CLASS_WEIGHT = np.array([0.5, 2.0, 1.0, 0.25, 1.5], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": CLASS_WEIGHT},
    "ignore": {"ignore_index": -100},
    "ignore-a-class": {"ignore_index": 2},
    "ignore-255": {"ignore_index": 255},
    "weight-ignore": {"weight": CLASS_WEIGHT, "ignore_index": -1},
    "smooth": {"label_smoothing": 0.1},
    "smooth-weight": {"label_smoothing": 0.2, "weight": CLASS_WEIGHT},
    "smooth-weight-ignore": {
        "label_smoothing": 0.3, "weight": CLASS_WEIGHT, "ignore_index": -100,
    },
}  # fmt: skip
LIKELIHOOD = [name for name in OPTIONS if "smooth" not in name]
SHAPES = [(6, CLASSES), (2, CLASSES, 3), (2, CLASSES, 2, 3)]


def torch_options(options: dict[str, Any]) -> dict[str, Any]:
    changed = dict(options)
    if "weight" in options:
        changed["weight"] = torch.tensor(options["weight"].astype(float))
    return changed


def scores_and_labels(
    shape: tuple[int, ...], options: dict[str, Any], dtype: type
) -> tuple[np.ndarray, np.ndarray]:
    x = (3 * rng.standard_normal(shape)).astype(dtype)
    labels = rng.integers(0, CLASSES, (shape[0], *shape[2:]))
    labels.flat[:3] = 0, CLASSES - 1, 1
    if "ignore_index" in options:
        labels.flat[1::3] = options["ignore_index"]
    return x, labels


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=["2d", "3d", "4d"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy(name: str, reduction: str, shape: tuple[int, ...], dtype: type) -> None:
    options = OPTIONS[name]
    x, labels = scores_and_labels(shape, options, dtype)
    x.flat[:2] = 100, -100
    symbolic = [f"d{i}" if i != 1 else d for i, d in enumerate(shape)]
    expect(
        loss.CrossEntropyLoss(reduction=reduction, **options),
        torch.nn.CrossEntropyLoss(reduction=reduction, **torch_options(options)),
        x, labels, "labels", 1e-5 if dtype == np.float32 else 1e-12, symbolic,
    )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LIKELIHOOD)
def test_negative_log_likelihood(name: str, reduction: str) -> None:
    options = OPTIONS[name]
    for shape in SHAPES:
        x, labels = scores_and_labels(shape, options, np.float64)
        expect(
            loss.NLLLoss(reduction=reduction, **options),
            torch.nn.NLLLoss(reduction=reduction, **torch_options(options)),
            x, labels, "labels", 1e-12,
        )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["plain", "smooth-weight-ignore"])
@pytest.mark.parametrize(
    ("axis", "shape"),
    [(-1, (2, 3, CLASSES)), (2, (2, 3, CLASSES)), (-1, (4, CLASSES)), (0, (CLASSES, 4)),
     (0, (CLASSES, 2, 3)), (2, (2, 3, CLASSES, 2)), (3, (2, 3, 2, CLASSES))],
)  # fmt: skip
def test_class_axis(axis: int, shape: tuple[int, ...], name: str, reduction: str) -> None:
    options = OPTIONS[name]
    position = axis % len(shape)
    without = [d for i, d in enumerate(shape) if i != position]
    x = rng.standard_normal(shape)
    labels = rng.integers(0, CLASSES, without)
    if "ignore_index" in options:
        labels.flat[1] = options["ignore_index"]
    torch_ce = torch.nn.CrossEntropyLoss(reduction=reduction, **torch_options(options))
    symbolic = [f"d{i}" if i != position else d for i, d in enumerate(shape)]
    block = loss.CrossEntropyLoss(reduction=reduction, class_axis=axis, **options)
    expect(block, lambda x, t: torch_ce(x.movedim(position, 1), t), x, labels, "labels", 1e-12)
    expect(
        block, lambda x, t: torch_ce(x.movedim(position, 1), t), x, labels, "labels", 1e-12,
        symbolic,
    )  # fmt: skip
    built = build(block, symbolic)
    dims = [d.dim_param for d in built.graph.input[1].type.tensor_type.shape.dim]
    assert dims == [d for i, d in enumerate(symbolic) if i != position]


def test_unknown_number_of_classes() -> None:
    x, labels = scores_and_labels((6, CLASSES), {}, np.float64)
    expect(
        loss.CrossEntropyLoss(label_smoothing=0.1),
        torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        x, labels, "labels", 1e-12, ["batch", "classes"],
    )  # fmt: skip


@pytest.mark.parametrize("block", [loss.CrossEntropyLoss, loss.NLLLoss])
@pytest.mark.parametrize("wrong", [CLASSES, -1, -2, 10**9, -(10**18)])
@pytest.mark.parametrize("options", [{}, {"weight": CLASS_WEIGHT}, {"ignore_index": -100}])
def test_a_label_that_is_no_class(
    block: type[onnxblock.Block], wrong: int, options: dict[str, Any]
) -> None:
    x, _ = scores_and_labels((3, CLASSES), {}, np.float32)
    feeds = {"x": x, "labels": np.array([1, wrong, 2])}
    for reduction in ("mean", "sum"):
        found, gradient = evaluate(build(block(reduction=reduction, **options), x.shape), feeds)
        assert np.isnan(found)
        assert np.isfinite(gradient).all()
        assert not gradient[1].any()
        assert gradient[0].any()
    each, _ = evaluate(build(block(reduction="none", **options), x.shape), feeds)
    assert np.isnan(each).tolist() == [False, True, False]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"weight": CLASS_WEIGHT}, {"label_smoothing": 0.1}])
def test_nothing_but_ignored_labels(reduction: str, options: dict[str, Any]) -> None:
    x, _ = scores_and_labels((3, CLASSES), {}, np.float32)
    block = loss.CrossEntropyLoss(reduction=reduction, ignore_index=-100, **options)
    found, gradient = evaluate(build(block, x.shape), {"x": x, "labels": np.full(3, -100)})
    assert not found.any()
    assert not gradient.any()


def test_weights_may_be_lists() -> None:
    x, labels = scores_and_labels((6, CLASSES), {}, np.float64)
    expect(
        loss.CrossEntropyLoss([1, 2, 3, 4, 5]),
        torch.nn.CrossEntropyLoss(torch.arange(1.0, 6.0).double()),
        x, labels, "labels", 1e-12,
    )  # fmt: skip
    ours = loss.BCEWithLogitsLoss(pos_weight=[1, 2, 3], weight=[0.5])
    theirs = bce(np.array([0.5]), np.array([1, 2, 3]))("mean")[1]
    expect(ours, theirs, x[:, :3], rng.random((6, 3)), rtol=1e-12)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize(
    "block",
    [loss.MSELoss(), loss.HuberLoss(), loss.BCEWithLogitsLoss(pos_weight=[2.0]), loss.KLDivLoss(),
     loss.CrossEntropyLoss([1, 2, 3], ignore_index=1, label_smoothing=0.1)],
    ids=lambda b: type(b).__name__,
)  # fmt: skip
def test_half_types(block: onnxblock.Block, kind: int) -> None:
    built = build(block, ["batch", 3], kind)
    onnx.checker.check_model(built, full_check=True)
    assert built.graph.output[0].type.tensor_type.elem_type == kind
    if kind == TensorProto.BFLOAT16:
        return  # onnxruntime has too few kernels of it on the CPU
    x, target = rng.random((2, 4, 3), dtype=np.float32)
    name = built.graph.input[1].name
    aim = target if name == "target" else np.array([0, 1, 2, 0])
    expected = evaluate(build(block, ["batch", 3]), {"x": x, name: aim})
    half = {"x": x.astype(np.float16), name: aim.astype(np.float16) if aim is target else aim}
    for found, exact in zip(evaluate(built, half), expected, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("opset", [12, 13, 14, 15, 18, 21])
@pytest.mark.parametrize("shape", [["batch", 3], ["batch", "time", 3]])
def test_opsets(opset: int, shape: list[Any]) -> None:
    blocks: list[onnxblock.Block] = [
        loss.MSELoss(), loss.L1Loss("sum"), loss.HuberLoss(), loss.SmoothL1Loss(),
        loss.BCEWithLogitsLoss(), loss.KLDivLoss("batchmean"), loss.NLLLoss(class_axis=-1),
        loss.NLLLoss(reduction="none", class_axis=-1),
        loss.CrossEntropyLoss([1, 2, 3], "mean", 1, label_smoothing=0.1, class_axis=-1),
    ]  # fmt: skip
    x = rng.random((4, 2, 3)[-len(shape) :], dtype=np.float32)
    for block in blocks:
        built = build(block, shape, opset=opset)
        assert built.opset_import[0].version == opset
        name = built.graph.input[1].name
        target = np.ones(x.shape[:-1], np.int64) if name == "labels" else x
        assert np.isfinite(evaluate(built, {"x": x, name: target})[1]).all()


@pytest.mark.parametrize("opset", [7, 9, 11])
def test_opsets_without_losses_of_classes(opset: int) -> None:
    blocks = [loss.MSELoss("sum"), loss.L1Loss(), loss.BCEWithLogitsLoss(pos_weight=[1, 2, 3])]
    if opset >= 8:
        blocks += [loss.HuberLoss(), loss.SmoothL1Loss()]
    if opset >= 11:
        blocks += [loss.KLDivLoss("batchmean")]
    x, target = rng.random((2, 4, 3), dtype=np.float32)
    for block in blocks:
        built = build(block, ["batch", 3], opset=opset)
        onnx.checker.check_model(built, full_check=True)
        assert built.opset_import[0].version == opset
        expected = evaluate(build(block, ["batch", 3]), {"x": x, "target": target})
        found = evaluate(built, {"x": x, "target": target})
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-7)
