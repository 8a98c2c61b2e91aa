"""Blocks of frozen networks: against their functions, and what the kernel refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from native.harness import assert_near, kinds_of, run, run_both, session_of
from native.kernel_calls import call
from onnxtrain.offline.passes import frozen_blocks
from onnxtrain.offline.passes.native_kernels import fit_to_kernels
from onnxtrain.offline.writer.functions import write_functions

Array = np.ndarray[Any, Any]
Ints = tuple[int, ...]
RELU6 = (0.0, 6.0)


@dataclass(frozen=True)
class Block:
    """A block; activations are bounds, with None for no node and an infinite end for Relu."""

    space: Ints
    inputs: int
    wide: int
    outputs: int
    kernel: Ints = (3, 3)
    stride: Ints = (1, 1)
    pads: Ints = (1, 1, 1, 1)
    batch: int = 2
    first: Ints | None = (1, 1)  # the kernel of the expansion; None for none
    first_stride: Ints = (1, 1)
    first_pads: Ints = (0, 0, 0, 0)
    activations: tuple[tuple[float, float] | None, ...] = (RELU6, RELU6, None)
    biases: tuple[bool, ...] = (True, True, True)
    norms: tuple[bool, ...] = (False, False, False)
    residual: bool = False

    def model(self) -> onnx.ModelProto:
        made = _Written()
        value, channels = "x", self.inputs
        if self.first is not None:
            shape = (self.wide, self.inputs, *self.first)
            value = made.layer(
                self, 0, value, shape, strides=self.first_stride, pads=self.first_pads
            )
            channels = self.wide
        value = made.layer(
            self, 1, value, (channels, 1, *self.kernel), strides=self.stride, pads=self.pads,
            group=channels,
        )  # fmt: skip
        value = made.layer(self, 2, value, (self.outputs, channels, 1, 1))
        if self.residual:
            value = made.add("Add", [value, "x"])
        made.nodes.append(helper.make_node("Identity", [value], ["y"]))
        x = (self.batch, self.inputs, *self.space)
        graph = helper.make_graph(
            made.nodes, "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(a, n) for n, a in made.constants.items()],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)

    def feeds(self) -> dict[str, Array]:
        x = np.random.default_rng(1).normal(size=(self.batch, self.inputs, *self.space))
        return {"x": x.astype(np.float32)}


class _Written:
    """The nodes of a block, and its constants."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self._random = np.random.default_rng(0)

    def layer(self, of: Block, place: int, x: str, shape: Ints, **attributes: Any) -> str:
        depth = max(1, int(np.prod(shape[1:])))
        inputs = [x, self.constant(self._random.normal(size=shape) / np.sqrt(depth))]
        if of.biases[place]:
            inputs.append(self.constant(self._random.normal(size=shape[0])))
        y = self.add("Conv", inputs, **attributes)
        if of.norms[place]:
            numbers = [self._random.normal(size=shape[0]) for _ in range(3)]
            variance = self._random.uniform(0.5, 2, size=shape[0])
            given = [self.constant(n) for n in (*numbers, variance)]
            y = self.add("BatchNormalization", [y, *given], epsilon=1e-3)
        bounds = of.activations[place]
        if bounds == (0.0, np.inf):
            return self.add("Relu", [y])
        if bounds is not None:
            return self.add("Clip", [y, *(self.constant(np.array(b)) for b in bounds)])
        return y

    def constant(self, value: Array) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value.astype(np.float32)
        return name

    def add(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name


def written(block: Block) -> onnx.ModelProto:
    """The block as a call of a function."""
    model = ir.from_proto(block.model())
    fit_to_kernels(model.graph)
    functions = write_functions(model)
    proto = ir.to_proto(model)
    proto.functions.extend(functions)
    return proto


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_blocks, "_LEAST_BYTES", 0)


