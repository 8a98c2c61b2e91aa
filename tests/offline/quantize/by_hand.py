"""Networks with the operators that surround products, written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Builder:
    """Writes a network layer by layer; each call returns the name of its result."""

    def __init__(self, seed: int = 0, opset: int = 18) -> None:
        self._rng, self._opset = np.random.default_rng(seed), opset
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def __call__(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        number = len(self.nodes)
        made = [f"v{number}_{i}" if outputs > 1 else f"v{number}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(op_type, inputs, made, f"{op_type}_{number}", **attributes)
        )
        return made if outputs > 1 else made[0]

    def tensor(self, array: Any, name: str | None = None) -> str:
        name = name or f"t{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def random(self, *shape: int, scale: float | None = None, name: str | None = None) -> str:
        scale = scale or 1.4 / np.sqrt(max(np.prod(shape[1:]), 1))
        return self.tensor((self._rng.normal(size=shape) * scale).astype(np.float32), name)

    def conv(self, x: str, inputs: int, outputs: int, kernel: int = 3, **options: Any) -> str:
        group = options.get("group", 1)
        weight = self.random(outputs, inputs // group, kernel, kernel)
        options.setdefault("pads", [kernel // 2] * 4)
        return self("Conv", x, weight, self.random(outputs, scale=0.1), **options)

    def gemm(self, x: str, inputs: int, outputs: int, bias: bool = True) -> str:
        given = [self.random(outputs, inputs), *([self.random(outputs, scale=0.1)] if bias else [])]
        return self("Gemm", x, *given, transB=1)

    def norm(self, x: str, channels: int) -> str:
        rng = self._rng
        given = [1 + 0.2 * rng.normal(size=channels), 0.2 * rng.normal(size=channels),
                 0.1 * rng.normal(size=channels), 0.5 + rng.random(channels)]  # fmt: skip
        return self("BatchNormalization", x, *(self.tensor(g.astype(np.float32)) for g in given))

    def model(self, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]]) -> onnx.ModelProto:
        """Return the model; `outputs` are by the name of a result."""
        graph = helper.make_graph(
            self.nodes, "network",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
            self.tensors,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", self._opset)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(made)
        return made


IMAGE = {"x": ["N", 3, 12, 12]}


def _classifier(b: Builder, x: str, channels: int) -> onnx.ModelProto:
    pooled = b("Flatten", b("GlobalAveragePool", x))
    return b.model(IMAGE, {b.gemm(pooled, channels, 4): ["N", 4]})


def residual() -> onnx.ModelProto:
    b = Builder()
    x = b("Relu", b.norm(b.conv("x", 3, 8), 8))
    x = b("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    y = b("Relu", b.conv(x, 8, 8))
    y = b("Relu", b("Add", b.conv(y, 8, 8), x))
    short = b.conv(y, 8, 16, 1, strides=[2, 2])
    y = b("Relu", b.conv(y, 8, 16, strides=[2, 2]))
    return _classifier(b, b("Relu", b("Add", b.conv(y, 16, 16), short)), 16)


def depthwise() -> onnx.ModelProto:
    b = Builder()
    low, six = b.tensor(np.float32(0)), b.tensor(np.float32(6))

    def relu6(x: str) -> str:
        return b("Clip", x, low, six)

    x = relu6(b.norm(b.conv("x", 3, 8, strides=[2, 2]), 8))
    y = relu6(b.conv(x, 8, 24, 1))
    y = relu6(b.norm(b.conv(y, 24, 24, group=24), 24))
    return _classifier(b, b("Add", b.norm(b.conv(y, 24, 8, 1), 8), x), 8)


def squeeze_excite() -> onnx.ModelProto:
    b = Builder()
    x = b.conv("x", 3, 8)
    x = b("Mul", x, b("Sigmoid", x))
    s = b("GlobalAveragePool", x)
    s = b.conv(b("Relu", b.conv(s, 8, 4, 1)), 4, 8, 1)
    x = b("Mul", x, b("HardSigmoid", s))
    return _classifier(b, b("HardSwish", b.conv(x, 8, 8)), 8)


def concatenating() -> onnx.ModelProto:
    b = Builder()
    x = b("Relu", b.conv("x", 3, 8))
    y = b("Relu", b.conv(x, 8, 4))
    z = b("LeakyRelu", b.conv(x, 8, 4, 1), alpha=0.1)
    p = b("AveragePool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    x = b("Concat", y, z, p, axis=1)
    return _classifier(b, b("Relu", b.conv(x, 16, 8)), 8)


def pool_before_relu() -> onnx.ModelProto:
    b = Builder()
    x = b("Relu", b("MaxPool", b.conv("x", 3, 8), kernel_shape=[2, 2], strides=[2, 2]))
    x = b("Relu", b("MaxPool", b.conv(x, 8, 8), kernel_shape=[2, 2], strides=[2, 2]))
    flat = b("Flatten", x)
    hidden = b("Relu", b.gemm(flat, 72, 16))
    return b.model(IMAGE, {b.gemm(hidden, 16, 4, bias=False): ["N", 4]})


def padded() -> onnx.ModelProto:
    b = Builder()
    pads = b.tensor(np.array([0, 0, 1, 1, 0, 0, 2, 2]))
    x = b("Relu", b.conv(b("Pad", "x", pads), 3, 8, pads=[0] * 4))
    x = b("Relu", b.conv(b("Pad", x, pads, b.tensor(np.float32(0))), 8, 8, pads=[0] * 4))
    return _classifier(b, x, 8)


def grouped() -> onnx.ModelProto:
    b = Builder()
    x = b("Relu", b.conv("x", 3, 8))
    return _classifier(b, b("Relu", b.conv(x, 8, 8, group=2)), 8)


def convolution_last() -> onnx.ModelProto:
    b = Builder()
    x = b("Relu", b.conv("x", 3, 8))
    return b.model(IMAGE, {b.conv(x, 8, 2, 1): ["N", 2, 12, 12]})


def parts() -> onnx.ModelProto:
    """Split, Slice, Transpose, Reshape and Resize between products."""
    b = Builder()
    x = b("Relu", b.conv("x", 3, 8))
    left, right = b("Split", x, b.tensor(np.array([4, 4])), outputs=2, axis=1)
    left = b("Relu", b.conv(left, 4, 4))
    right = b("Slice", right, *(b.tensor(np.array([i])) for i in (0, 12, 3)))
    x = b("Add", left, b.conv(right, 4, 4))
    scales = b.tensor(np.array([1, 1, 2, 2], np.float32))
    x = b("Resize", x, "", scales, mode="nearest")
    x = b("Relu", b.conv(x, 4, 4, strides=[2, 2]))
    x = b("Transpose", x, perm=[0, 2, 3, 1])
    x = b("Reshape", x, b.tensor(np.array([-1, 12 * 12 * 4])))
    return b.model(IMAGE, {b.gemm(x, 576, 4): ["N", 4]})


def two_outputs() -> onnx.ModelProto:
    b = Builder()
    x = b("Relu", b.conv("x", 3, 8))
    pooled = b("Flatten", b("GlobalAveragePool", x))
    return b.model(IMAGE, {b.gemm(pooled, 8, 4): ["N", 4], b.conv(x, 8, 2, 1): ["N", 2, 12, 12]})


def shared_weights() -> onnx.ModelProto:
    b = Builder()
    weight, bias = b.random(8, 8, 3, 3), b.random(8, scale=0.1)
    x = b("Relu", b.conv("x", 3, 8))
    for _ in range(2):
        x = b("Relu", b("Conv", x, weight, bias, pads=[1] * 4))
    return _classifier(b, x, 8)


def audio() -> onnx.ModelProto:
    b = Builder()
    x = "x"
    for inputs, outputs in ((1, 8), (8, 16)):
        weight = b.random(outputs, inputs, 5)
        x = b("Conv", x, weight, b.random(outputs, scale=0.1), strides=[2], pads=[2, 2])
        x = b("MaxPool", b("Relu", x), kernel_shape=[2], strides=[2])
    x = b("ReduceMean", x, b.tensor(np.array([2])), keepdims=0)
    return b.model({"x": ["N", 1, 64]}, {b.gemm(x, 16, 4): ["N", 4]})


def attention() -> onnx.ModelProto:
    """A layer of an encoder: biases by Add, two products of data, and norms in floats."""
    b = Builder()
    width, heads, length = 16, 2, 6
    part = width // heads

    def linear(x: str, inputs: int, outputs: int) -> str:
        weight = b.random(inputs, outputs, scale=1 / np.sqrt(inputs))
        return b("Add", b("MatMul", x, weight), b.random(outputs, scale=0.1))

    def norm(x: str) -> str:
        scale, bias = (b.tensor(np.full(width, v, np.float32)) for v in (1, 0))
        return b("LayerNormalization", x, scale, bias)

    def apart(x: str) -> str:
        shape = b.tensor(np.array([0, length, heads, part]))
        return b("Transpose", b("Reshape", x, shape), perm=[0, 2, 1, 3])

    q, k, v = (apart(linear("x", width, width)) for _ in range(3))
    factor = b.tensor(np.float32(part**-0.25))
    k = b("Mul", b("Transpose", k, perm=[0, 1, 3, 2]), factor)
    scores = b("Softmax", b("MatMul", b("Mul", q, factor), k), axis=-1)
    mixed = b("Transpose", b("MatMul", scores, v), perm=[0, 2, 1, 3])
    mixed = b("Reshape", mixed, b.tensor(np.array([0, length, width])))
    x = norm(b("Add", linear(mixed, width, width), "x"))
    hidden = linear(x, width, 32)
    half, one, root = (b.tensor(np.float32(n)) for n in (0.5, 1, 2**0.5))
    hidden = b("Mul", b("Mul", hidden, b("Add", b("Erf", b("Div", hidden, root)), one)), half)
    x = norm(b("Add", linear(hidden, 32, width), x))
    first = b("Gather", x, b.tensor(np.array(0)), axis=1)
    return b.model({"x": ["N", length, width]}, {linear(first, width, 3): ["N", 3]})


NETWORKS = {
    f.__name__: f
    for f in (
        residual, depthwise, squeeze_excite, concatenating, pool_before_relu, padded, grouped,
        convolution_last, parts, two_outputs, shared_weights, audio, attention,
    )
}  # fmt: skip


def feeds(model: onnx.ModelProto, samples: int = 16, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made = {}
    for entry in model.graph.input:
        dims = [d.dim_value or samples for d in entry.type.tensor_type.shape.dim]
        made[entry.name] = rng.normal(size=dims).astype(np.float32)
    return made
