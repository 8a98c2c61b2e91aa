"""What a server checks in the replies of clients, any of which may be hostile.

A reply is checked alone (does it answer this message, are its arrays those that were sent, are its
numbers possible), then against the others of its round: one client cannot outweigh the rest by the
size of its update, nor by the number of samples that it says it has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flwr.app import Message, RecordDict

from onnxtrain.errors import ArgumentError
from onnxtrain.federated.arrays import read_record, to_record
from onnxtrain.federated.compression import clip, decode
from onnxtrain.federated.messages import ABOUT, REPLY, one_record
from onnxtrain.format.checkpoint.content import Array

# The square of a larger number is no float32: norms, distances and second moments overflow.
MOST = math.sqrt(float(np.finfo(np.float32).max))
_FEWEST = 3  # of fewer replies, none is the exception
_MOST_EXAMPLES, _MOST_EXAMPLES_FACTOR = 10**9, 100
_NORM_BIT = "norm_bit"  # of Flower's adaptive clipping: whether a client's norm is below the bound


@dataclass(frozen=True)
class Checks:
    """What a server checks in replies besides their form.

    Args:
        norm_factor: the most that the norm of an update may be, in medians of the round's norms;
            more in proportion for a client with more samples, which takes more steps. Running
            statistics are compared by their values. None for no such bound.
        excess: what happens to an update whose norm is larger, or larger than `clip-norm`: it is
            left out ("leave-out") or scaled down to the bound ("scale"). By default it is scaled
            to `clip-norm`, and left out for the median's sake.
        examples_factor: the most samples of a client that count, in medians of the round's numbers.
            None for no such bound.
        max_examples: the most samples that a client is believed to have; one that claims more is
            left out. By default 100 times the median of the round, and 10⁹ in any case.
        reply_token: whether a reply must repeat the token of its message, which differs from round
            to round and from node to node. False for clients of other frameworks that do not.

    """

    norm_factor: float | None = 10.0
    excess: Literal["leave-out", "scale"] | None = None
    examples_factor: float | None = 5.0
    max_examples: int | None = None
    reply_token: bool = True

    def __post_init__(self) -> None:
        for name in ("norm_factor", "examples_factor", "max_examples"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= 1):
                raise ArgumentError(f"{name} is a number of at least 1, not {value!r}")
        if self.excess not in (None, "leave-out", "scale"):
            raise ArgumentError(f"excess is 'leave-out' or 'scale', not {self.excess!r}")


@dataclass(frozen=True)
class Expected:
    """What the replies of a round have to fit."""

    arrays: Mapping[str, Array]
    variances: Collection[str] = ()
    statistics: Collection[str] = ()
    clip_norm: float | None = None


# ---- a reply alone -------------------------------------------------------------------------------


def check_token(reply: Message, token: str) -> None:
    """Raise an error for a reply to another message: of another round, or to another node."""
    about = reply.content.config_records.get(ABOUT)
    given = None if about is None else about.get(REPLY)
    if given is None:
        raise ArgumentError(f"it does not repeat the token of its message, as {REPLY!r}")
    if given != token:
        raise ArgumentError("it is a reply to another message: of another round or node")


def check_arrays(reply: Message, expected: Expected, checks: Checks) -> None:
    """Put the arrays of a reply into the order and the types of the arrays that were sent.

    Names and shapes have to be those that were sent, and all values finite. Additional arrays that
    are not floats, such as counters of another framework, are dropped.
    """
    sent = expected.arrays
    arrays = decode(one_record(reply.content.array_records, "arrays"), sent)
    for name, array in arrays.items():
        if name not in sent and array.dtype.kind == "f":
            raise ArgumentError(f"it has {name!r}, which is unknown")
    for name, wanted in sent.items():
        if name not in arrays:
            raise ArgumentError(f"it has no {name!r}")
        arrays[name] = _checked(name, arrays[name], wanted)
        if name in expected.variances:  # compression may leave one a little below zero
            arrays[name] = np.maximum(arrays[name], 0)
    values = {name: arrays[name] for name in sent}
    if expected.clip_norm is not None:
        if checks.excess == "leave-out":
            norm = norm_of(values, sent)
            if norm > expected.clip_norm * (1 + 1e-4):  # as far as rounding may take it
                raise ArgumentError(f"its norm is {norm:.3g}, above {expected.clip_norm:.3g}")
        clip(values, sent, expected.clip_norm)
    key = next(iter(reply.content.array_records))
    reply.content[key] = to_record(values)


def _checked(name: str, array: Array, wanted: Array) -> Array:
    if array.shape != wanted.shape:
        raise ArgumentError(
            f"its {name!r} has the shape {list(array.shape)} instead of {list(wanted.shape)}"
        )
    if array.dtype.kind != "f":
        raise ArgumentError(f"its {name!r} is {array.dtype.name} instead of a float")
    with np.errstate(over="ignore"):  # a wider type may hold larger values
        made: Array = array.astype(wanted.dtype, copy=False)
    bad = int(made.size - np.isfinite(made).sum())
    if bad:
        raise ArgumentError(f"its {name!r} has {bad} values that are not finite")
    if made.size and float(np.abs(made).max()) > MOST:
        raise ArgumentError(f"its {name!r} has values above {MOST:.2g}")
    return made


def check_metrics(reply: Message, weight: str, checks: Checks) -> None:
    """Raise an error for metrics that would spoil the average."""
    metrics = one_record(reply.content.metric_records, "metrics")
    if weight not in metrics:
        raise ArgumentError(f"it has no {weight!r}")
    for name, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(abs(number) <= MOST for number in numbers):  # NaN compares false
            raise ArgumentError(f"its {name!r} is {value}")
    if metrics.get(_NORM_BIT, 0) not in (0, 1):  # adaptive clipping follows its mean
        raise ArgumentError(f"its {_NORM_BIT!r} is {metrics[_NORM_BIT]}")
    amount = metrics[weight]
    if isinstance(amount, list | bool) or amount <= 0:
        raise ArgumentError(f"its {weight!r} is {amount}: it has no data")
    most = checks.max_examples or _MOST_EXAMPLES
    if amount > most:
        raise ArgumentError(f"its {weight!r} is {amount}, more than {most}")


def as_sent(reply: Message, keys: Mapping[type, str]) -> None:
    """Give the records of a reply the names that the strategy uses, and drop all others."""
    kept = [*reply.content.array_records.values(), *reply.content.metric_records.values()]
    named: dict[str, Any] = {keys[type(record)]: record for record in kept}
    if ABOUT in reply.content:
        named[ABOUT] = reply.content[ABOUT]
    reply.content = RecordDict(named)


# ---- the replies of a round ----------------------------------------------------------------------


def norm_of(values: Mapping[str, Array], origin: Mapping[str, Array] | None = None) -> float:
    """Return the norm of all values together, or of their distance to an origin."""
    total = 0.0
    for name, array in values.items():
        wide = array.astype(np.float64)
        step = wide if origin is None else wide - origin[name]
        total += float(np.square(step).sum())
    return math.sqrt(total)


def too_large(
    replies: Sequence[Message], expected: Expected, weight: str, checks: Checks
) -> dict[int, str]:
    """Return the indices of updates that are out of proportion, and why; or scale them down."""
    if checks.norm_factor is None or len(replies) < _FEWEST:
        return {}
    fixed, found = set(expected.statistics), {}
    counts = [record[weight] for record in _metrics_of(replies)]
    usual = median(counts)
    norms: list[float] = []
    sizes: list[float] = []
    for reply in replies:
        values = read_record(one_record(reply.content.array_records, "arrays"))
        steps = {name: array for name, array in values.items() if name not in fixed}
        norms.append(norm_of(steps, expected.arrays))
        sizes.append(norm_of({n: a for n, a in values.items() if n in fixed}))
    most = checks.norm_factor * _median_above_zero(norms)
    most_size = checks.norm_factor * _median_above_zero(sizes)
    for place, reply in enumerate(replies):
        bound = most * max(1.0, counts[place] / usual)
        if sizes[place] > most_size:
            found[place] = _excess("its running statistics have", sizes[place], most_size)
        elif norms[place] > bound and checks.excess == "scale":
            _scale(reply, expected, bound)
        elif norms[place] > bound:
            found[place] = _excess("its update has", norms[place], bound)
    return found


def _excess(what: str, norm: float, bound: float) -> str:
    return f"{what} the norm {norm:.3g}; the others of the round allow {bound:.3g}"


def _median_above_zero(numbers: Sequence[float]) -> float:
    """Return the median of what is above zero, or infinity: some clients may not move at all."""
    return float(median([number for number in numbers if number > 0]) or math.inf)


def _scale(reply: Message, expected: Expected, bound: float) -> None:
    key, record = next(iter(reply.content.array_records.items()))
    values = read_record(record)
    steps = {name: a for name, a in values.items() if name not in expected.statistics}
    clip(steps, expected.arrays, bound)
    reply.content[key] = to_record({name: steps.get(name, a) for name, a in values.items()})


def not_believed(replies: Sequence[Message], weight: str, checks: Checks) -> dict[int, str]:
    """Return the indices of clients that claim too many samples to be believed, and why."""
    if checks.max_examples is not None or len(replies) < _FEWEST:
        return {}
    counts = [record[weight] for record in _metrics_of(replies)]
    most = _MOST_EXAMPLES_FACTOR * median(counts)
    return {
        place: f"its {weight!r} is {count}, more than {_MOST_EXAMPLES_FACTOR} times the median"
        for place, count in enumerate(counts)
        if count > most
    }


def bound_examples(replies: Sequence[Message], weight: str, checks: Checks) -> dict[int, Any]:
    """Let no client count far more than the others; return the claims beyond that, by index."""
    if checks.examples_factor is None or len(replies) < 2:
        return {}
    records = _metrics_of(replies)
    most = checks.examples_factor * median([record[weight] for record in records])
    found = {}
    for place, record in enumerate(records):
        if record[weight] > most:
            found[place] = record[weight]
            record[weight] = type(record[weight])(most)
    return found


def _metrics_of(replies: Sequence[Message]) -> list[Any]:
    return [one_record(reply.content.metric_records, "metrics") for reply in replies]


def median(numbers: Sequence[Any]) -> Any:
    """Return the median, of two the lower one; 0 of none."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0
