"""The mode of BatchNormalization: the statistics of the batch, or the stored ones."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.format.names import UPDATED
from onnxtrain.offline.autodiff.rules.batch_norm import rewrite_training_batch_norm
from onnxtrain.offline.graph.names import Names

BatchNormMode = Literal["batch", "frozen"]


def set_batch_norm_mode(
    model: ir.Model, bn: BatchNormMode | None, *, keep_statistics: bool = False
) -> dict[str, ir.Value]:
    """Let every BatchNormalization use batch or stored statistics, in plain operators.

    Args:
        model: a canonical model, changed in place.
        bn: "batch", "frozen", or None for what each node says.
        keep_statistics: compute the running statistics that a training step updates.

    Returns:
        The updated value of each running statistic, `<name>.updated`, if they are kept.

    """
    if bn not in (None, "batch", "frozen"):
        raise ArgumentError(f"bn is 'batch', 'frozen' or None, not {bn!r}")
    if bn is not None:
        _set_mode(model, bn)
    updates = _update_statistics(model.graph) if keep_statistics else {}
    rewrite_training_batch_norm(model)
    return updates


def _set_mode(model: ir.Model, bn: BatchNormMode) -> None:
    for node in model.graph.all_nodes():
        if node.op_type == "BatchNormalization" and node.domain == "":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", int(bn == "batch"))
            if bn == "frozen":
                for output, stored in zip(node.outputs[1:3], node.inputs[3:5], strict=False):
                    assert stored is not None
                    ir.convenience.replace_all_uses_with(output, stored)
                node.resize_outputs(1)


def _update_statistics(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the last update of each running statistic of the top graph, under its own name."""
    names, latest = Names.of(graph), dict[ir.Value, ir.Value]()
    for node in graph:
        if node.op_type != "BatchNormalization" or node.domain != "":
            continue
        if not node.attributes.get_int("training_mode", 0):
            continue
        given = [v.name for v in node.outputs]
        node.resize_outputs(3)
        for index, statistic in ((3, node.inputs[3]), (4, node.inputs[4])):
            if statistic is None or not statistic.is_initializer():
                continue
            if statistic in latest:  # a layer that is used twice updates twice
                node.replace_input_with(index, latest[statistic])
            updated = node.outputs[index - 2]
            if index - 2 >= len(given) or not given[index - 2]:
                updated.name = names.fresh(f"{statistic.name}{UPDATED}")
            latest[statistic] = updated
    made = {}
    for statistic, updated in latest.items():
        named = ir.node("Identity", [updated], name=names.fresh(f"{statistic.name}.update"))
        output = named.outputs[0]
        output.name = f"{statistic.name}{UPDATED}"
        if updated.name == output.name:
            updated.name = names.fresh(f"{statistic.name}.latest")
        output.type, output.shape = statistic.type, statistic.shape
        graph.append(named)
        made[str(statistic.name)] = output
    return made
