"""The proximal term of federated learning, which pulls a client's weights back to the server's.

FedProx adds µ/2·‖w − w₀‖² to the loss, where w₀ are the weights that the round began with. Its
gradient, µ(w − w₀), is added to that of the loss before clipping and the formula of the optimizer.
The reported loss does not contain it.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.format.names import PROXIMAL_MU, REFERENCE
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.optimizers.update_writer import reserve


def add_proximal(
    op: Ops, graph: ir.Graph, gradients: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Return the gradients of parameters with µ(w − w₀) added to each.

    Adds the inputs `proximal_mu` (FLOAT[1]) and, for each parameter, `<p>.reference`.
    """
    mu = ir.Value(name=_reserve(op, PROXIMAL_MU))
    mu.dtype, mu.shape = ir.DataType.FLOAT, ir.Shape([1])
    graph.inputs.append(mu)
    scope, op.scope = op.scope, "proximal"
    made = {}
    numbers: dict[ir.DataType | None, ir.Value] = {}
    for parameter, gradient in gradients.items():
        reference = op.type_as(
            ir.Value(name=_reserve(op, f"{parameter.name}{REFERENCE}")), parameter
        )
        graph.inputs.append(reference)
        if parameter.dtype not in numbers:
            assert parameter.dtype is not None
            numbers[parameter.dtype] = op.squeeze(op.cast(mu, parameter.dtype), [0])
        pull = op.Mul(numbers[parameter.dtype], op.Sub(parameter, reference))
        made[parameter] = op.type_as(op.Add(gradient, pull), parameter)
    op.scope = scope
    return made


def _reserve(op: Ops, name: str) -> str:
    advice = "Rename it, or generate the artifacts without proximal=True"
    return reserve(op, name, "proximal term", advice)
