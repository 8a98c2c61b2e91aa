"""Optimizer: what all optimizers have in common, and how their updates are written.

`optimizer_graphs.py` puts them into graphs.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.accessor import current
from onnxtrain.offline.blocks.append_graph import append, writer
from onnxtrain.offline.blocks.block import ForwardBlock
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import FLOATS, working_type
from onnxtrain.offline.graph.versions import FLOOR_OPSET
from onnxtrain.offline.optimizers.clip import (
    ClipGradNorm,
    ClipGradValue,
    GradientClip,
    sum_of_squares,
)
from onnxtrain.offline.optimizers.finite_guard import (
    FiniteCheck,
    Sum,
    check_finite,
    fast_sum_of_squares,
    guarded_formula,
    plain_sum,
)
from onnxtrain.offline.optimizers.late_gradients import LateGradient
from onnxtrain.offline.optimizers.native_update import (
    SlotGroup,
    StepInputs,
    StepNumbers,
    as_kernel,
)
from onnxtrain.offline.optimizers.optimizer_graphs import write_optimizer
from onnxtrain.offline.optimizers.update_context import (
    ParameterGroup,
    UpdateContext,
    at_least_zero,
    settings_of,
)
from onnxtrain.offline.optimizers.update_writer import (
    Formula,
    Slot,
    Update,
    Updated,
    UpdateWriter,
)


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for a parameter, of its shape."""

    name: str  # momentum0, momentum1 ...
    dtype: ir.DataType
    initial: float = 0.0  # what it is filled with before the first step


