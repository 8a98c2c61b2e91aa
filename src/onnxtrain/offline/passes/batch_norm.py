"""BatchNormalization: its mode (statistics of the batch, or stored ones) and running statistics."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.format.names import UPDATED
from onnxtrain.offline.autodiff.rules.batch_norm import rewrite_training_batch_norm
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import constant_array, static_dims
from onnxtrain.offline.optimizers.multi_tensor import STACKED, is_small, update_multi_tensor

BatchNormMode = Literal["batch", "frozen"]
BatchNormChoice = Literal["batch", "frozen", "auto", "model"]  # of training, which has frozen nodes
_AT_REST = (
    "Scale and bias of BatchNormalization ({} nodes) are frozen, but its statistics are those of "
    'each batch, and change, as in the model. bn="auto" uses the stored ones: where most of a '
    "network is frozen, a step then takes less than half of the time."
)
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
    nodes = _nodes(model.graph)
    if bn == "frozen":
        _use_stored_statistics(nodes)
    for node in nodes if bn == "batch" else ():
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    updates = _update_statistics(model.graph) if keep_statistics else {}
    rewrite_training_batch_norm(model)
    return updates


def choose_batch_norm_mode(
    model: ir.Model, bn: BatchNormChoice, weights: Collection[str], trains: Collection[str]
) -> tuple[BatchNormMode | None, tuple[str, ...]]:
    """Return the mode for `set_batch_norm_mode`, and what there is to note.

    A node at rest has a scale and a bias that are weights and do not train. With "auto" it is put
    into inference mode here, with "model" the note says so. Where neither is a weight, as without
    `affine`, the statistics are all that a node learns, so it keeps its mode.
    """
    if bn == "batch" or bn == "frozen":
        return bn, ()
    if bn not in ("auto", "model"):
        raise ArgumentError(f"bn is 'auto', 'batch', 'frozen' or 'model', not {bn!r}")
    at_rest = []
    for node in _nodes(model.graph):
        names = {v.name if v is not None and v.is_initializer() else None for v in node.inputs[1:3]}
        known = None not in names and names.intersection(weights)
        if known and not names.intersection(trains) and _is_training(node):
            at_rest.append(node)
    if bn == "model":
        return None, (_AT_REST.format(len(at_rest)),) if at_rest else ()
    _use_stored_statistics(at_rest)
    return None, ()


def _use_stored_statistics(nodes: Iterable[ir.Node]) -> None:
    for node in nodes:
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
        for output, stored in zip(node.outputs[1:3], node.inputs[3:5], strict=False):
            assert stored is not None
            ir.convenience.replace_all_uses_with(output, stored)
        node.resize_outputs(1)


def _nodes(graph: ir.Graph) -> list[ir.Node]:
    nodes = graph.all_nodes()
    return [n for n in nodes if n.op_type == "BatchNormalization" and n.domain == ""]


def _is_training(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("training_mode", 0))


def _update_statistics(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the last update of each running statistic of the top graph, under its own name."""
    names, latest = Names.of(graph), dict[ir.Value, ir.Value]()
    for node in graph:
        if node.op_type != "BatchNormalization" or node.domain != "":
            continue
        if not _is_training(node):
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
                updated.name = names.fresh(f"{statistic.name}.latest")
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
    groups: dict[tuple[float, float, ir.DataType | None, int], dict[ir.Value, _Average]] = {}
    for updated in updates:
        found = _average(updated)
        if found is not None:
            stored, _, keep, rest = found
            size = math.prod(static_dims(stored) or ()) if op.on_gpu else 0
            groups.setdefault((keep, rest, stored.dtype, size), {})[updated] = found
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
            STACKED if op.on_gpu else None,
        )
    for (old, (stored, *_)), (made,) in zip(averages.items(), rows, strict=True):
        if op.on_gpu:
            made = op.reshape_like(made, stored)
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
