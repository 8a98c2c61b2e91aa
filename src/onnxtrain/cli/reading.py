"""How data files are read: what the command line says, and what the checkpoint remembers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import ArgumentError, InputError
from onnxtrain.format import strict_json
from onnxtrain.format.model_metadata import ModelMetadata

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

Array = npt.NDArray[Any]
_OLD_PROPERTY = "data"  # of checkpoints of earlier versions


@dataclass(frozen=True)
class Reading:
    """How files are read: names inside an .npz by input, and what is known of the model."""

    names: dict[str, str] = field(default_factory=dict)
    about: ModelMetadata = field(default_factory=ModelMetadata)

    def remember(self, session: TrainingSession) -> None:
        """Store in the checkpoint what evaluation and exported models have to know."""
        known = {k: v for k, v in asdict(self.about).items() if v}
        session.set_metadata(**known)


@dataclass(frozen=True)
class Data:
    """Arrays by the names of the model's inputs, and how they were read."""

    arrays: dict[str, Array]
    reading: Reading


def remembered(session: TrainingSession, options: argparse.Namespace) -> Reading:
    """Return the options of the command line, completed with those stored in the checkpoint."""
    about = session.metadata
    try:
        old = strict_json.loads_plain(str(session.state.properties[_OLD_PROPERTY]))
        if isinstance(old.get("size"), int):
            old["size"] = [old["size"]] * 2
        about = replace(about, **{k: v for k, v in old.items() if not getattr(about, k)})
    except (LookupError, ValueError, TypeError, AttributeError):
        pass  # there is none, or it is the user's own
    return reading_of(about, options)


def reading_of(about: ModelMetadata, options: argparse.Namespace) -> Reading:
    """Return how to read files: as the command line says, else as the model does."""
    given = {
        "label": options.label,
        "columns": None if options.columns is None else options.columns.split(","),
        "classes": None if options.class_names is None else options.class_names.split(","),
        "size": None if options.image_size is None else [options.image_size] * 2,
        "mean": _numbers(options.mean, "--mean"),
        "std": _numbers(options.std, "--std"),
    }
    try:
        about = replace(about, **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        raise ArgumentError(f"the options for reading files do not fit: {error}") from None
    return Reading(_pairs(options.map), about)


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
            f"{where}: there is no class {unknown!r}; the model has {', '.join(names)}: give it "
            "others with --class-names"
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
