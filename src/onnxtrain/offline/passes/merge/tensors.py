"""The tensors of a graph that is changed: constants as arrays, and new ones in their places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from onnxtrain.offline.blocks.values import all_graphs, defined_names
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.passes.lora.graph_index import GraphIndex

Array = npt.NDArray[Any]


class Tensors:
    """Reads and replaces the constants of a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.index = GraphIndex(model.graph)
        self.names = Names(name for body in all_graphs(self.graph) for name in defined_names(body))
        self._stored = {tensor.name: tensor for tensor in self.graph.initializer}
        self._inputs = {value.name for value in self.graph.input}

    def is_stored(self, name: str) -> bool:
        """Whether a value is an initializer, and not one that can be fed."""
        return name in self._stored and name not in self._inputs

    def array(self, name: str) -> Array:
        """Return a constant as it is read, computed if it is not stored."""
        if name in self._stored:
            return numpy_helper.to_array(self._stored[name])
        return self._computed(name)

    def _computed(self, name: str) -> Array:
        nodes, waiting, seen = [], [name], set[str]()
        needed = list[onnx.TensorProto]()
        while waiting:
            value = waiting.pop()
            if value in seen or not value:
                continue
            seen.add(value)
            if value in self._stored:
                needed.append(self._stored[value])
            else:
                nodes.append(self.index.makers[value])
                waiting += nodes[-1].input
        nodes.sort(key=lambda node: self.index.position[node.output[0]])
        graph = helper.make_graph(nodes, "c", [], [onnx.ValueInfoProto(name=name)], needed)
        model = helper.make_model(graph, opset_imports=self.model.opset_import)
        model.ir_version = self.model.ir_version
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(model.SerializeToString(), options)
        found: Array = session.run(None, {})[0]
        return found

    def put(self, name: str, value: Array, readers: Iterable[onnx.NodeProto], place: int) -> None:
        """Let nodes read a new tensor at a place: under the old name if nobody else reads it."""
        nodes = list(readers)
        others = [n for n in self.index.readers[name] if all(n is not node for node in nodes)]
        if self.is_stored(name) and not others and name not in self.index.outputs:
            self._stored[name].CopyFrom(numpy_helper.from_array(np.asarray(value, order="C"), name))
            return
        fresh = self.names.fresh(f"{name}.merged")
        made = numpy_helper.from_array(np.asarray(value, order="C"), fresh)
        self.graph.initializer.append(made)
        self._stored[fresh] = self.graph.initializer[-1]
        for node in nodes:
            node.input[place] = fresh

    def set(self, name: str, value: Array) -> None:
        """Replace an initializer by one of any shape."""
        self._stored[name].CopyFrom(numpy_helper.from_array(np.asarray(value, order="C"), name))


def sweep_constants(graph: onnx.GraphProto, before: set[str]) -> None:
    """Remove nodes and initializers that nobody reads any more; `before` were not read anyway."""
    while True:
        read = read_names(graph)
        dead = [
            node
            for node in graph.node
            if not read.intersection(node.output) and not before.intersection(node.output)
        ]
        if not dead:
            break
        for node in dead:
            graph.node.remove(node)
    fed = {value.name for value in graph.input}
    for tensor in list(graph.initializer):
        if tensor.name not in read and tensor.name not in before and tensor.name not in fed:
            graph.initializer.remove(tensor)


def read_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all values that nodes or outputs read, in bodies too."""
    found = {value.name for value in graph.output}
    for body in all_graphs(graph):
        found.update(name for node in body.node for name in node.input)
        found.update(value.name for value in body.output)
    return found


def unread_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of values and initializers of a graph that nobody reads."""
    made = {name for node in graph.node for name in node.output if name}
    return made.union(tensor.name for tensor in graph.initializer) - read_names(graph)
