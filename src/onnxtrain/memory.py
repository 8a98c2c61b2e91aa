"""How much memory a training step takes for what it computes, told from its graph alone.

The nodes are walked in the order of the file, which is an order that they can run in. A value
lives from the node that computes it to the last one that reads it; the sum over all that live at a
time has a peak. That peak, for two sizes of the batch, gives what each sample takes and what is
taken whatever the batch. Parameters, and what an operator needs inside of itself, are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.folding import fold_constants
from onnxtrain.autodiff.infer import skeleton

# What is assumed for symbolic dimensions that nobody gave a size for: sides of images and others.
ASSUMED_SIDE, ASSUMED_LENGTH = 224, 128
_IMAGE_RANK = 4
_BATCHES = (8, 16)

# Operators that hand their input on under another shape.
_VIEWS = frozenset("Flatten Identity Reshape Squeeze Unsqueeze".split())
# Operators that runtimes let write over an input that nobody else reads.
_IN_PLACE = frozenset(
    "Abs Add Cast Ceil Clip Cos Div Elu Erf Exp Floor Gelu HardSigmoid HardSwish LeakyRelu Log Mul "
    "Neg Not Reciprocal Relu Round Selu Sigmoid Sin Softmax Softplus Softsign Sqrt Sub Sum Tanh "
    "ThresholdedRelu".split()
)


@dataclass(frozen=True)
class Activations:
    """An estimate of the memory of a training step, in bytes.

    `assumed` has the sizes that were assumed for symbolic dimensions; `batch` is the name of the
    one that counts samples, empty where the model has a fixed size. Then everything is in
    `fixed_bytes`.
    """

    bytes_per_sample: int
    fixed_bytes: int
    batch: str
    assumed: dict[str, int]

    def __str__(self) -> str:
        """Return the estimate as a line of text."""
        size = f"about {megabytes(self.bytes_per_sample)} per sample"
        if not self.batch:
            size = "about"
        sizes = ", ".join(f"{name} = {number}" for name, number in self.assumed.items())
        return (
            f"{size}{' and' if self.batch else ''} {megabytes(self.fixed_bytes)} besides"
            f"{f', assuming {sizes}' if sizes else ''}"
        )


def megabytes(size: int) -> str:
    """Write a number of bytes for people."""
    return f"{size / 2**20:,.1f} MB"


def estimate(model: ir.Model, sizes: Mapping[str, int] | None = None) -> Activations:
    """Estimate what a step of a training graph takes beside its parameters.

    Args:
        model: a graph that computes gradients.
        sizes: numbers for symbolic dimensions, by their names.

    """
    proto = skeleton(model)
    symbols = _symbols(proto.graph)
    batch = next(iter(symbols), "")
    given = dict(sizes or {})
    assumed = {n: size for n, size in symbols.items() if n != batch and n not in given}
    known = {**assumed, **given}
    if not batch or batch in given:
        return Activations(0, _peak(proto, known), "", assumed)
    few, many = (_peak(proto, {**known, batch: number}) for number in _BATCHES)
    slope = (many - few) // (_BATCHES[1] - _BATCHES[0])
    return Activations(slope, max(0, few - _BATCHES[0] * slope), batch, assumed)


def _symbols(graph: onnx.GraphProto) -> dict[str, int]:
    """Name the symbolic dimensions of the inputs, with a likely size; the first is the batch."""
    found: dict[str, int] = {}
    for info in graph.input:
        dims = info.type.tensor_type.shape.dim
        for index, dim in enumerate(dims):
            if dim.dim_param:
                is_side = len(dims) == _IMAGE_RANK and index > 1
                found.setdefault(dim.dim_param, ASSUMED_SIDE if is_side else ASSUMED_LENGTH)
    return found


def _peak(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> int:
    fixed = _with_sizes(proto, sizes)
    try:
        fixed = fold_constants(fixed)
    except Exception:  # of the evaluator or of inference, on odd models: what is known must do
        fixed = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
    return _walk(fixed.graph)


def _with_sizes(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """Return the model with numbers for symbolic dimensions; others are forgotten."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    for info in (*fixed.graph.input, *fixed.graph.value_info, *fixed.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
            elif not dim.HasField("dim_value"):
                dim.Clear()
    return fixed


def _walk(graph: onnx.GraphProto) -> int:
    """Return the peak of what lives while the nodes run one after the other."""
    sizes = _sizes(graph)
    home: dict[str, str] = {}  # which memory a value is in: its own, or that of another value
    users: dict[str, int] = {}
    for node in graph.node:
        for index, name in enumerate(node.output):
            home[name] = name
            if index == 0 and node.op_type in _VIEWS and node.input[0] in home:
                home[name] = home[node.input[0]]
        for name in _read(node):
            if name in home:
                users[home[name]] = users.get(home[name], 0) + 1
    for info in graph.output:
        if info.name in home:
            users[home[info.name]] = users.get(home[info.name], 0) + 1
    living: dict[str, int] = {}
    total = peak = 0
    for node in graph.node:
        own = [n for n in node.output if n and home[n] == n]
        for name in own:
            living[name] = sizes.get(name, 0)
            total += living[name]
        dying = [home[n] for n in _read(node) if n in home]
        for name in dying:
            users[name] -= 1
        over = {n for n in dying if users[n] == 0 and n in living}
        reused = 0
        if node.op_type in _IN_PLACE and own:
            reused = living[own[0]] if living[own[0]] in {living[n] for n in over} else 0
        peak = max(peak, total - reused)
        for name in (*over, *(n for n in own if not users.get(n))):
            total -= living.pop(name, 0)
    return peak


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield what a node reads, its subgraphs included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                yield from _read(inner)
            yield from (info.name for info in attribute.g.output)


def _sizes(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the bytes of every value whose type and shape are known."""
    found = {}
    for info in (*graph.value_info, *graph.output):
        kind = info.type.tensor_type
        if kind.elem_type and kind.HasField("shape"):
            count = math.prod(dim.dim_value for dim in kind.shape.dim)
            found[info.name] = math.ceil(count * ir.DataType(kind.elem_type).itemsize)
    return found
