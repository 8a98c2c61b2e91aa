"""How much memory a training step takes for what it computes, told from its graph alone.

The nodes are walked in the order in which onnxruntime runs them (`remat/flow.py`). A value
lives from the node that computes it to the last one that reads it, and the sum over all that live
at a time has a peak. What grows with the batch is walked by itself: its peak is what each sample
takes. Parameters, outputs (each is written over parameters, or over what is kept for
them), and what an operator needs inside of itself are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxtrain.errors import UnknownNameError
from onnxtrain.offline.graph.folding import fold_constants
from onnxtrain.offline.graph.onnx_inference import infer_shapes
from onnxtrain.offline.passes.remat.flow import Flow

# What is assumed for symbolic dimensions that nobody gave a size for: sides of images, and others.
_SIDE, _LENGTH = 224, 128
_IMAGE_RANK = 4
_BATCHES = (8, 16)


@dataclass(frozen=True)
class Activations:
    """An estimate of the memory of a training step beside its parameters, in bytes.

    Where no dimension counts samples, everything is in `fixed_bytes`.
    """

    bytes_per_sample: int
    fixed_bytes: int
    batch: str  # the symbolic dimension that counts samples
    assumed: dict[str, int]  # sizes of other symbolic dimensions

    def __str__(self) -> str:
        """Return the estimate as a line of text."""
        parts = [f"{megabytes(self.bytes_per_sample)} per sample"] if self.batch else []
        parts.append(f"{megabytes(self.fixed_bytes)} for any batch" if parts else
                     megabytes(self.fixed_bytes))  # fmt: skip
        sizes = ", ".join(f"{name} = {number}" for name, number in self.assumed.items())
        return f"about {' and '.join(parts)}{f' (assuming {sizes})' if sizes else ''}"


def megabytes(size: int) -> str:
    """Write a number of bytes."""
    return f"{size / 2**20:,.1f} MB"


def estimate(
    proto: onnx.ModelProto,
    sizes: Mapping[str, int] | None = None,
    inputs: Collection[str] | None = None,
) -> Activations:
    """Estimate what a step of a training graph takes beside its parameters.

    The symbolic dimensions of `inputs` (all by default) can be chosen with `sizes`; those of other
    inputs, such as labels, follow.
    """
    graph = ir.from_proto(proto).graph
    symbols, given = likely_sizes(graph.inputs, inputs), dict(sizes or {})
    require_symbols(given, symbols)
    batch = next(iter(symbols), "")
    if batch in given:
        batch = ""  # the number of samples is known
    assumed = {n: size for n, size in symbols.items() if n != batch and n not in given}
    known = {**assumed, **given}
    flow = Flow.of(graph)
    if not batch:
        return Activations(0, flow.peak(_bytes(shapes_of(proto, known))), "", assumed)
    few, many = (_bytes(shapes_of(proto, {**known, batch: size})) for size in _BATCHES)
    growth = {n: many[n] - few.get(n, 0) for n in many}
    fixed = {n: size for n, size in many.items() if not growth[n]}
    per_sample = flow.peak(growth) // (_BATCHES[1] - _BATCHES[0])
    return Activations(per_sample, flow.peak(fixed), batch, assumed)


def require_symbols(given: Collection[str], symbols: Collection[str]) -> None:
    """Refuse sizes of dimensions that there are not."""
    unknown = [name for name in given if name not in symbols]
    if unknown:
        raise UnknownNameError(
            f"the inputs have no symbolic dimension {', '.join(map(repr, unknown))}; they have "
            f"{', '.join(map(repr, symbols)) or 'none'}"
        )


def likely_sizes(given: Iterable[ir.Value], inputs: Collection[str] | None) -> dict[str, int]:
    """Name the symbolic dimensions of inputs, with a likely size; the first is the batch."""
    found: dict[str, int] = {}
    for value in given:
        if value.shape is None or (inputs is not None and value.name not in inputs):
            continue
        for index, dim in enumerate(value.shape):
            if isinstance(dim, ir.SymbolicDim) and dim.value:
                is_side = len(value.shape) == _IMAGE_RANK and index > 1
                found.setdefault(dim.value, _SIDE if is_side else _LENGTH)
    return found


@dataclass(frozen=True)
class Tensor:
    """The shape of a value, and the bytes of an element."""

    dims: tuple[int, ...]
    itemsize: float

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return math.ceil(math.prod(self.dims) * self.itemsize)


def shapes_of(proto: onnx.ModelProto, numbers: Mapping[str, int]) -> dict[str, Tensor]:
    """Return what is known of the values of a graph, with numbers for symbolic dimensions."""
    inferred = _inferred(proto, numbers)
    following = _following(proto.graph, inferred.graph)
    if not following.keys() <= numbers.keys():
        inferred = _inferred(proto, {**following, **numbers})
    found = _tensors(inferred.graph)
    if any(name and name not in found for node in inferred.graph.node for name in node.output):
        try:
            inferred = fold_constants(inferred)
        except Exception:  # of the evaluator, on odd models: what is known has to do
            return found
        found = _tensors(inferred.graph) | found
    return found


def _bytes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in tensors.items()}


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
    return infer_shapes(fixed, data_prop=True)


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


def _tensors(graph: onnx.GraphProto) -> dict[str, Tensor]:
    """Return the values whose type and shape are known."""
    found = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        dims = kind.shape.dim
        if kind.elem_type and kind.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            shape = tuple(d.dim_value for d in dims)
            found[info.name] = Tensor(shape, ir.DataType(kind.elem_type).itemsize)
    return found
