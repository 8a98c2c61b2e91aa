"""Puts trained channels into the weights of a model: W' = W with some rows replaced.

The rows are parameters of their own, and the rest of W is frozen. ScatterND joins them in each run;
in a model that is exported, both are constants, and a runtime joins them when it loads the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.blocks.values import all_graphs, defined_names
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.passes.sparse.layers import SparseLayer, array_of

ROWS = ".rows"  # what the name of the trained rows of a weight ends with
_SCATTER_OPSET = 11
Array = np.ndarray[Any, Any]


def add_rows(
    proto: onnx.ModelProto,
    path: Path | None,
    chosen: Mapping[str, Array],
    layers: list[SparseLayer],
) -> tuple[onnx.ModelProto, list[str]]:
    """Return a copy of a model whose chosen channels are parameters, and the names of these.

    `chosen` has the numbers of the channels of each weight, in ascending order. A weight all of
    whose channels are chosen trains as it is.
    """
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=1)
    if opset < _SCATTER_OPSET:
        raise ArgumentError(
            f"sparse needs a model of opset {_SCATTER_OPSET} or later, and this one has {opset}: "
            "export the model with a later opset"
        )
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph = made.graph
    names = Names(name for body in all_graphs(graph) for name in defined_names(body))
    nodes, trained = list[onnx.NodeProto](), list[str]()
    readers = {name: node for node in graph.node for name in node.input}
    for layer in layers:
        if len(chosen.get(layer.weight, ())) == layer.channels:
            trained.append(layer.weight)
        elif layer.weight in chosen:
            rows = names.fresh(f"{layer.weight}{ROWS}")
            nodes += _rewrite(graph, path, layer, chosen[layer.weight], readers[layer.weight],
                              rows, names)  # fmt: skip
            trained.append(rows)
    # onnxruntime computes what is later in a file first: a weight is joined just before its layer.
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    return made, trained


def _rewrite(
    graph: onnx.GraphProto,
    path: Path | None,
    layer: SparseLayer,
    channels: Array,
    node: onnx.NodeProto,
    rows: str,
    names: Names,
) -> list[onnx.NodeProto]:
    """Let the reader of a weight read it with rows joined in; return the nodes for that."""
    weight = np.moveaxis(array_of(graph, layer.weight, path), layer.axis, 0)
    frozen = layer.weight
    if layer.axis != 0:
        frozen = names.fresh(f"{layer.weight}.transposed")
        index = next(i for i, t in enumerate(graph.initializer) if t.name == layer.weight)
        del graph.initializer[index]
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(weight), frozen))
    places, joined = names.fresh(f"{rows}.places"), names.fresh(f"{rows}.joined")
    graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(weight[channels]), rows))
    graph.initializer.append(
        numpy_helper.from_array(channels.reshape(-1, 1).astype(np.int64), places)
    )
    nodes = [helper.make_node("ScatterND", [frozen, places, rows], [joined], joined)]
    node.input[list(node.input).index(layer.weight)] = joined
    if layer.axis != 0 and node.op_type == "Gemm":
        kept = [a for a in node.attribute if a.name != "transB"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("transB", 1)])
    elif layer.axis != 0:
        node.input[1] = names.fresh(f"{joined}_T")
        nodes.append(helper.make_node("Transpose", [joined], [node.input[1]], node.input[1],
                                      perm=[1, 0]))  # fmt: skip
    return nodes
