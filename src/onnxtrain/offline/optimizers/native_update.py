"""Updates of a group of parameters as one call, which a native kernel can stand in for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.optimizers.chunked import chunks_of
from onnxtrain.offline.optimizers.clip import ClipGradNorm, ClipGradValue, GradientClip
from onnxtrain.offline.optimizers.finite_guard import FiniteCheck
from onnxtrain.offline.optimizers.update_writer import Slot, Updated


class HasKernel(Protocol):
    """What is asked of an optimizer here."""

    clip_grad: GradientClip | None

    def kernel(self, weight_decay: float) -> dict[str, int | float] | None:
        """Return the attributes of its kernel."""


@dataclass(frozen=True, eq=False)
class SlotGroup:
    """Parameters of one type with the same settings."""

    slots: Sequence[Slot]
    weight_decay: float
    rate_scale: float


@dataclass(frozen=True)
class StepInputs:
    """What an update reads beside parameters, gradients and states."""

    rate: ir.Value  # FLOAT[1]
    step: ir.Value  # INT64[1]
    check: FiniteCheck | None


@dataclass(frozen=True)
class StepNumbers:
    """What the formulas of all groups have in common; numbers are scalars of type float64."""

    rate: ir.Value
    step: ir.Value
    clip: ir.Value | None  # a factor that gradients still lack
    gradients: Mapping[ir.Value, ir.Value]  # by parameter
    passed: ir.Value | None = None  # a flag: where it is false, the old values are kept


def as_kernel(
    op: Ops,
    optimizer: HasKernel,
    group: SlotGroup,
    given: StepInputs,
    chunked: bool,
    write: Callable[[], list[Updated]],
) -> list[Updated]:
    """Write the updates of a group, and mark them where the native library has a kernel for them.

    The kernel computes the numbers of the step itself, from the inputs of the graph, and limits
    gradients itself.
    """
    found = optimizer.kernel(group.weight_decay) if "kernel" in vars(type(optimizer)) else None
    clip = optimizer.clip_grad
    attributes: dict[str, int | float] = dict(found or {})
    inputs = [given.rate, given.step]
    if type(clip) is ClipGradNorm and given.check is not None:
        attributes["max_norm"] = clip.max_norm
        inputs.append(given.check.of_gradients)
    elif type(clip) is ClipGradValue:
        attributes["limit"] = clip.clip_value
    elif clip is not None:
        found = None
    if found is None:
        return write()
    cuts = [chunks_of(slot.parameter) if chunked else None for slot in group.slots]
    for slot in group.slots:
        inputs += [slot.parameter, slot.gradient, *slot.states]
    made: list[Updated] = []

    def write_values() -> list[ir.Value]:
        made.extend(write())
        return [value for updated in made for value in updated.values]

    op.kernel(
        type(optimizer).__name__, inputs, write_values, saved=(),
        chunks=[0 if cut is None else cut[0] for cut in cuts],
        rate_scale=group.rate_scale, weight_decay=group.weight_decay, **attributes,
    )  # fmt: skip
    return made
