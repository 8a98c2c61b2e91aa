"""onnx's shape inference, kept from taking the machine down.

Its shape arithmetic (`data_prop`) takes each vector whose length it knows for a possible shape, at
a hundred bytes for each element, wherever an operator that can compute with shapes reads it. So a
model of 200 bytes with a Range over 2**40 would take more memory than there is. Here shapes are
inferred without arithmetic first, which is cheap, and nodes that read a vector that is long, or
that could become long, are hidden from the second run: they keep what the first one found.

A vector that has no length yet could become long if numbers that large can be computed from the
constants and sizes in the model. `_Bits` bounds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx

from onnxtrain.offline.graph.op_facts import (
    ADDS,
    GROWS_STEEPLY,
    MULTIPLIES,
    SHAPE_ARITHMETIC,
)

_LONG = 16  # bits of the length of a vector; shapes have up to 8 elements, tables of sizes hundreds
_HIDDEN = "onnxtrain.hidden"
_INTEGERS = onnx.TensorProto.INT64, onnx.TensorProto.INT32
Infos = dict[str, onnx.TypeProto]


def infer_shapes(
    proto: onnx.ModelProto, *, strict: bool = False, data_prop: bool = False
) -> onnx.ModelProto:
    """Return a model with inferred shapes, as `onnx.shape_inference.infer_shapes`."""
    if not data_prop:
        return onnx.shape_inference.infer_shapes(proto, strict, strict, False)
    first = onnx.shape_inference.infer_shapes(proto, strict, strict, False)
    hidden = _nodes_to_hide(first)
    if not hidden:
        return onnx.shape_inference.infer_shapes(proto, strict, strict, True)
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    _hide(made.graph, first.graph, hidden)
    made.opset_import.add(domain=_HIDDEN, version=1)
    inferred = onnx.shape_inference.infer_shapes(made, strict, strict, True)
    for node, original in zip(_nodes(inferred.graph), _nodes(proto.graph), strict=True):
        node.op_type, node.domain = original.op_type, original.domain
    del inferred.opset_import[-1]
    return inferred


def _hide(graph: onnx.GraphProto, inferred: onnx.GraphProto, hidden: frozenset[int]) -> None:
    """Give nodes an operator that onnx does not know, and their results the types of the first run.

    All others are as in the given model: names of sizes that the first run invented would be taken
    for names of the model.
    """
    types = {info.name: info for info in _declared(inferred)}
    results: set[str] = set()
    for place, node in enumerate(_nodes(graph)):
        if place in hidden:
            node.op_type, node.domain = "Hidden", _HIDDEN
            results.update(node.output)
    _declare(graph, results, types)


def _declared(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.value_info
    for node in graph.node:
        for body in _bodies(node):
            yield from _declared(body)


def _declare(
    graph: onnx.GraphProto, names: set[str], types: Mapping[str, onnx.ValueInfoProto]
) -> None:
    known = {info.name for info in (*graph.value_info, *graph.output)}
    for node in graph.node:
        own = [name for name in node.output if name in names and name not in known]
        graph.value_info.extend(types[name] for name in own if name in types)
        for body in _bodies(node):
            _declare(body, names, types)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for body in _bodies(node):
            yield from _nodes(body)


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def _nodes_to_hide(model: onnx.ModelProto) -> frozenset[int]:
    """Return the places of nodes that compute with shapes and may read a long vector."""
    if not model.functions and not _may_have_long_vectors(model.graph):
        return frozenset()
    found = _Bits({(f.domain, f.name): f for f in model.functions})
    found.walk(model.graph)
    return frozenset(found.hidden)


def _may_have_long_vectors(graph: onnx.GraphProto) -> bool:
    """Tell whether any value is a long vector, or may be one as far as is known."""
    typed = set()
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        if kind.HasField("shape"):
            typed.add(info.name)
            dims = kind.shape.dim
            if len(dims) == 1 and not 0 < dims[0].dim_value < 1 << _LONG:
                return True
    if any(len(t.dims) == 1 and t.dims[0] >= 1 << _LONG for t in graph.initializer):
        return True
    for node in graph.node:
        if not typed.issuperset(filter(None, node.output)) and node.op_type != "Constant":
            return True
        if any(map(_may_have_long_vectors, _bodies(node))):
            return True
    return False


class _Bits:
    """Bounds, in bits, the numbers that values hold, and their dimensions."""

    def __init__(self, functions: Mapping[tuple[str, str], onnx.FunctionProto]) -> None:
        self.hidden: list[int] = []  # places of nodes, in the order of `_nodes`
        self._functions = functions
        self._place = -1
        self._numbers: dict[str, float] = {}
        self._dims: dict[str, float] = {}
        self._infos: Infos = {}

    def walk(self, graph: onnx.GraphProto) -> None:
        for info in (*graph.input, *graph.value_info, *graph.output):
            self._infos[info.name] = info.type
        for info in graph.input:
            self._dims[info.name] = self._known_dims(info.name) or 0
        for tensor in graph.initializer:
            self._numbers[tensor.name] = _bits_of(tensor)
            self._dims[tensor.name] = max((_log2(d) for d in tensor.dims), default=0)
            if len(tensor.dims) == 1:
                self._infos[tensor.name] = onnx.TypeProto()
                shape = self._infos[tensor.name].tensor_type.shape
                shape.dim.add(dim_value=tensor.dims[0])
        self._walk_nodes(graph.node)

    def _walk_nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            self._place += 1
            place = self._place
            function = self._functions.get((node.domain, node.op_type))
            if function is not None:
                if self._call(node, function):
                    self.hidden.append(place)
                continue
            for body in _bodies(node):
                self.walk(body)
            self._bound(node)
            computes = node.op_type in SHAPE_ARITHMETIC and not node.domain
            if computes and any(self._is_long(name) for name in node.input if name):
                self.hidden.append(place)

    def _call(self, node: onnx.NodeProto, function: onnx.FunctionProto) -> bool:
        """Bound the results of a function; tell whether a node in it is to be hidden."""
        inside = _Bits(self._functions)
        for own, given in zip(function.input, node.input, strict=False):
            inside._numbers[own] = self._numbers.get(given, 0.0)
            inside._dims[own] = self._dims.get(given, 0.0)
            if given in self._infos:
                inside._infos[own] = self._infos[given]
        inside._walk_nodes(function.node)
        for own, made in zip(function.output, node.output, strict=False):
            known = self._known_dims(made)
            self._numbers[made] = inside._numbers.get(own, 0.0)
            self._dims[made] = inside._dims.get(own, 0.0) if known is None else known
        return bool(inside.hidden)

    def _is_long(self, name: str) -> bool:
        """Whether a value is a vector, as far as is known, that is long or could become so."""
        known = self._infos.get(name)
        if known is not None and known.tensor_type.HasField("shape"):
            dims = known.tensor_type.shape.dim
            if len(dims) != 1:
                return False
            if dims[0].HasField("dim_value"):
                return _log2(dims[0].dim_value) > _LONG
        return self._dims.get(name, 0) > _LONG

    def _known_dims(self, name: str) -> float | None:
        """Return the bits of the largest dimension, or None where one has neither size nor name."""
        known = self._infos.get(name)
        if known is None or not known.tensor_type.HasField("shape"):
            return None
        largest = 0.0
        for dim in known.tensor_type.shape.dim:
            if dim.HasField("dim_value"):
                largest = max(largest, _log2(dim.dim_value))
            elif not dim.dim_param or dim.dim_param.startswith("unk__"):
                return None
        return largest

    def _elements(self, name: str, dim: float) -> float:
        """Return the bits of the number of elements of a value; `dim` are those of a dimension."""
        if self._known_dims(name) is None:
            return 3 * dim
        return sum(_log2(d.dim_value) for d in self._infos[name].tensor_type.shape.dim)

    def _bound(self, node: onnx.NodeProto) -> None:
        given = [name for name in node.input if name]
        numbers = [self._numbers.get(name, 0.0) for name in given]
        dims = [self._dims.get(name, 0.0) for name in given]
        op, own = node.op_type, 0.0
        for attribute in node.attribute:
            own = max(own, _log2(attribute.i), *(map(_log2, attribute.ints)))
            if op == "Constant" and attribute.type == onnx.AttributeProto.TENSOR:
                own = max(own, _bits_of(attribute.t), *(_log2(d) for d in attribute.t.dims))
            for body in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else ():
                results = [info.name for info in body.output]
                numbers.extend(self._numbers.get(name, 0.0) for name in results)
                dims.extend(self._dims.get(name, 0.0) for name in results)
        number, dim = max(numbers, default=0.0), max(dims, default=0.0)
        if op in MULTIPLIES:
            number = sum(numbers)
        elif op in ADDS:
            number, dim = number + 1, dim + _log2(len(given))
        elif op == "Shape":
            number = dim
        elif op == "Size":
            number = self._elements(given[0], dim)
        if op in GROWS_STEEPLY:
            number += 64
        if op in ("Reshape", "Flatten"):
            dim = self._elements(given[0], dim)
        elif op == "Tile":
            dim += number
        elif op in ("Resize", "Upsample"):  # by factors that are not integers
            dim += 64
        dim = max(dim, number, own)
        if op not in SHAPE_ARITHMETIC and op != "Constant":
            number = 0.0  # onnx does not follow the numbers
        for name in node.output:
            known = self._known_dims(name)
            self._numbers[name] = max(number, own if op == "Constant" else 0.0)
            self._dims[name] = dim if known is None else known


def _log2(number: float) -> float:
    return math.log2(abs(number)) if number else 0.0


def _bits_of(tensor: onnx.TensorProto) -> float:
    """Return the bits of the largest number of a small tensor, if onnx computes with it."""
    if tensor.data_type not in _INTEGERS or math.prod(tensor.dims) > 1024:
        return 0.0
    try:
        array = np.abs(onnx.numpy_helper.to_array(tensor).astype(np.float64))
    except Exception:  # a type that has no numbers, or data that are elsewhere
        return 0.0
    array = array[np.isfinite(array) & (array > 0)]
    return float(np.abs(np.log2(array)).max()) if array.size else 0.0
