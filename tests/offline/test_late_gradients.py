"""Gradients that are larger than what they are computed from are computed with the updates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxtrain
from graphs import model, value
from onnxtrain import optim
from onnxtrain.offline.optimizers import late_gradients

HERE = Path(__file__).resolve().parent
WIDE = 300  # 300 × 300 weights are late where the batch is small
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def weights(*shape: int) -> Array:
    """Different ones each time: equal matrices train as one."""
    return (RNG.standard_normal(shape) * 0.05).astype(np.float32)


def layers(batch: int | str, *, length: int = 0, bias: bool = True) -> onnx.ModelProto:
    """Two wide linear layers and a small one, on rows or on sequences."""
    nodes, tensors, at = [], dict[str, Array](), "x"
    for name, width in (("a", WIDE), ("b", WIDE), ("c", 3)):
        tensors[f"{name}.w"] = weights(WIDE, width)
        nodes.append(helper.make_node("MatMul", [at, f"{name}.w"], [f"{name}.xw"]))
        at = f"{name}.xw"
        if bias:
            tensors[f"{name}.b"] = weights(width)
            nodes.append(helper.make_node("Add", [at, f"{name}.b"], [f"{name}.y"]))
            at = f"{name}.y"
        if width == WIDE:
            nodes.append(helper.make_node("Relu", [at], [f"{name}.r"]))
            at = f"{name}.r"
    shape = [batch, *([length] if length else [])]
    return model(nodes, [value("x", [*shape, WIDE])], [value(at, [*shape, 3])], tensors)


def convolutions(batch: int | str, side: int = 4) -> onnx.ModelProto:
    """Two convolutions of 90 × 90 × 9 weights."""
    nodes, at = [], "x"
    for name in "ab":
        nodes += [
            helper.make_node("Conv", [at, f"{name}.w"], [f"{name}.y"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"{name}.y"], [f"{name}.r"]),
        ]
        at = f"{name}.r"
    tensors = {f"{name}.w": weights(90, 90, 3, 3) for name in "ab"}
    shape = [batch, 90, side, side]
    return model(nodes, [value("x", shape)], [value(at, shape)], tensors)


def late(folder: Path) -> int:
    """How many products are in the branch of the updates."""
    step = onnx.load(folder / "step_model.onnx", load_external_data=False)
    (updates,) = (n for n in step.graph.node if n.op_type == "If")
    branch = helper.get_node_attr_value(updates, "then_branch")
    kinds = ("Gemm", "MatMul", "ConvGradWeight")
    return sum(node.op_type.partition("_")[0] in kinds for node in branch.node)


def prepared(net: onnx.ModelProto, folder: Path, **more: Any) -> Path:
    onnxtrain.prepare(net, folder, **{"loss": "mse", "optimizer": "adamw", **more})
    return folder


@pytest.mark.parametrize(
    ("net", "count"),
    [
        (layers(8), 2),
        (layers("batch"), 2),
        (layers(8, bias=False), 2),
        (layers(2, length=4), 2),
        (layers("batch", length=4), 0),  # rows of an unknown number
        (layers(200), 1),  # the first layer reads what is fed
        (layers(2000), 0),
        (convolutions(2), 2),
        (convolutions("batch", 2), 2),
        (convolutions(16, 16), 0),
    ],
    ids=["linear", "symbolic", "no-bias", "sequences", "symbolic-sequences", "large-batch",
         "huge-batch", "conv", "symbolic-conv", "large-images"],
)  # fmt: skip
def test_large_gradients_of_small_factors_are_late(
    net: onnx.ModelProto, count: int, tmp_path: Path
) -> None:
    assert late(prepared(net, tmp_path)) == count


def tied() -> onnx.ModelProto:
    """A weight that two layers use: its gradient is a sum of products."""
    net = layers(8)
    for node in net.graph.node:
        node.input[:] = ["a.w" if name == "b.w" else name for name in node.input]
    return net


def factored() -> onnx.ModelProto:
    """A weight that is a product of two parameters: the gradient of each reads the other."""
    nodes = [
        helper.make_node("MatMul", ["u", "v"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    tensors = {"u": weights(WIDE, WIDE), "v": weights(WIDE, WIDE)}
    return model(nodes, [value("x", [4, WIDE])], [value("y", [4, WIDE])], tensors)


@pytest.mark.parametrize(
    ("net", "more"),
    [
        (tied(), {}),
        (factored(), {}),
        (layers(8), {"optimizer": optim.AdamW(clip_grad=optim.ClipGradNorm(1.0))}),
        (layers(8), {"proximal": True}),
    ],
    ids=["tied", "factored", "clipped", "proximal"],
)
def test_others_are_not(net: onnx.ModelProto, more: dict[str, Any], tmp_path: Path) -> None:
    assert late(prepared(net, tmp_path, **more)) == 0


@pytest.mark.parametrize("optimizer", ["adamw", "sgd:momentum=0.9", "lion"])
@pytest.mark.parametrize("net", [layers("batch"), convolutions(2)], ids=["linear", "conv"])
def test_steps_are_the_same(
    net: onnx.ModelProto, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and as the training and the optimizer graph take them."""
    folders = [prepared(net, tmp_path / "late", optimizer=optimizer)]
    monkeypatch.setattr(late_gradients, "_pays", lambda size, kept: False)
    folders.append(prepared(net, tmp_path / "kept", optimizer=optimizer))
    assert [late(folder) > 0 for folder in folders] == [True, False]
    data, ends = batch_for(net, 2), []
    for folder, fused in ((folders[0], True), (folders[1], True), (folders[0], False)):
        session = onnxtrain.TrainingSession(folder, native=False)
        for _ in range(3):
            take_step(session, data, fused)
        assert session.skipped_steps == 0
        arrays = [parameter.data for _, parameter in session.state.parameters]
        ends.append(np.concatenate([array.ravel() for array in arrays]))
    np.testing.assert_array_equal(ends[0], ends[1])
    np.testing.assert_array_equal(ends[0], ends[2])


