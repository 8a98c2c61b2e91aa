"""BatchNormalization: its mode (statistics of the batch, or stored ones) and running statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.format.names import UPDATED
from onnxtrain.offline.autodiff.rules.batch_norm import rewrite_training_batch_norm
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array
from onnxtrain.offline.optimizers.multi_tensor import is_small, update_multi_tensor

BatchNormMode = Literal["batch", "frozen"]
_Average = tuple[ir.Value, ir.Value, float, float]  # stored · keep + now · rest


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
    for node in model.graph.all_nodes():
        if bn is not None and node.op_type == "BatchNormalization" and node.domain == "":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", int(bn == "batch"))
            if bn == "frozen":
                for output, stored in zip(node.outputs[1:3], node.inputs[3:5], strict=False):
                    assert stored is not None
                    ir.convenience.replace_all_uses_with(output, stored)
                node.resize_outputs(1)
    updates = _update_statistics(model.graph) if keep_statistics else {}
    rewrite_training_batch_norm(model)
    return updates


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


# ---- the running statistics, updated as one vector ---------------------------------------------


def join_statistics(op: Ops, updates: Sequence[ir.Value]) -> list[ir.Value]:
    """Replace equal updates of running statistics by one update of their concatenation.

    Each layer has two of them, and updates each with three operators on small vectors. For the
    fifty layers of MobileNetV2 that is a tenth of the training graph, which onnxruntime reads and
    optimizes before the first step. `optimizers/multi_tensor.py` does the same for parameters.
    """
    groups: dict[tuple[float, float, ir.DataType | None], dict[ir.Value, _Average]] = {}
    for updated in updates:
        found = _average(updated)
        if found is not None:
            stored, _, keep, rest = found
            groups.setdefault((keep, rest, stored.dtype), {})[updated] = found
    joined: dict[ir.Value, ir.Value] = {}
    for averages in groups.values():
        if len(averages) > 1:
            joined.update(_join(op, averages))
    return [joined.get(updated, updated) for updated in updates]


def _join(op: Ops, averages: Mapping[ir.Value, _Average]) -> Iterator[tuple[ir.Value, ir.Value]]:
    _, _, keep, rest = next(iter(averages.values()))
    op.scope = "running_statistics"
    with op.arithmetic():
        rows = update_multi_tensor(
            op,
            lambda stored, now: [stored * keep + now * rest],
            [(stored, now) for stored, now, _, _ in averages.values()],
        )
    for (old, (stored, *_)), (made,) in zip(averages.items(), rows, strict=True):
        made.name, old.name = old.name, op.names.fresh(f"{old.name}_alone")
        yield old, op.type_as(made, stored)


def _average(output: ir.Value) -> _Average | None:
    """Recognise the update of a stored statistic that nothing else uses."""
    total = _made_by(output, "Add")
    if total is None:
        return None
    products = [_made_by(value, "Mul") for value in total.inputs]
    if any(product is None for product in products):
        return None
    (stored, keep), (now, rest) = (p.inputs for p in products if p is not None)
    factors = [constant_array(v) for v in (keep, rest)]
    if stored is None or now is None or any(f is None or f.size != 1 for f in factors):
        return None
    if not (stored.producer() is None and is_small(stored) and is_small(now)):
        return None
    share, other = (float(f.reshape(())) for f in factors if f is not None)
    return stored, now, share, other


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that made a value, before Identity, if it is of a kind."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type == "Identity":
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None
