"""Activations that a frozen layer reads before any that trains: their scales stay as they are.

As constants: then onnxruntime runs the frozen part of a training graph with its integer kernels.
What the first layer that trains reads still follows the data.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.initializers import initializer
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.loss_model import choose_outputs
from onnxtrain.offline.passes.quantize.insert import QUANTIZER, Inserted
from onnxtrain.offline.writer.open_model import open_model

Array = np.ndarray[Any, Any]


def fix_scales(model: ir.Model, inserted: Inserted, trained: Collection[str]) -> Inserted:
    """Replace scales that nothing in training changes, in place; return what else was added."""
    graph = model.graph
    sources = [v for v in (*graph.inputs, *graph.initializers.values()) if v.name in trained]
    moved = depend_on(graph, sources)
    taken: dict[ir.Value, bool] = {}  # each scale and zero point, and whether it can move
    for node in graph:
        if QUANTIZER not in node.metadata_props:
            continue
        for value in node.inputs[1:3]:
            if value is not None and _is_taken(value):
                taken[value] = taken.get(value, False) or _can_move(node.outputs[0], moved)
    fixed = [value for value, can_move in taken.items() if not can_move]
    if not fixed:
        return inserted
    names = [str(value.name) for value in fixed]
    for value, array in zip(fixed, _computed(model, names), strict=True):
        _replace(graph, value, array)
    return Inserted(
        tuple(name for name in inserted.trains if _is_read(graph, name)),
        tuple(name for name in inserted.kept if _is_read(graph, name)),
        tuple(name for name in inserted.folded if name not in names),
    )


def _is_read(graph: ir.Graph, name: str) -> bool:
    return name in graph.initializers and bool(graph.initializers[name].uses())


def _can_move(value: ir.Value, moved: Collection[ir.Value]) -> bool:
    """Tell whether an activation changes in training, or is read by layers that train alone."""
    return value in moved or all(node.outputs[0] in moved for node, _ in value.uses())


def depend_on(graph: ir.Graph, values: Collection[ir.Value]) -> set[ir.Value]:
    """Return all values that are computed from some of these."""
    found = set(values)
    for node in graph:
        if any(v in found for v in node.inputs):
            found.update(node.outputs)
    return found


def _is_taken(value: ir.Value) -> bool:
    """Tell whether this is a row of the vectors that all activations share."""
    node = value.producer()
    return node is not None and node.op_type == "Gather"


def _computed(model: ir.Model, names: Collection[str]) -> list[Array]:
    """Let onnxruntime compute them, as it does in each step."""
    part = model.clone()
    choose_outputs(part.graph, list(names))
    sweep(part.graph)
    part.graph.inputs.clear()
    found: list[Array] = open_model(part).run(None, {})
    return found


def _replace(graph: ir.Graph, value: ir.Value, array: Array) -> None:
    name = str(value.name)
    value.name = f"{name}_taken"
    constant = initializer(name, ir.Tensor(array, name=name))
    graph.register_initializer(constant)
    ir.convenience.replace_all_uses_with(value, constant)
    _remove_unread(graph, value)


def _remove_unread(graph: ir.Graph, value: ir.Value) -> None:
    """Remove what made a value, as far as nothing else reads it."""
    node = value.producer()
    if value.uses() or value.is_graph_output():
        return
    if node is None:
        graph.initializers.pop(str(value.name), None)
    elif not any(output.uses() for output in node.outputs):
        read = [v for v in node.inputs if v is not None]
        graph.remove(node, safe=True)
        for source in read:
            _remove_unread(graph, source)
