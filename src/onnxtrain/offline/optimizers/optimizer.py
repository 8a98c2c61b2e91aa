"""Optimizer: what all optimizers have in common, and how their updates get into a graph.

All updates are in the branch of one If: where the loss or a gradient is not finite, nothing changes
(`finite_guard.py`).

Updates are in place. A runtime may bind the output `<x>.updated` to the memory of the input `<x>`,
for parameters and states alike, so that nothing is allocated or copied. This is safe because

1. the If depends on every other node that reads `<x>` (`late_readers` lists exceptions; there are
   none), and so does the node that writes `<x>.updated` in its branch;
2. where that node reads `<x>` itself, it is element-wise on equal shapes: it reads each element
   before it writes it. A Scan over chunks does so chunk by chunk, a native kernel too.

A formula therefore reads a state once, and continues with the updated one.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import BlockError
from onnxtrain.format.names import GRADIENT, LEARNING_RATE, STEP
from onnxtrain.offline.blocks.accessor import current
from onnxtrain.offline.blocks.append_graph import append, writer
from onnxtrain.offline.blocks.block import ForwardBlock
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import FLOATS, Dim, dims_of, working_type
from onnxtrain.offline.graph.sweep import sweep
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
    early_check,
    fast_sum_of_squares,
    guarded_formula,
    guarded_updates,
    plain_sum,
    update_if,
)
from onnxtrain.offline.optimizers.in_place import after_readers, steady_row
from onnxtrain.offline.optimizers.native_update import (
    SlotGroup,
    StepInputs,
    StepNumbers,
    as_kernel,
)
from onnxtrain.offline.optimizers.proximal import add_proximal
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
    graph_input,
    reserve,
    values_of,
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

        """
        scope, op.scope = op.scope, "optimizer"
        given = StepInputs(learning_rate, step, check)
        made: dict[ir.Value, Updated] = {}
        try:
            with op.arithmetic():
                slots = [slot.shaped(op) for slot in slots]
                groups = self._groups(slots)
                shared = self._numbers(op, slots, given) if len(groups) > 1 else None
                for group in groups:

                    def write(group: SlotGroup = group) -> list[Updated]:
                        numbers = shared or self._numbers(op, slots, given)
                        return UpdateWriter(op, chunked).write(self._updates(op, group, numbers))

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
    ) -> FiniteCheck:
        """Write the check whether a step is finite; see `check_finite`."""
        sum_of: Sum = plain_sum
        if isinstance(self.clip_grad, ClipGradNorm):
            sum_of = sum_of_squares
        elif self.squares and self.clip_grad is None:
            sum_of = fast_sum_of_squares
        early = early and sum_of is not sum_of_squares
        return check_finite(op, gradients, order, loss, statistics, sum_of=sum_of, early=early)

    def kernel(self, weight_decay: float) -> dict[str, int | float] | None:
        """Return the settings that the native kernel of this class has as attributes.

        None where there is none. A subclass does not inherit it, since its formula is another.
        """
        return None

    def _groups(self, slots: Sequence[Slot]) -> list[SlotGroup]:
        """Return the parameters by their settings and types: each group has one formula."""
        names = [str(slot.parameter.name) for slot in slots]
        found: dict[tuple[float, float, ir.DataType | None], list[Slot]] = {}
        settings = settings_of(self.groups, self.weight_decay, names)
        for slot, (decay, scale) in zip(slots, settings, strict=True):
            found.setdefault((decay, scale, slot.parameter.dtype), []).append(slot)
        return [SlotGroup(own, decay, scale) for (decay, scale, _), own in found.items()]

    def _numbers(self, op: Ops, slots: Sequence[Slot], given: StepInputs) -> StepNumbers:
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

    def _updates(self, op: Ops, group: SlotGroup, numbers: StepNumbers) -> list[Update]:
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


def write_optimizer(
    op: Ops,
    optimizer: Optimizer,
    parameters: Sequence[tuple[str, ir.DataType, Sequence[Dim]]],
    flag_name: str,
    *,
    chunked: bool = False,
    proximal: bool = False,
    in_place: bool = True,
) -> None:
    """Write an optimizer as a graph of its own.

    Inputs: learning_rate, step, then for each parameter `<p>`, `<p>_grad`, `<p>.momentum<k>`;
    behind them, if `proximal`, proximal_mu and `<p>.reference` for each.
    Outputs: the flag, then for each `<p>.updated`, `<p>.momentum<k>.updated`. The flag is true if
    they are updates, and false if a gradient is not finite: then they are the inputs.
    """
    graph = op.target
    learning_rate = graph_input(op, LEARNING_RATE, ir.DataType.FLOAT, [1])
    step = graph_input(op, STEP, ir.DataType.INT64, [1])
    slots = []
    for name, dtype, dims in parameters:
        parameter = graph_input(op, name, dtype, dims)
        gradient = graph_input(op, f"{name}{GRADIENT}", dtype, dims)
        slots.append(Slot(parameter, gradient, state_inputs(op, optimizer, parameter)))
    if proximal:
        pulled = add_proximal(op, {slot.parameter: slot.gradient for slot in slots})
        slots = [replace(slot, gradient=pulled[slot.parameter]) for slot in slots]
    gradients = {slot.parameter: slot.gradient for slot in slots}
    check = optimizer.check(op, gradients, list(gradients))
    check.passed.name = reserve(op, flag_name)
    graph.outputs.append(check.passed)

    def write() -> list[ir.Value]:
        made = optimizer.write(op, slots, learning_rate, step, chunked=chunked, check=check)
        return values_of(made)

    branches = in_place and not op.on_gpu
    made = update_if(op, check.passed, values_of(slots), write) if branches else write()
    graph.outputs.extend(made)
    sweep(graph)