def batch_for(net: onnx.ModelProto, batch: int) -> tuple[Array, ...]:
    """Random values for the input, and for the output as targets."""
    rng = np.random.default_rng(1)
    shapes = (
        [d.dim_value or batch for d in v.type.tensor_type.shape.dim]
        for v in (net.graph.input[0], net.graph.output[0])
    )
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def take_step(session: onnxtrain.TrainingSession, data: Sequence[Array], fused: bool) -> None:
    if fused:
        session.step(*data)
        return
    session.train_step(*data)
    session.optimizer_step()
    session.lazy_reset_grad()


def steps_and_state(
    folder: Path, data: Sequence[Array], fused: bool = True
) -> tuple[int, bytes, bytes]:
    session = onnxtrain.TrainingSession(folder)
    before = session.state.to_bytes(include_optimizer_state=True)
    take_step(session, data, fused)
    after = session.state.to_bytes(include_optimizer_state=True, allow_nonfinite=True)
    return session.skipped_steps, before, after


@pytest.mark.parametrize("fused", [True, False], ids=["step", "two-graphs"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("spoil", "by"),
    [(0, np.nan), (0, np.inf), (1, np.nan), (1, -np.inf), (0, 3e38)],
    ids=["nan-input", "infinite-input", "nan-target", "infinite-target", "overflow"],
)
def test_factors_that_are_not_finite_change_nothing(
    optimizer: str, spoil: int, by: float, fused: bool, tmp_path: Path
) -> None:
    folder = prepared(layers(8), tmp_path, optimizer=optimizer)
    assert late(folder) == 2
    data = batch_for(layers(8), 8)
    data[spoil][3, 1] = by
    skipped, before, after = steps_and_state(folder, data, fused)
    assert skipped == 1
    assert before == after


def test_both_graphs_bound_a_product_alike(tmp_path: Path) -> None:
    """The gradient is small, as the large row of x meets a zero; but the norms are not."""
    net = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", [2, WIDE])],
        [value("y", [2, WIDE])], {"w": weights(WIDE, WIDE)},
    )  # fmt: skip
    folder = prepared(net, tmp_path)
    w = onnx.numpy_helper.to_array(net.graph.initializer[0])
    for scale, is_skipped in ((1e15, 1), (1.0, 0)):
        x, y = np.zeros((2, WIDE), np.float32), np.zeros((2, WIDE), np.float32)
        x[0, 0], x[1], y[1] = scale, 1, 1e9
        y[0] = x[0, 0] * w[0]
        for fused in (True, False):
            skipped, before, after = steps_and_state(folder, (x, y), fused)
            assert (skipped, before == after) == (is_skipped, is_skipped)


def test_the_parameter_is_named(tmp_path: Path) -> None:
    """A product that overflows although its factors are finite: what is reported is its weight."""
    net = layers(8, bias=False)
    folder = prepared(net, tmp_path, optimizer="sgd")
    x, y = batch_for(net, 8)
    session = onnxtrain.TrainingSession(folder)
    session.step(x * 1e18, y * 1e25)
    assert session.skipped_steps == 1
    assert "a.w" in session.state._training.not_finite


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e6])
def test_large_and_small_numbers_pass(scale: float, tmp_path: Path) -> None:
    net = layers(8)
    folder = prepared(net, tmp_path, optimizer="sgd")
    x, y = batch_for(net, 8)
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(1e-30)
    session.step(x * np.float32(scale), y)
    assert session.skipped_steps == 0


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers of 2 million weights: the gradients are in memory one after the other."""
    width, count = 1448, 6
    nodes, at = [], "x"
    for i in range(count):
        nodes += [
            helper.make_node("MatMul", [at, f"w{i}"], [f"m{i}"]),
            helper.make_node("Tanh", [f"m{i}"], [f"t{i}"]),
        ]
        at = f"t{i}"
    tensors = {f"w{i}": weights(width, width) for i in range(count)}
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])]
    net = model(nodes, inputs, [value(at, ["batch", width])], tensors)
    peaks = []
    for name, patched in (("late", False), ("kept", True)):
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(late_gradients, "_pays", lambda size, kept: False)
            prepared(net, tmp_path / name, loss="cross_entropy")
        program = [sys.executable, str(HERE / "measure_peak.py"), str(tmp_path / name), str(width)]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    one = 4 * width * width
    assert peaks[0] < peaks[1] - 2.5 * one, [peak / one for peak in peaks]
