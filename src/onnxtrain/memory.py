"""How much memory a training step takes for what it computes, told from its graph alone.

The nodes are walked in the order of the file, which is one that they can run in. A value lives
from the node that computes it to the last one that reads it, and the sum over all that live at a
time has a peak. What grows with the batch is walked by itself: its peak is what each sample takes.
Parameters, and what an operator needs inside of itself, are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.folding import fold_constants
from onnxtrain.autodiff.infer import skeleton
from onnxtrain.errors import UnknownNameError

# What is assumed for symbolic dimensions that nobody gave a size for: sides of images, and others.
_SIDE, _LENGTH = 224, 128
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
    """An estimate of the memory of a training step beside its parameters, in bytes.

    `batch` is the symbolic dimension that counts samples. Where there is none, all sizes are fixed
    and everything is in `fixed_bytes`. `assumed` has the sizes that had to be assumed for other
    symbolic dimensions.
    """

    bytes_per_sample: int
    fixed_bytes: int
    batch: str
    assumed: dict[str, int]

    def __str__(self) -> str:
        """Return the estimate as a line of text."""
        parts = [f"{_megabytes(self.bytes_per_sample)} per sample"] if self.batch else []
        parts.append(f"{_megabytes(self.fixed_bytes)} for any batch" if parts else
                     _megabytes(self.fixed_bytes))  # fmt: skip
        sizes = ", ".join(f"{name} = {number}" for name, number in self.assumed.items())
        return f"about {' and '.join(parts)}{f' (assuming {sizes})' if sizes else ''}"


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"


def estimate(model: ir.Model, sizes: Mapping[str, int] | None = None) -> Activations:
    """Estimate what a step of a graph that computes gradients takes; see `estimate_proto`."""
    return estimate_proto(skeleton(model), sizes)


def estimate_proto(
    proto: onnx.ModelProto,
    sizes: Mapping[str, int] | None = None,
    inputs: Collection[str] | None = None,
) -> Activations:
    """Estimate what a step of a training graph takes beside its parameters.

    Args:
        proto: a graph that computes gradients, without its large tensors.
        sizes: numbers for symbolic dimensions, by their names.
        inputs: the inputs whose symbolic dimensions can be chosen, all by default; those of others,
            such as labels, follow.

    """
    symbols, given = _symbols(proto.graph, inputs), dict(sizes or {})
    unknown = [name for name in given if name not in symbols]
    if unknown:
        raise UnknownNameError(
            f"the inputs have no symbolic dimension {', '.join(map(repr, unknown))}; they have "
            f"{', '.join(map(repr, symbols)) or 'none'}"
        )
    batch = next(iter(symbols), "")
    if batch in given:
        batch = ""  # the number of samples is known
    assumed = {n: size for n, size in symbols.items() if n != batch and n not in given}
    known = {**assumed, **given}
    if not batch:
        graph, fixed = _with_sizes(proto, known)
        return Activations(0, _peak(graph, fixed), "", assumed)
    _, few = _with_sizes(proto, {**known, batch: _BATCHES[0]})
    graph, many = _with_sizes(proto, {**known, batch: _BATCHES[1]})
    growth = {n: many[n] - few.get(n, 0) for n in many}
    fixed = {n: size for n, size in many.items() if not growth[n]}
    per_sample = _peak(graph, growth) // (_BATCHES[1] - _BATCHES[0])
    return Activations(per_sample, _peak(graph, fixed), batch, assumed)


def _symbols(graph: onnx.GraphProto, inputs: Collection[str] | None) -> dict[str, int]:
    """Name the symbolic dimensions of inputs, with a likely size; the first is the batch."""
    found: dict[str, int] = {}
    for info in graph.input:
        if inputs is not None and info.name not in inputs:
            continue
        dims = info.type.tensor_type.shape.dim
        for index, dim in enumerate(dims):
            if dim.dim_param:
                is_side = len(dims) == _IMAGE_RANK and index > 1
                found.setdefault(dim.dim_param, _SIDE if is_side else _LENGTH)
    return found


def _with_sizes(
    proto: onnx.ModelProto, numbers: Mapping[str, int]
) -> tuple[onnx.GraphProto, dict[str, int]]:
    """Return the graph with numbers for symbolic dimensions, and the bytes of its values."""
    inferred = _inferred(proto, numbers)
    following = _following(proto.graph, inferred.graph)
    if not following.keys() <= numbers.keys():
        inferred = _inferred(proto, {**following, **numbers})
    sizes = _sizes(inferred.graph)
    if any(name and name not in sizes for node in inferred.graph.node for name in node.output):
        try:
            inferred = fold_constants(inferred)
        except Exception:  # of the evaluator, on odd models: what is known has to do
            return inferred.graph, sizes
        sizes = _sizes(inferred.graph)
    return inferred.graph, sizes


def _inferred(proto: onnx.ModelProto, numbers: Mapping[str, int]) -> onnx.ModelProto:
    """Infer shapes with numbers for symbolic dimensions; those without one are forgotten."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    for info in (*fixed.graph.input, *fixed.graph.value_info, *fixed.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in numbers:
                dim.dim_value = numbers[dim.dim_param]
            elif not dim.HasField("dim_value"):
                dim.Clear()
    return onnx.shape_inference.infer_shapes(fixed, data_prop=True)


def _following(given: onnx.GraphProto, inferred: onnx.GraphProto) -> dict[str, int]:
    """Find the numbers of symbols that values were declared with, and that inference has found."""
    found: dict[str, int] = {}
    known = {i.name: i.type.tensor_type for i in (*inferred.value_info, *inferred.output)}
    for info in (*given.value_info, *given.output):
        before = info.type.tensor_type.shape.dim
        after = known[info.name].shape.dim if info.name in known else []
        found.update(
            (symbol.dim_param, number.dim_value)
            for symbol, number in zip(before, after, strict=False)
            if symbol.dim_param and number.HasField("dim_value")
        )
    return found


def _sizes(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the bytes of every value whose type and shape are known."""
    found = {}
    for info in (*graph.value_info, *graph.output):
        kind = info.type.tensor_type
        dims = kind.shape.dim
        if kind.elem_type and kind.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            count = math.prod(d.dim_value for d in dims)
            found[info.name] = math.ceil(count * ir.DataType(kind.elem_type).itemsize)
    return found


def _peak(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> int:
    """Return the most bytes that live at a time while the nodes run one after the other."""
    home = _homes(graph)
    readers = Counter(home[n] for node in graph.node for n in _read(node) if n in home)
    readers.update(home[info.name] for info in graph.output if info.name in home)
    total = peak = 0
    for node in graph.node:
        made = [name for name in node.output if name and home[name] == name]
        total += sum(sizes.get(name, 0) for name in made)
        read = [home[name] for name in _read(node) if name in home]
        readers.subtract(read)
        done = {name for name in (*read, *made) if readers[name] == 0}
        size = sizes.get(node.output[0], 0)
        in_place = node.op_type in _IN_PLACE and any(
            sizes.get(name) == size for name in done if name not in made
        )
        peak = max(peak, total - (size if in_place else 0))
        total -= sum(sizes.get(name, 0) for name in done)
    return peak


def _homes(graph: onnx.GraphProto) -> dict[str, str]:
    """Say for each value that is computed which value's memory it is in: mostly its own."""
    home: dict[str, str] = {}
    for node in graph.node:
        home.update((name, name) for name in node.output)
        if node.op_type in _VIEWS and node.input[0] in home:
            home[node.output[0]] = home[node.input[0]]
    return home


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield what a node reads, its subgraphs included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                yield from _read(inner)
            yield from (info.name for info in attribute.g.output)