class Optimizer(ForwardBlock):
    """An update rule, as a graph.

    A subclass defines its states (`initial`) and its `formula`. Clipping, parameter groups, element
    types and the graph are the same for all.

    Args:
        weight_decay: how strongly the formula shrinks the weights.
        clip_grad: `ClipGradNorm` or `ClipGradValue`, or None.
        groups: parameters with settings of their own; the first that matches a name counts.

    """

    initial: tuple[float, ...] = ()  # the initial value of each state
    squares = False  # whether a state holds squares of gradients, which overflow before these do
    chunked = True  # whether `build` updates large tensors in chunks

    def __init__(
        self,
        weight_decay: float = 0.0,
        clip_grad: GradientClip | None = None,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__()
        if clip_grad is not None and not isinstance(clip_grad, GradientClip):
            raise BlockError(
                f"clip_grad is a ClipGradNorm or a ClipGradValue, not {type(clip_grad).__name__}"
            )
        self.weight_decay = at_least_zero("weight_decay", weight_decay)
        self.clip_grad = clip_grad
        self.groups = tuple(groups)

    @abstractmethod
    def formula(self, ctx: UpdateContext) -> Formula:
        """Return `update(parameter, gradient, *states)`, which returns what they become.

        Numbers are computed here, once; the update has element-wise operators only, and reads each
        state in one node.
        """

    def states(self, dtype: ir.DataType) -> tuple[State, ...]:
        """Return the states of a parameter of some element type.

        Half types are updated in float32 and have one more state: what was lost when the parameter
        was rounded. Parameter and remainder together are exactly the float32 weight; small updates
        would never change the rounded one. The remainder starts at zero, as other states do.
        """
        if dtype not in FLOATS:
            raise BlockError(f"a parameter is of type {dtype}: optimizers update floats only")
        working = _working(dtype)
        fills = (*self.initial, 0.0) if dtype != working else self.initial
        return tuple(State(f"momentum{i}", working, fill) for i, fill in enumerate(fills))

    def write(
        self,
        op: Ops,
        slots: Sequence[Slot],
        learning_rate: ir.Value,
        step: ir.Value,
        *,
        chunked: bool = False,
        check: FiniteCheck | None = None,
        alone: Collection[ir.Value] = (),
    ) -> list[Updated]:
        """Write the update of all parameters into a graph.

        Args:
            op: the writer of the graph.
            slots: what to update; the shapes of parameters are static. Gradients may be rows.
            learning_rate: FLOAT[1].
            step: INT64[1], the number of the step that is being taken; 1 is the first.
            chunked: update large tensors chunk by chunk, while a chunk is in the cache. Their
                results have the shape [chunks, elements of a chunk], with the elements in the same
                order: bind them by address.
            check: the check of the gradients, whose sums clipping uses.
            alone: the parameters that one kernel does not update together with others.

        """
        scope, op.scope = op.scope, "optimizer"
        given = StepInputs(learning_rate, step, check)
        made: dict[ir.Value, Updated] = {}
        try:
            with op.arithmetic():
                slots = [slot.shaped(op) for slot in slots]
                groups = self.grouped(slots, alone)
                shared = self.step_numbers(op, slots, given) if len(groups) > 1 else None
                for group in groups:

                    def write(group: SlotGroup = group) -> list[Updated]:
                        numbers = shared or self.step_numbers(op, slots, given)
                        return UpdateWriter(op, chunked).write(self.updates(op, group, numbers))

                    updated = as_kernel(op, self, group, given, chunked, write)
                    parameters = (slot.parameter for slot in group.slots)
                    made.update(zip(parameters, updated, strict=True))
        finally:
            op.scope = scope
        return [made[slot.parameter] for slot in slots]

    def check(
        self,
        op: Ops,
        gradients: Mapping[ir.Value, ir.Value],
        order: Sequence[ir.Value],
        loss: ir.Value | None = None,
        statistics: Sequence[ir.Value] = (),
        *,
        early: bool = False,
        late: Mapping[ir.Value, LateGradient] | None = None,
    ) -> FiniteCheck:
        """Write the check whether a step is finite; see `check_finite`."""
        return check_finite(
            op, gradients, order, loss, statistics,
            sum_of=self.sum_of, early=early and not self.reads_sums,
            factors={p: found.factors for p, found in (late or {}).items()},
        )  # fmt: skip

    @property
    def sum_of(self) -> Sum:
        """What tells whether a gradient is finite, and what the update keeps of it."""
        if self.reads_sums:
            return sum_of_squares
        return fast_sum_of_squares if self.squares and self.clip_grad is None else plain_sum

    @property
    def reads_sums(self) -> bool:
        """Whether an update reads the sums of the check: the norm of all gradients."""
        return isinstance(self.clip_grad, ClipGradNorm)

    @property
    def reads_one_gradient(self) -> bool:
        """Whether the update of a parameter reads no gradient but its own."""
        return self.clip_grad is None or type(self.clip_grad) is ClipGradValue

    def kernel(self, weight_decay: float) -> dict[str, int | float] | None:
        """Return the settings that the native kernel of this class has as attributes.

        None where there is none. A subclass does not inherit it, since its formula is another.
        """
        return None

    def grouped(self, slots: Sequence[Slot], alone: Collection[ir.Value] = ()) -> list[SlotGroup]:
        """Return the parameters by their settings and types: each group has one formula."""
        names = [str(slot.parameter.name) for slot in slots]
        found: dict[tuple[float, float, ir.DataType | ir.Value | None], list[Slot]] = {}
        settings = settings_of(self.groups, self.weight_decay, names)
        for slot, (decay, scale) in zip(slots, settings, strict=True):
            parameter = slot.parameter
            key = parameter if parameter in alone else parameter.dtype
            found.setdefault((decay, scale, key), []).append(slot)
        return [SlotGroup(own, decay, scale) for (decay, scale, _), own in found.items()]

    def step_numbers(self, op: Ops, slots: Sequence[Slot], given: StepInputs) -> StepNumbers:
        """Write what all groups have in common."""
        rate, number = (
            op.squeeze(op.cast(v, ir.DataType.DOUBLE), [0]) for v in (given.rate, given.step)
        )
        gradients, clip = [slot.gradient for slot in slots], None
        if given.check is not None and isinstance(self.clip_grad, ClipGradNorm):
            clip = self.clip_grad.factor(op, given.check.of_gradients)
        elif self.clip_grad is not None and type(self.clip_grad) is not ClipGradValue:
            gradients, clip = self.clip_grad.write(op, gradients)
        by_parameter = {s.parameter: g for s, g in zip(slots, gradients, strict=True)}
        passed = given.check.passed if op.on_gpu and given.check is not None else None
        return StepNumbers(rate, number, clip, by_parameter, passed)

    def updates(self, op: Ops, group: SlotGroup, numbers: StepNumbers) -> list[Update]:
        """Return the update of each parameter of a group, with the formula of all of them."""
        gradients = [numbers.gradients[slot.parameter] for slot in group.slots]
        if type(self.clip_grad) is ClipGradValue:
            gradients, _ = self.clip_grad.write(op, gradients)
        dtype = group.slots[0].parameter.dtype
        assert dtype is not None
        working = _working(dtype)
        scale, rate = group.rate_scale, numbers.rate
        own_rate = rate if scale == 1.0 else op.Mul(rate, scale)
        context = UpdateContext(
            op, working, own_rate, numbers.step, group.weight_decay, numbers.clip
        )
        formula = self.formula(context)
        if dtype != working:
            formula = _with_remainder(op, formula)
        if numbers.passed is not None:
            formula = guarded_formula(op, numbers.passed, formula)
        return [
            Update(slot, gradient, formula)
            for slot, gradient in zip(group.slots, gradients, strict=True)
        ]

    # ---- as a block ----------------------------------------------------------------------------

    def build(self, parameters: Any, *, proximal: bool = False) -> str:
        """Add the whole optimizer graph; return the name of the output that tells of an update.

        `parameters` is what `TrainingBlock.parameters()` returns: the trainable and the frozen
        tensors. With `proximal`, the graph has the proximal term of federated learning.
        """
        trainable: Sequence[onnx.TensorProto] = parameters[0]
        if not trainable:
            raise BlockError(
                "there is nothing to optimize: call requires_grad(name) for a parameter first"
            )
        accessor = current()
        op = writer(accessor, "optimizer", FLOOR_OPSET)
        flag_name = accessor.fresh_name(f"{type(self).__name__.lower()}.updated_flag")
        write_optimizer(
            op,
            self,
            [(t.name, ir.DataType(t.data_type), list(t.dims)) for t in trainable],
            flag_name,
            chunked=self.chunked,
            proximal=proximal,
        )
        append(accessor.model, op.target)
        return flag_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the optimizer graph into the model of the context, and check it."""
        flag_name = self.build(*args, **kwargs)
        current().inferred(check=True, shape_arithmetic=False)
        self._model = copy.deepcopy(current().model)
        return flag_name


def _working(dtype: ir.DataType) -> ir.DataType:
    value = ir.Value(name="of this type")
    value.dtype = dtype
    return working_type(value)


def _with_remainder(op: Ops, formula: Formula) -> Formula:
    """Compute in float32, where the last state is what rounding took from the parameter."""

    def update(parameter: ir.Value, gradient: ir.Value, *states: ir.Value) -> Sequence[ir.Value]:
        *own, remainder = states
        weight = op.Add(op.Cast(parameter, to=remainder.dtype), remainder)
        exact, *updated = formula(weight, op.cast(gradient, remainder.dtype), *own)
        rounded = op.Cast(exact, to=parameter.dtype)
        return rounded, *updated, op.Sub(exact, op.Cast(rounded, to=remainder.dtype))

    return update
