"""Finds the layers of a model whose channels can train one by one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxtrain.offline.blocks.values import all_graphs
from onnxtrain.offline.frontend.external_data import read_external_tensor
from onnxtrain.offline.passes.lora.graph_index import attribute, operator_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SparseLayer:
    """A layer with a weight of its own, which has a slice for each channel of the output."""

    node: onnx.NodeProto
    weight: str
    dims: tuple[int, ...]
    axis: int  # of the channels in the weight

    @property
    def x(self) -> str:
        """The value that the layer reads."""
        return str(self.node.input[0])

    @property
    def channels(self) -> int:
        """How many channels the layer has."""
        return self.dims[self.axis]

    @property
    def elements(self) -> int:
        """How many weights lead to each channel."""
        return math.prod(self.dims) // self.channels


def find_sparse_layers(graph: onnx.GraphProto) -> Iterator[SparseLayer]:
    """Yield the layers in the order of the graph."""
    tensors = {t.name: t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    inputs = {value.name for value in graph.input}
    nodes = (node for body in all_graphs(graph) for node in body.node)
    uses = Counter(name for node in nodes for name in node.input)
    uses.update(value.name for value in graph.output)
    turns = {n.output[0]: n.input[0] for n in graph.node if _turns(n) and uses[n.output[0]] == 1}
    for node in graph.node:
        read = node.input[1] if len(node.input) > 1 else ""
        weight = turns.get(read, read) if operator_of(node) == "MatMul" else read
        tensor = tensors.get(weight)
        if tensor is None or uses[weight] != 1 or weight in inputs or 0 in tensor.dims:
            continue
        dims = tuple(tensor.dims)
        axis = _axis(node, dims)
        if axis is not None and node.input[0] not in tensors:
            yield SparseLayer(node, weight, dims, axis if weight == read else 1 - axis)


def _turns(node: onnx.NodeProto) -> bool:
    """Whether a node transposes a matrix, as torch's newer exporter does before a product."""
    order = next((list(a.ints) for a in node.attribute if a.name == "perm"), [1, 0])
    return operator_of(node) == "Transpose" and order == [1, 0]


def _axis(node: onnx.NodeProto, dims: tuple[int, ...]) -> int | None:
    """Return the axis of the channels in the weight of a layer, if it has such a form."""
    operator = operator_of(node)
    if operator == "Conv" and len(dims) > 2:
        groups = attribute(node, "group", 1)
        is_depthwise = groups == dims[0] and dims[1] == 1
        return 0 if groups == 1 or is_depthwise else None
    if operator == "MatMul" and len(dims) == 2:
        return 1
    if operator == "Gemm" and len(dims) == 2 and not attribute(node, "transA", 0):
        factor = next((a.f for a in node.attribute if a.name == "alpha"), 1.0)
        return None if factor != 1.0 else 1 - int(attribute(node, "transB", 0) != 0)
    return None


def array_of(graph: onnx.GraphProto, name: str, path: Path | None) -> Array:
    """Return the elements of an initializer, which may be in a file beside the model."""
    tensor = onnx.TensorProto()
    tensor.CopyFrom(next(t for t in graph.initializer if t.name == name))
    if path is not None:
        read_external_tensor(tensor, path)
    array: Array = numpy_helper.to_array(tensor)
    return array