def write_update(
    op: Ops,
    graph: ir.Graph,
    optimizer: Optimizer,
    parameters: Sequence[ir.Value],
    gradients: Mapping[ir.Value, ir.Value],
    *,
    check: FiniteCheck | None = None,
    statistics: Mapping[ir.Value, ir.Value] | None = None,
    chunked: bool = False,
    in_place: bool = True,
    early: bool = False,
) -> list[ir.Value]:
    """Write the updates behind the gradients that they use, into the same graph.

    Adds the inputs `<p>.momentum<k>`, learning_rate and step. Returns the new outputs of the graph:
    for each parameter `<p>.updated` and `<p>.momentum<k>.updated`, then the new running statistics.
    With `in_place` they are the old values where the check has not passed, and they may be written
    over the values that they replace, in whatever order nodes run. Without a check, the gradients
    are checked. An `early` update does not wait for later gradients, which takes less memory: it is
    made if the loss and the gradients so far are finite.
    """
    slots = [Slot(p, gradients[p], state_inputs(op, optimizer, p)) for p in parameters]
    learning_rate = graph_input(op, LEARNING_RATE, ir.DataType.FLOAT, [1])
    step = graph_input(op, STEP, ir.DataType.INT64, [1])
    known = optimizer.check(op, gradients, parameters) if check is None else check
    new = statistics or {}

    def write(check: FiniteCheck = known) -> list[ir.Value]:
        made = optimizer.write(op, slots, learning_rate, step, chunked=chunked, check=check)
        return [*values_of(made), *new.values()]

    if not in_place:
        return write()
    if early and not isinstance(optimizer.clip_grad, ClipGradNorm):
        places = {p: place for place, p in enumerate(gradients)}
        slots.sort(key=lambda slot: places[slot.parameter])
        kept = after_readers(op, graph, early_check(op, known), list(new), [known.sums])
        later = update_if(op, kept, list(new), lambda: list(new.values())) if new else []
        made = _early_updates(op, graph, optimizer, slots, learning_rate, step, chunked, known)
        return [*(value for p in parameters for value in made[p]), *later]
    passed = after_readers(op, graph, known.passed, [*parameters, *new])
    if op.on_gpu:
        updated = write(replace(known, passed=passed))
        return [*updated[: len(updated) - len(new)], *guarded_updates(op, passed, new)]
    slots = [replace(slot, gradient=steady_row(op, slot.gradient)) for slot in slots]
    return update_if(op, passed, [*values_of(slots), *new], write)


def _early_updates(
    op: Ops,
    graph: ir.Graph,
    optimizer: Optimizer,
    slots: Sequence[Slot],
    learning_rate: ir.Value,
    step: ir.Value,
    chunked: bool,
    check: FiniteCheck,
) -> dict[ir.Value, list[ir.Value]]:
    """Write each update in an If of its own; return the new values by parameter."""
    scope, op.scope = op.scope, "optimizer"
    given = StepInputs(learning_rate, step, check)
    made = {}
    with op.arithmetic():
        numbers = optimizer._numbers(op, slots, given)
        groups = {s.parameter: group for group in optimizer._groups(slots) for s in group.slots}
        updates = {
            update.slot.parameter: update
            for group in dict.fromkeys(groups.values())
            for update in optimizer._updates(op, group, numbers)
        }
        for slot in slots:
            passed = early_check(op, check, slot.parameter)
            passed = after_readers(op, graph, passed, [slot.parameter], [check.sums])
            alone = replace(groups[slot.parameter], slots=[slot])

            def write(group: SlotGroup = alone) -> list[ir.Value]:
                update = updates[group.slots[0].parameter]
                plain = partial(UpdateWriter(op, chunked).write, [update])
                return values_of(as_kernel(op, optimizer, group, given, chunked, plain))

            made[slot.parameter] = update_if(op, passed, values_of([slot]), write)
    op.scope = scope
    return made


def state_inputs(op: Ops, optimizer: Optimizer, parameter: ir.Value) -> tuple[ir.Value, ...]:
    """Add an input to the graph for each state that an optimizer keeps for a parameter."""
    assert parameter.dtype is not None
    return tuple(
        graph_input(op, f"{parameter.name}.{state.name}", state.dtype, dims_of(parameter) or ())
        for state in optimizer.states(parameter.dtype)
    )


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