STEM = Block(
    (21, 23), 3, 10, 6, first=(3, 3), first_stride=(2, 2), first_pads=(1, 1, 1, 1), batch=3
)
CASES = {
    "plain": Block((9, 11), 5, 17, 7),
    "residual": Block((9, 11), 24, 40, 24, residual=True),
    "stride": Block((14, 14), 16, 96, 24, stride=(2, 2)),
    "stride_odd": Block((23, 33), 6, 33, 40, stride=(2, 2)),
    "stride_beyond": Block((22, 19), 4, 20, 9, stride=(4, 3), pads=(0, 0, 0, 0)),
    "five": Block((13, 17), 8, 21, 16, kernel=(5, 5), pads=(2, 2, 2, 2)),
    "five_stride": Block((28, 27), 8, 16, 33, kernel=(5, 5), pads=(2, 2, 2, 2), stride=(2, 2)),
    "seven": Block((15, 16), 4, 8, 8, kernel=(7, 7), pads=(3, 3, 3, 3)),
    "uneven": Block((9, 20), 4, 18, 5, kernel=(2, 4), pads=(0, 1, 1, 3), stride=(1, 2)),
    "several_bands": Block((67, 30), 3, 24, 24, batch=1, residual=False),
    "wide_rows": Block((5, 130), 3, 9, 20),
    "stem": STEM,
    "stem_five": replace(STEM, first=(5, 4), first_pads=(2, 2, 1, 0)),
    "stem_stride_three": replace(STEM, first_stride=(3, 3)),
    "pointwise_stride": Block((12, 13), 5, 8, 8, first_stride=(2, 2)),
    "no_expansion": Block((19, 18), 37, 37, 20, first=None),
    "no_expansion_residual": Block((7, 7), 20, 20, 20, first=None, residual=True),
    "no_expansion_stride": Block((16, 15), 32, 32, 64, first=None, stride=(2, 2)),
    "relu": Block((8, 9), 4, 12, 12, activations=((0.0, np.inf), (0.0, np.inf), (0.0, np.inf))),
    "no_activation": Block((8, 9), 4, 12, 12, activations=(None, None, None)),
    "bounds": Block((8, 9), 4, 12, 4, activations=((-1, 1), (-0.5, 2), (-1, 0.5)), residual=True),
    "no_bias": Block((8, 9), 4, 12, 12, biases=(False, False, False)),
    "one_bias": Block((8, 9), 4, 12, 12, biases=(False, True, False)),
    "norms": Block((8, 9), 6, 12, 12, norms=(True, True, True), biases=(False,) * 3),
    "norm_and_bias": Block((8, 9), 6, 12, 12, norms=(False, True, True)),
    "norm_no_expansion": Block((8, 9), 12, 12, 6, norms=(False, True, True), first=None),
    "single": Block((1, 1), 1, 2, 1, batch=1),
    "single_tap": Block((1, 1), 2, 2, 2, kernel=(1, 1), pads=(0, 0, 0, 0), first=None),
    "no_batch": Block((9, 9), 4, 12, 8, batch=0),
    "many_images": Block((6, 7), 4, 12, 24, batch=40),
    "mobile_14": Block((14, 14), 64, 384, 64, residual=True, batch=1),
}


@pytest.mark.parametrize("name", CASES)
def test_like_the_function(name: str) -> None:
    block = CASES[name]
    model = written(block)
    assert kinds_of(model) == {"InvertedResidual"}
    assert len(model.graph.node) == 2  # the other one is Identity
    assert_near(*run_both(model, block.feeds()))


