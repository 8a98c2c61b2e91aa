"""Who makes and who reads each value of a graph, and which values are constants."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property

import numpy as np
import onnx
from onnx import numpy_helper

from onnxtrain.offline.graph.op_facts import ARITHMETIC, KEEPS_SHAPE

Dims = tuple[int, ...]
FLOAT_TYPES = (
    onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16,
    onnx.TensorProto.DOUBLE,
)  # fmt: skip


def operator_of(node: onnx.NodeProto | None) -> str:
    """Return the operator: "MatMul", or "com.microsoft.MatMulNBits"; "" where there is no node."""
    if node is None:
        return ""
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """Return a whole number among the attributes of a node."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


class GraphIndex:
    """A graph as `GraphProto`s do not show it."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.outputs = {value.name for value in graph.output}
        self.tensors = {t.name: t for t in graph.initializer}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self.position: dict[str, int] = {}  # of the node that makes a value
        for index, node in enumerate(graph.node):
            for name in filter(None, node.output):
                self.makers[name] = node
                self.position[name] = index
            for name in dict.fromkeys((*node.input, *captured(node))):
                self.readers[name].append(node)
            if operator_of(node) == "Constant":
                self.tensors.update(
                    (node.output[0], a.t) for a in node.attribute if a.name == "value"
                )
        self._dims: dict[str, Dims | None] = {}

    def source(self, name: str) -> onnx.TensorProto | None:
        """Return the tensor that a constant is computed from: its largest one; None for data."""
        waiting, seen, found = [name], {name}, list[onnx.TensorProto]()
        while waiting:
            value = waiting.pop()
            if value in self.tensors:
                found.append(self.tensors[value])
                continue
            node = self.makers.get(value)
            if node is None or len(seen) > _MOST_VALUES or any(captured(node)):
                return None
            waiting += [v for v in node.input if v and v not in seen]
            seen.update(node.input)
        return max(found, key=lambda t: math.prod(t.dims), default=None)

    def dims(self, name: str) -> Dims | None:
        """Return the shape of a constant, where it is easily told."""
        if name not in self._dims:
            self._dims[name] = self._find_dims(name)
        return self._dims[name]

    def _find_dims(self, name: str) -> Dims | None:
        if name in self.tensors:
            return tuple(self.tensors[name].dims)
        node = self.makers.get(name)
        operator = operator_of(node)
        if node is None or not node.input:
            return None
        first = self.dims(node.input[0])
        if operator == "Transpose" and first is not None:
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
            return tuple(first[i] for i in order or reversed(range(len(first))))
        if operator == "Reshape":
            return self._reshaped(first, node.input[1])
        if operator in ARITHMETIC:
            second = self.dims(node.input[1])
            if first is None or second is None:
                return None
            return tuple(np.broadcast_shapes(first, second))
        return first if operator in KEEPS_SHAPE or operator == "DequantizeLinear" else None

    def _reshaped(self, dims: Dims | None, shape: str) -> Dims | None:
        tensor = self.tensors.get(shape)
        if dims is None or tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        wanted = [int(size) for size in numpy_helper.to_array(tensor).reshape(-1)]
        wanted = [dims[i] if size == 0 and i < len(dims) else size for i, size in enumerate(wanted)]
        known = math.prod(size for size in wanted if size > 0)
        return tuple(size if size >= 0 else math.prod(dims) // max(known, 1) for size in wanted)

    def float_type(self, name: str) -> int:
        """Return the type of the floats that a constant has, or is expanded to; 0 if unknown."""
        if name in self.tensors:
            found = self.tensors[name].data_type
            return found if found in FLOAT_TYPES else 0
        node = self.makers.get(name)
        operator = operator_of(node)
        if node is None:
            return 0
        if operator == "Cast":
            to = attribute(node, "to", 0)
            return to if to in FLOAT_TYPES else 0
        given = node.input[1:2] if operator == "DequantizeLinear" else node.input[:2]
        return next((found for v in given if (found := self.float_type(v))), 0)

    def only_reader(self, name: str) -> onnx.NodeProto | None:
        """Return the node that reads a value, if there is one and nothing else does."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.outputs else None

    @cached_property
    def names(self) -> set[str]:
        """All names of values, which new ones have to differ from."""
        given = {value.name for value in (*self.graph.input, *self.graph.output)}
        return {*given, *self.tensors, *self.makers, *self.readers}


_MOST_VALUES = 64  # that a constant is computed from; a shape of data comes from many


def captured(node: onnx.NodeProto) -> list[str]:
    """Return the values that bodies of a node read."""
    bodies = [a.g for a in node.attribute if a.HasField("g")]
    bodies += [g for a in node.attribute for g in a.graphs]
    return [
        name
        for body in bodies
        for inner in body.node
        for name in (*inner.input, *captured(inner))
        if name
    ]
