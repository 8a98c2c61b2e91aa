"""Infinite numbers and NaN: found early, and explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onnxtrain.device.checks import at_least, count_bad
from onnxtrain.device.loop.batches import Batch, as_array
from onnxtrain.errors import NonFiniteError

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

Array = npt.NDArray[Any]
Bad = tuple[str, int, int]  # the name of a tensor, the number of bad elements, and of all
# A check of so many elements, or tensors, takes about fifty microseconds: larger models are checked
# less often, so that it costs no more per step.
_ELEMENTS, _TENSORS = 250_000, 16
_SHOWN = 5


@dataclass(frozen=True)
class CheckFinite:
    """Look for parameters that are infinite or NaN after each `every` steps; a callback of `fit`.

    Without it, `fit` looks after each step of a small model, and less often in larger ones.
    """

    every: int = 1

    def __post_init__(self) -> None:
        at_least(1, "CheckFinite: every", self.every)


class Moment(NamedTuple):
    """Where in the run a check happens, in words and as a step, and which checkpoint there is."""

    where: str
    step: int
    checkpoint: str

    def error(self, text: str, bad: Sequence[Bad] = (), *, in_data: bool = False) -> NonFiniteError:
        """Return an error of this moment."""
        return NonFiniteError(
            f"{self.where}: {text}",
            advice=self.checkpoint,
            step=self.step,
            parameters=[name for name, _, _ in bad],
            in_data=in_data,
        )


class NanGuard:
    """Looks for infinite numbers and NaN in the loss, in each step, and in what training changes.

    `every` is the number of steps from one look at the parameters to the next.
    """

    def __init__(self, session: TrainingSession, check: CheckFinite | None = None) -> None:
        self._session = session
        self._changing = [
            parameter
            for _, parameter in session.state.parameters
            if parameter.requires_grad or parameter.data.flags.writeable
        ]
        elements = sum(parameter.data.size for parameter in self._changing)
        by_size = 1 + elements // _ELEMENTS + len(self._changing) // _TENSORS
        self.every = by_size if check is None else check.every
        self._good_step: int | None = None

    def check_parameters(self, at: Moment) -> None:
        """Raise an error if a parameter is not finite after a step."""
        bad = self._bad_parameters()
        if bad:
            raise at.error(
                f"the loss is finite, but after the step {_listed(bad)}. {self._since(at.step)}"
                "The gradient or the update overflowed: lower the learning rate "
                f"({self._session.get_learning_rate():.3g}) or clip the gradients.",
                bad,
            )
        self._good_step = at.step

    def _bad_parameters(self) -> list[Bad]:
        return _bad((parameter.name, parameter.data) for parameter in self._changing)

    def check_gradients(self, at: Moment) -> None:
        """Raise an error if an accumulated gradient is not finite, before the optimizer uses it."""
        if any(array is not None and count_bad(array) for _, array in self._gradients()):
            raise self.explain_accumulated(at)

    def explain_accumulated(self, at: Moment) -> NonFiniteError:
        """Return the error for accumulated gradients that the optimizer cannot use."""
        bad = _bad((name, array) for name, array in self._gradients() if array is not None)
        what = _listed(bad, "the gradient of ") if bad else "the gradients are too large"
        return at.error(f"the loss is finite, but {what}. The parameters were not updated.", bad)

    def _gradients(self) -> Iterable[tuple[str, Array | None]]:
        return ((name, parameter.grad) for name, parameter in self._session.state.parameters)

    def explain_gradients(self, at: Moment, loss: float, batch: Batch) -> NonFiniteError:
        """Return the error for a batch that was skipped although its loss is finite."""
        cause = bad_data(self._session.input_names(True), batch)
        names = self._session.module.training_state.not_finite
        what = "the running statistics"
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            what = f"the gradient of {', '.join(map(repr, names[:_SHOWN]))}{more}"
        why = f", because {cause}" if cause else ", or too large"
        return at.error(
            f"the loss is {loss:.4g}, but {what} is infinite or not a number{why}. Nothing was "
            f"updated. Lower the learning rate ({self._session.get_learning_rate():.3g}) or scale "
            "the inputs.",
            [(name, 0, 0) for name in names],
            in_data=bool(cause),
        )

    def check_state(self, at: Moment) -> None:
        """Raise an error if anything that a checkpoint would hold is not finite."""
        self.check_parameters(at)
        state = self._session.module.training_state
        groups = state.content(include_optimizer_state=True).optimizer_groups
        bad = _bad(
            (f"{name}.momentum{number}", tensor)
            for group in groups.values()
            for name, tensors in group.states.items()
            for number, tensor in enumerate(tensors)
            if isinstance(tensor, np.ndarray)
        )
        if bad:
            raise at.error(
                f"the state of the optimizer is not usable: {_listed(bad)}. Lower the learning "
                "rate or clip the gradients.",
                bad,
            )

    def explain_loss(
        self, at: Moment, loss: float, batch: Batch, before: Sequence[float]
    ) -> NonFiniteError:
        """Return the error for a loss that is not finite: the data, or training itself."""
        names = self._session.input_names(True)
        cause = bad_data(names, batch)
        if cause:
            return at.error(f"the loss is {loss}, because {cause}.", in_data=True)
        bad = self._bad_parameters()
        parts = [f"the loss is {loss}, and the data of the batch are finite."]
        if bad:
            parts.append(f"Now {_listed(bad)}.")
        parts.append(self._since(at.step).strip())
        if before:
            parts.append(f"The last losses were {', '.join(f'{x:.4g}' for x in before[-3:])}.")
        parts.append(
            f"Lower the learning rate ({self._session.get_learning_rate():.3g}), clip the "
            f"gradients, or look at the labels{_label_range(names, batch)}: one that is no class "
            "makes the loss NaN."
        )
        return at.error(" ".join(part for part in parts if part), bad)

    def _since(self, step: int) -> str:
        if self._good_step is None or self._good_step >= step - 1:
            return ""
        return (
            f"(The parameters were finite after step {self._good_step}; "
            "callbacks=[CheckFinite()] looks after each step.) "
        )


def _bad(tensors: Iterable[tuple[str, Array]]) -> list[Bad]:
    """Return name, number of bad elements and size of tensors that are not finite."""
    found = ((name, count_bad(array), array.size) for name, array in tensors)
    return [(name, count, size) for name, count, size in found if count]


def _listed(bad: Sequence[Bad], what: str = "") -> str:
    shown = [
        f"{what}{name!r} has {count} of {size} elements that are infinite or not a number"
        for name, count, size in bad[:_SHOWN]
    ]
    if len(bad) > _SHOWN:
        shown.append(f"so have {len(bad) - _SHOWN} more")
    return ", ".join(shown)


def bad_data(names: Sequence[str], batch: Batch) -> str:
    """Say which sample of which input is not finite; nothing if all are."""
    for name, value in zip(names, batch.values, strict=True):
        array = as_array(value)
        count = count_bad(array)
        if not count:
            continue
        first = int(np.argwhere(~np.isfinite(array))[0][0]) if array.ndim else 0
        sample = f"sample {first} of the batch"
        if batch.indices is not None:
            sample = f"sample {int(batch.indices[first])} of the data"
        return (
            f"the input {name!r} has {count} elements that are infinite or not a number, the first "
            f"in {sample}"
        )
    return ""


def _label_range(names: Sequence[str], batch: Batch) -> str:
    """Say from where to where the integers of the last input go: they may be labels."""
    last = as_array(batch.values[-1])
    if last.dtype.kind not in "iu" or not last.size:
        return ""
    found = f" ({names[-1]!r} is from {last.min()} to {last.max()} in this batch"
    if last.min() < 0:
        found += f"; if {last.min()} marks what does not count, it is ignore_index of the loss"
    return f"{found})"
