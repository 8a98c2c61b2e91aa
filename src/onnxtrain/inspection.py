"""What a model holds, as training sees it: weights, running statistics, constants.

`inspect` answers, before anything ships, what would train and whether it can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import onnx_ir as ir

import onnxtrain.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.autodiff.engine import ActivePath, operator_name
from onnxtrain.autodiff.expand import expand_by_definition
from onnxtrain.autodiff.load import ModelLike
from onnxtrain.autodiff.prepare import FROM_CONSTANT, BatchNormMode, prepare
from onnxtrain.autodiff.registry import refusal
from onnxtrain.autodiff.shapes import is_float
from onnxtrain.errors import UnknownNameError


class Role(Enum):
    """What an initializer is to training."""

    WEIGHT = "weight"
    STATISTIC = "running statistic"
    CONSTANT = "constant"


# Inputs that only ever hold weights: a single number there is one too.
_PARAMETER_INPUTS = {
    "BatchNormalization": (1, 2), "Conv": (1, 2), "ConvTranspose": (1, 2), "Gather": (0,),
    "Gemm": (1, 2), "GroupNormalization": (1, 2), "GRU": (1, 2, 3), "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2), "LSTM": (1, 2, 3, 7), "MatMul": (0, 1), "PRelu": (1,),
    "RMSNormalization": (1,), "RNN": (1, 2, 3),
}  # fmt: skip


def roles(graph: ir.Graph, outputs: Iterable[ir.Value], opset: int) -> dict[str, Role]:
    """Sort the initializers of a prepared graph by what they are to the given outputs.

    A weight is a float that the outputs have a gradient for. What cannot be told from the graph is
    decided like this: single numbers are constants unless they stand where only weights do; what
    was in a Constant node is a constant, unless the model keeps all its weights there.
    """
    statistics = set(running_statistics(graph))
    candidates = [
        v
        for v in graph.initializers.values()
        if is_float(v) and not v.is_graph_input() and v.name not in statistics
    ]
    lost = set(ActivePath(list(graph), candidates, outputs, opset).lost())
    constants_hold_weights = not any(
        FROM_CONSTANT not in v.meta and _elements(v) > 1 for v in candidates
    )
    found = {}
    for name, value in graph.initializers.items():
        if name in statistics:
            found[name] = Role.STATISTIC
        elif value in lost or value not in candidates:
            found[name] = Role.CONSTANT
        else:
            weight = _is_weight(value, constants_hold_weights)
            found[name] = Role.WEIGHT if weight else Role.CONSTANT
    return found


def _is_weight(value: ir.Value, constants_hold_weights: bool) -> bool:
    in_parameter_place = any(
        node.domain == "" and index in _PARAMETER_INPUTS.get(node.op_type, ())
        for node, index in value.uses()
    )
    if FROM_CONSTANT in value.meta:
        return constants_hold_weights and (in_parameter_place or _elements(value) > 1)
    rank = len(value.shape) if value.shape is not None else 0
    return _elements(value) > 1 or in_parameter_place or rank > 0


def running_statistics(graph: ir.Graph) -> list[str]:
    """Return the initializers that BatchNormalization keeps its mean and variance in."""
    return [
        value.name
        for node in graph.all_nodes()
        if node.op_type == "BatchNormalization" and node.domain == ""
        for value in node.inputs[3:5]
        if value is not None and value.is_initializer() and value.name
    ]


def _elements(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.size


@dataclass(frozen=True)
class Report:
    """What `inspect` found: counts are numbers of elements, sizes are bytes."""

    outputs: tuple[str, ...]
    weights: dict[str, int]
    statistics: dict[str, int]
    constants: dict[str, int]
    without_gradient: tuple[str, ...]
    parameter_bytes: int
    activation_bytes_per_sample: int
    opset: int

    @property
    def parameter_count(self) -> int:
        """How many numbers would train."""
        return sum(self.weights.values())

    @property
    def can_train(self) -> bool:
        """Whether every operator between the weights and the output has a gradient."""
        return bool(self.weights) and not self.without_gradient

    def __str__(self) -> str:
        """Return the report as a few lines of text."""
        lines = [
            f"outputs       {', '.join(self.outputs)} (opset {self.opset})",
            f"weights       {len(self.weights)} tensors, {self.parameter_count:,} numbers, "
            f"{self.parameter_bytes / 2**20:,.1f} MB",
            f"statistics    {len(self.statistics)} tensors (BatchNormalization)",
            f"constants     {len(self.constants)} tensors",
            f"activations   about {self.activation_bytes_per_sample / 2**20:,.1f} MB per sample",
        ]
        if self.without_gradient:
            lines.append(f"no gradient   {'; '.join(self.without_gradient)}")
        return "\n".join(lines)


def inspect(model: ModelLike, of: str | None = None, *, bn: BatchNormMode | None = None) -> Report:
    """Tell what of a model would train, and what stands in the way.

    Args:
        model: the model, or the path to its file.
        of: the output that the loss will be computed from; the first one by default.
        bn: the mode of BatchNormalization, as for training.

    Example:
        >>> print(onnxtrain.inspect("mobilenet.onnx"))

    """
    prepared = prepare(model, "frozen" if bn is None else bn)
    graph, opset = prepared.graph, prepared.opset_imports[""]
    output = _output(graph, of)
    found = roles(graph, [output], opset)
    by_role = {
        role: {n: _elements(graph.initializers[n]) for n, r in found.items() if r is role}
        for role in Role
    }
    weights = [graph.initializers[n] for n in by_role[Role.WEIGHT]]

    def path() -> ActivePath:
        return ActivePath(list(graph), weights, [output], opset)

    expand_by_definition(prepared, path)
    active = path()
    return Report(
        outputs=tuple(v.name or "" for v in graph.outputs),
        weights=by_role[Role.WEIGHT],
        statistics=by_role[Role.STATISTIC],
        constants=by_role[Role.CONSTANT],
        without_gradient=tuple(
            f"{operator_name(n)} (node {n.name!r}): "
            f"{refusal(n.op_type, n.domain) or 'no gradient rule'}"
            for n in active.without_rule()
        ),
        parameter_bytes=sum(v.const_value.nbytes for v in weights if v.const_value is not None),
        activation_bytes_per_sample=_activation_bytes(active),
        opset=opset,
    )


def _output(graph: ir.Graph, name: str | None) -> ir.Value:
    if name is None:
        return graph.outputs[0]
    for value in graph.outputs:
        if value.name == name:
            return value
    raise UnknownNameError(
        f"the model has no output {name!r}; it has {', '.join(repr(v.name) for v in graph.outputs)}"
    )


def _activation_bytes(path: ActivePath) -> int:
    """Estimate what the backward pass keeps of the forward pass, for one sample.

    Every value on the path counts once, with symbolic dimensions taken as one.
    """
    total = 0
    for node in path.nodes:
        for value in node.outputs:
            if value.shape is not None and value.dtype is not None:
                sizes = [d if isinstance(d, int) else 1 for d in value.shape]
                total += int(math.prod(sizes) * value.dtype.itemsize)
    return total
