"""How data files are read: what the command line says, and what the checkpoint remembers."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import ArgumentError, InputError

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

Array = npt.NDArray[Any]
_PROPERTY = "data"  # of the checkpoint


@dataclass(frozen=True)
class Reading:
    """The options for reading files: of an .npz (`names`), a CSV or a folder of images.

    `classes` are the names of the labels: label 0 is the first.
    """

    names: dict[str, str] = field(default_factory=dict)
    label: str | None = None
    columns: list[str] | None = None
    classes: list[str] | None = None
    size: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None

    def remember(self, session: TrainingSession) -> None:
        """Store in the checkpoint what evaluation has to do in the same way."""
        kept = {k: getattr(self, k) for k in _KEPT if getattr(self, k) is not None}
        if kept:
            session.add_property(_PROPERTY, json.dumps(kept))


_KEPT = ("label", "columns", "classes", "size", "mean", "std")


@dataclass(frozen=True)
class Data:
    """Arrays by the names of the model's inputs, and how they were read."""

    arrays: dict[str, Array]
    reading: Reading


def remembered(session: TrainingSession, options: argparse.Namespace) -> Reading:
    """Return the options of the command line, completed with those stored in the checkpoint."""
    reading = Reading(
        names=_pairs(options.map),
        label=options.label,
        columns=None if options.columns is None else options.columns.split(","),
        size=options.image_size,
        mean=_numbers(options.mean, "--mean"),
        std=_numbers(options.std, "--std"),
    )
    if _PROPERTY not in session.state.properties:
        return reading
    try:
        kept = json.loads(str(session.get_property(_PROPERTY)))
        known = {key: kept[key] for key in _KEPT if key in kept}
    except (ValueError, TypeError):
        return reading  # a property of the user's own
    return replace(reading, **{k: v for k, v in known.items() if getattr(reading, k) is None})


def numbered(
    labels: Sequence[str], classes: Sequence[str] | None, where: str
) -> tuple[Array, list[str]]:
    """Return the index of each label's class, and the names of the classes."""
    names = list(classes) if classes is not None else sorted(set(labels))
    if len(names) < 2 and classes is None:
        raise InputError(
            f"{where}: there is only one class, {names[0]!r}: training needs at least two"
        )
    number = {name: index for index, name in enumerate(names)}
    unknown = next((label for label in labels if label not in number), None)
    if unknown is not None:
        raise InputError(
            f"{where}: there is no class {unknown!r}; the model was trained for {', '.join(names)}"
        )
    return np.array([number[label] for label in labels], np.int64), names


def _pairs(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for item in given:
        name, equals, array = item.partition("=")
        if not equals:
            raise ArgumentError(f"--map takes INPUT=ARRAY, such as input=x, not {item!r}")
        found[name] = array
    return found


def _numbers(text: str | None, option: str) -> list[float] | None:
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)) or (option == "--std" and 0 in numbers):
        what = "numbers other than 0" if option == "--std" else "numbers"
        raise ArgumentError(f"{option} takes {what}, such as 0.5,0.5,0.5, not {text!r}")
    return numbers
