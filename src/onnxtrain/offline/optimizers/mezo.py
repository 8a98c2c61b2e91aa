"""MeZO: training by two forward passes, without a gradient.

The parameters are moved a little along a random direction z, forth and back; the difference of the
two losses says how the loss changes along z, and the parameters take a step along it:

    g = (loss(p + eps·z) − loss(p − eps·z)) / (2·eps),   p' = p·(1 − rate·decay) − rate·g·z

z follows from the seed of the step, and is drawn anew wherever it is needed (`directions.py`). No
operator needs a gradient, and nothing of the forward pass is kept: a step takes about the memory of
inference. On average g·z is the gradient, but each step learns one number about it, so that
training takes many more steps, the more the more parameters train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.format.names import LEARNING_RATE, RANDOM_SEED, STEP, UPDATED
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.optimizers.directions import Directions, Distribution, number_for
from onnxtrain.offline.optimizers.finite_guard import check_finite, update_if
from onnxtrain.offline.optimizers.in_place import after_readers
from onnxtrain.offline.optimizers.native_update import StepInputs
from onnxtrain.offline.optimizers.optimizer_graphs import state_inputs
from onnxtrain.offline.optimizers.rules import SGD
from onnxtrain.offline.optimizers.update_context import ParameterGroup
from onnxtrain.offline.optimizers.update_writer import Slot, Update, graph_input, reserve, values_of

if TYPE_CHECKING:
    from onnxtrain.offline.optimizers.optimizer import Optimizer

SLOW = (
    "MeZO trains without gradients, by two forward passes a step: the memory is about that of "
    "inference, but it is slow. Expect 10 to 100 times as many steps as with a gradient, and train "
    "few parameters."
)


class MeZO(SGD):
    """Training without gradients, by two forward passes a step.

    It is for models with operators that have no gradient, and for devices that have no memory for
    one. It is slow: expect 10 to 100 times as many steps, and train few parameters.

    Args:
        epsilon: how far the parameters are moved to see how the loss changes.
        distribution: what the random directions are made of: "signs" (+1 or −1, which is fast), or
            "normal" numbers, as in the article that introduced MeZO.
        weight_decay: how strongly each step shrinks the weights.
        groups: parameters with settings of their own; the first that matches a name counts.

    """

    def __init__(
        self,
        epsilon: float = 1e-3,
        distribution: Distribution = "signs",
        weight_decay: float = 0.0,
        *,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__(weight_decay=weight_decay, groups=groups)
        if not (0 < epsilon < math.inf):
            raise BlockError(f"epsilon is {epsilon}; it must be above zero")
        if distribution not in ("signs", "normal"):
            raise BlockError(f"distribution is {distribution!r}; there are 'signs' and 'normal'")
        self.epsilon = float(epsilon)
        self.distribution: Distribution = distribution

    def write_step(
        self,
        op: Ops,
        graph: ir.Graph,
        parameters: Sequence[ir.Value],
        slope: ir.Value,
        statistics: Mapping[ir.Value, ir.Value],
    ) -> list[ir.Value]:
        """Write the update behind two forward passes; return the new outputs of the graph.

        Args:
            op: the writer of the graph.
            graph: the graph, whose first output is the loss.
            parameters: what trains.
            slope: how the loss changes along the direction, a scalar.
            statistics: the new running statistics, by the old ones.

        """
        slots = [Slot(p, slope, state_inputs(op, self, p)) for p in parameters]
        rate = graph_input(op, LEARNING_RATE, ir.DataType.FLOAT, [1])
        step = graph_input(op, STEP, ir.DataType.INT64, [1])
        new = list(statistics.values())
        check = check_finite(op, {parameters[0]: slope}, parameters[:1], graph.outputs[0], new)
        seed = next(v for v in graph.inputs if v.name == RANDOM_SEED)
        directions = Directions(op, seed, parameters, self.distribution)

        def write() -> list[ir.Value]:
            with op.arithmetic():
                made = self._write(op, directions, slots, StepInputs(rate, step, None))
            return [*made, *new]

        passed = after_readers(op, graph, check.passed, [*parameters, *statistics])
        made = update_if(op, passed, [*values_of(slots), *statistics], write)
        return [*made, *check.outputs(op)]

    def _write(
        self, op: Ops, directions: Directions, slots: Sequence[Slot], given: StepInputs
    ) -> list[ir.Value]:
        """Write the updates of all slots, one after the other."""
        numbers = self.step_numbers(op, slots, given)
        updates: dict[ir.Value, Update] = {
            update.slot.parameter: update
            for group in self.grouped(slots)
            for update in self.updates(op, group, numbers)
        }
        made: list[ir.Value] = []
        for slot in slots:
            op.scope = f"optimizer/{slot.parameter.name}"
            formula = updates[slot.parameter].formula
            values, shaped = directions.along(
                slot.parameter,
                number_for(op, slot.gradient, slot.parameter),
                values_of([slot]),
                lambda z, p, *states, formula=formula: formula(p, z, *states),
            )
            for old, value in zip(values_of([slot]), values, strict=True):
                value.name = reserve(op, f"{old.name}{UPDATED}")
                if shaped:
                    op.type_as(value, old)
            made += values
        return made


def needs_gradient(optimizer: Optimizer | None) -> bool:
    """Whether what an optimizer does needs the model to have gradients."""
    return not isinstance(optimizer, MeZO)
