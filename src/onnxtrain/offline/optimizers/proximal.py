"""The proximal term of federated learning."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.format.names import PROXIMAL_MU, REFERENCE
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of
from onnxtrain.offline.optimizers.update_writer import graph_input


def add_proximal(op: Ops, gradients: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Return the gradients of parameters with the proximal term µ(w − w₀) added to each.

    FedProx adds µ/2·‖w − w₀‖² to the loss, where w₀ are the weights that a round of federated
    learning began with: the term pulls the weights of a client back to those of the server. Its
    gradient is added before clipping and the formula; the reported loss does not contain it. Adds
    the inputs `proximal_mu` (FLOAT[1]) and, for each parameter, `<p>.reference`.
    """
    mu = graph_input(op, PROXIMAL_MU, ir.DataType.FLOAT, [1])
    scope, op.scope = op.scope, "proximal"
    made = {}
    numbers: dict[ir.DataType, ir.Value] = {}
    for parameter, gradient in gradients.items():
        dtype = parameter.dtype
        assert dtype is not None
        name = f"{parameter.name}{REFERENCE}"
        reference = graph_input(op, name, dtype, dims_of(parameter) or ())
        if dtype not in numbers:
            numbers[dtype] = op.squeeze(op.cast(mu, dtype), [0])
        pull = op.Mul(numbers[dtype], op.Sub(parameter, reference))
        made[parameter] = op.type_as(op.Add(gradient, pull), parameter)
    op.scope = scope
    return made