def with_any_size(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model for images of any number and size."""
    dims = model.graph.input[0].type.tensor_type.shape.dim
    for place, name in ((0, "batch"), (2, "rows"), (3, "columns")):
        dims[place].dim_param = name
    return model


def with_weights_as_inputs(model: onnx.ModelProto) -> dict[str, Array]:
    """Let the weights of a model be inputs; return what they were."""
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for name, value in values.items():
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape)
        model.graph.input.append(info)
    del model.graph.initializer[:]
    return values


@pytest.mark.parametrize("name", ["norms", "stem", "norm_no_expansion"])
def test_packed_weights_serve_images_of_all_sizes(name: str) -> None:
    block = CASES[name]
    model = with_any_size(written(block))
    plain, native = (session_of(model, native=flag) for flag in (False, True))
    for batch, space in ((1, (9, 12)), (3, (31, 20)), (0, (8, 9)), (2, (16, 16)), (1, (9, 12))):
        feeds = replace(block, batch=batch, space=space).feeds()
        assert_near(plain.run(None, feeds), native.run(None, feeds))


@pytest.mark.parametrize("name", ["norms", "one_bias", "no_expansion"])
def test_weights_that_are_no_constants_may_change(name: str) -> None:
    model = written(CASES[name])
    weights = with_weights_as_inputs(model)
    plain, native = (session_of(model, native=flag) for flag in (False, True))
    for factor in (1, -0.5, 2):
        changed = {n: w * np.float32(factor) if w.ndim == 4 else w for n, w in weights.items()}
        feeds = CASES[name].feeds() | changed
        assert_near(plain.run(None, feeds), native.run(None, feeds))


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_narrower_instruction_sets(isa: str) -> None:
    """The choice is made once for a process, so another one runs the table above."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    made = subprocess.run(
        [*command, "-k", "test_like_the_function"], capture_output=True, text=True,
        env={**os.environ, "ONNXTRAIN_ISA": isa}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr


def test_same_numbers_with_any_number_of_threads() -> None:
    for name in ("several_bands", "stem", "five", "many_images"):
        model, feeds = written(CASES[name]), CASES[name].feeds()
        first = run(model, feeds, native=True)
        for threads in (2, 3):
            for a, b in zip(first, run(model, feeds, native=True, threads=threads), strict=True):
                np.testing.assert_array_equal(a, b)


def test_nothing_is_read_from_other_images() -> None:
    block = CASES["several_bands"]
    block = replace(block, batch=3)
    model, feeds = written(block), block.feeds()
    (before,) = run(model, feeds, native=True)
    feeds["x"][1] = np.nan
    (after,) = run(model, feeds, native=True)
    np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
    assert np.isnan(after[1]).all()


X, W0, W1, W2 = (
    np.ones(s, np.float32) for s in ((2, 3, 8, 8), (6, 3, 1, 1), (6, 1, 3, 3), (4, 6, 1, 1))
)
PLAIN: dict[str, Any] = {
    "expands": 1, "biases": [0, 0, 0], "norms": [0, 0, 0], "strides": [1, 1], "pads": [1, 1, 1, 1]
}  # fmt: skip
FAR = {"pads": [1 << 29] * 4, "strides": [1 << 29] * 2}
HOSTILE: dict[str, tuple[list[Array], dict[str, Any], str]] = {
    "no weights": ([X, W0, W1], {}, "an input of a block is missing"),
    "no residual": ([X, W0, W1, W2], {"has_residual": 1}, "an input of a block is missing"),
    "residual": ([X, W0, W1, W2, X], {"has_residual": 1}, "residual has another shape"),
    "vector": ([X[0], W0, W1, W2], {}, "a block needs images"),
    "channels": ([X[:, :2], W0, W1, W2], {}, "do not fit the groups"),
    "depthwise channels": ([X, W0, W1[:5], W2], {}, "other channels than its image"),
    "no channels": ([X, W0[:0], W1[:0], W2[:, :0]], {}, "other channels than its image, or none"),
    "depthwise weights": ([X, W0, W1.repeat(2, 1), W2], {}, "do not fit the groups"),
    "last channels": ([X, W0, W1, W2[:, :5]], {}, "weights for the channels of"),
    "last taps": ([X, W0, W1, W2.repeat(2, 3)], {}, "weights for the channels of"),
    "bias": ([X, W0, X[0, 0, 0], W1, W2], {"biases": [1, 0, 0]}, "another size than the"),
    "flags": ([X, W0, W1, W2], {"biases": [0, 0]}, "whether it has a bias"),
    "integers": ([X.astype(np.int64), W0, W1, W2], {}, "not of type float"),
    "padding": ([X, W0, W1, W2], {"pads": [3, 1, 1, 1]}, "less padding than its kernels"),
    "large padding": ([X, W0, W1, W2], FAR, "less padding"),
    "negative padding": ([X, W0, W1, W2], {"pads": [-1, 1, 1, 1]}, "padding not negative"),
    "no stride": ([X, W0, W1, W2], {"strides": [0, 1]}, "have to be positive"),
    "expansion padding": ([X, W0, W1, W2], {"expansion_pads": [1, 0, 0, 0]}, "less padding"),
    "small image": ([X[:, :, :0], W0, W1, W2], {}, "larger than the padded image"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_refused(name: str) -> None:
    inputs, attributes, sentence = HOSTILE[name]
    with pytest.raises(Exception, match=sentence):
        call("InvertedResidual", inputs, **{**PLAIN, **attributes})


def test_the_plain_call_is_taken() -> None:
    (y,) = call("InvertedResidual", [X, W0, W1, W2], **PLAIN)
    assert y[0, 0, 4, 4] == 3 * 9 * 6
