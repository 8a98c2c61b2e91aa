"""Numbers that are infinite or NaN: found early, and explained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnxtrain.api.fit.batches import Batch, as_array
from onnxtrain.errors import NonFiniteError

if TYPE_CHECKING:
    from onnxtrain.api.session import TrainingSession

Array = npt.NDArray[Any]
# A look at so many elements takes some ten microseconds: larger models are looked at less often, so
# that it costs no more a step.
_ELEMENTS = 250_000
_SHOWN = 5


class Guard:
    """Looks for numbers that are not finite in what training changes.

    The loss is looked at in each step. Parameters are looked at each `every` steps: in each step
    up to 250 000 trained elements, and more rarely in larger models, unless told otherwise.
    """

    def __init__(self, session: TrainingSession, every: int | None) -> None:
        self._session = session
        elements = sum(p.data.size for _, p in session.state.parameters if p.requires_grad)
        self.every = every or 1 + elements // _ELEMENTS
        self._good_step: int | None = None

    def check_parameters(self, where: str, step: int, kept: str) -> None:
        """Raise an error if a parameter is not finite after a step."""
        bad = _bad(_changing(self._session))
        if bad:
            raise NonFiniteError(
                f"{where}: the loss is finite, but after the step {_listed(bad)}. "
                f"{self._since(step)}The gradient or the update overflowed: lower the learning "
                f"rate ({self._session.get_learning_rate():.3g}) or clip the gradients. {kept}",
                step=step,
                parameters=[name for name, _, _ in bad],
            )
        self._good_step = step

    def check_gradients(self, where: str, step: int, kept: str) -> None:
        """Raise an error if a gradient is not finite, before the optimizer uses it."""
        bad = _bad(_gradients(self._session))
        if bad:
            raise NonFiniteError(
                f"{where}: the loss is finite, but {_listed(bad, 'the gradient of ')}. The "
                f"parameters were not updated. {kept}",
                step=step,
                parameters=[name for name, _, _ in bad],
            )

    def check_state(self, where: str, step: int, kept: str) -> None:
        """Raise an error if anything that a checkpoint would hold is not finite."""
        self.check_parameters(where, step, kept)
        bad = _bad(_moments(self._session))
        if bad:
            raise NonFiniteError(
                f"{where}: the state of the optimizer is not usable: {_listed(bad)}. Lower the "
                f"learning rate or clip the gradients. {kept}",
                step=step,
                parameters=[name for name, _, _ in bad],
            )

    def explain_loss(
        self, where: str, step: int, loss: float, batch: Batch, before: Sequence[float], kept: str
    ) -> NonFiniteError:
        """Return the error for a loss that is not finite: the data, or training itself."""
        names = self._session.input_names(True)
        cause = _bad_data(names, batch)
        if cause:
            return NonFiniteError(
                f"{where}: the loss is {loss}, because {cause}. {kept}", step=step
            )
        bad = _bad(_changing(self._session))
        parts = [f"{where}: the loss is {loss}, and the data of the batch are finite."]
        if bad:
            parts.append(f"Now {_listed(bad)}.")
        parts.append(self._since(step).strip())
        if before:
            parts.append(f"The last losses were {', '.join(f'{x:.4g}' for x in before[-3:])}.")
        parts.append(
            f"Lower the learning rate ({self._session.get_learning_rate():.3g}), clip the "
            f"gradients, or look at the labels{_label_range(names, batch)}: one that is no class "
            f"makes the loss NaN. {kept}"
        )
        text = " ".join(part for part in parts if part)
        return NonFiniteError(text, step=step, parameters=[name for name, _, _ in bad])

    def _since(self, step: int) -> str:
        if self._good_step is None or self._good_step >= step - 1:
            return ""
        return (
            f"(The parameters were finite after step {self._good_step}; check_every=1 looks after "
            "each step.) "
        )


def _changing(session: TrainingSession) -> Iterator[tuple[str, Array]]:
    """What training changes: trained parameters and running statistics."""
    for name, parameter in session.state.parameters:
        data = parameter.data
        if parameter.requires_grad or data.flags.writeable:
            yield name, data


def _gradients(session: TrainingSession) -> Iterator[tuple[str, Array]]:
    for name, parameter in session.state.parameters:
        gradient = parameter.grad if parameter.requires_grad else None
        if gradient is not None:
            yield name, gradient


def _moments(session: TrainingSession) -> Iterator[tuple[str, Array]]:
    for group in session.state.content(include_optimizer_state=True).optimizer_groups.values():
        for name, tensors in group.states.items():
            for number, tensor in enumerate(tensors):
                if isinstance(tensor, np.ndarray):
                    yield f"{name}.momentum{number}", tensor


def _bad(tensors: Iterator[tuple[str, Array]]) -> list[tuple[str, int, int]]:
    """Return name, number of bad elements and size of tensors that are not finite."""
    return [
        (name, int(array.size - np.count_nonzero(np.isfinite(array))), array.size)
        for name, array in tensors
        if array.dtype.kind == "f" and not is_finite(array)
    ]


def is_finite(array: Array) -> bool:
    """Say whether all elements are finite."""
    if array.dtype in (np.float32, np.float64) and array.flags.c_contiguous:
        flat = array.reshape(-1)
        with np.errstate(all="ignore"):
            # Several times faster than to look at each: NaN and infinity survive in the sum.
            if np.isfinite(np.dot(flat, flat)):
                return True
    return bool(np.isfinite(array).all())


def _listed(bad: Sequence[tuple[str, int, int]], what: str = "") -> str:
    shown = [
        f"{what}{name!r} has {count} of {size} elements that are infinite or not a number"
        for name, count, size in bad[:_SHOWN]
    ]
    if len(bad) > _SHOWN:
        shown.append(f"so have {len(bad) - _SHOWN} more")
    return ", ".join(shown)


def _bad_data(names: Sequence[str], batch: Batch) -> str:
    """Say which sample of which input is not finite; nothing if all are."""
    for name, value in zip(names, batch.values, strict=True):
        array = as_array(value)
        if array.dtype.kind != "f" or is_finite(array):
            continue
        count = int(array.size - np.count_nonzero(np.isfinite(array)))
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
    return f" ({names[-1]!r} is from {last.min()} to {last.max()} in this batch)"
