"""CSV files as data: a column of labels, and columns of features."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.cli.reading import Array, Data, Reading, numbered
from onnxtrain.errors import InputError

if TYPE_CHECKING:
    from onnxtrain.format.model.file import ValueType

_USUAL = ("label", "labels", "class", "target", "y")
_INTEGERS = (3, 5, 6, 7)


def read_table(path: Path, inputs: Sequence[ValueType], reading: Reading, where: str) -> Data:
    """Read a CSV file with a header, for a model with one input and labels."""
    header, rows = _read(path, where)
    label = _label(header, rows[0], reading.about.label, where)
    columns = reading.about.columns or [name for name in header if name not in label]
    features = _floats(header, rows, columns, where)
    names = reading.about.classes
    labels, classes = _labels(header, rows, label, inputs[1].element_type, names, where)
    found = {inputs[0].name: features, inputs[1].name: labels}
    about = replace(reading.about, label=",".join(label), columns=list(columns), classes=classes)
    return Data(found, replace(reading, about=about))


def read_features(path: Path, reading: Reading, where: str) -> Array:
    """Read the features of a CSV file: the columns of training, or all that are no labels."""
    header, rows = _read(path, where)
    labels = (reading.about.label or "").split(",")
    others = [n for n in header if n not in labels and (labels != [""] or n.lower() not in _USUAL)]
    return _floats(header, rows, reading.about.columns or others, where)


def _read(path: Path, where: str) -> tuple[list[str], list[list[str]]]:
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file, delimiter=separator) if row]
    except (UnicodeDecodeError, csv.Error, ValueError):
        raise InputError(f"{where}: this is not a CSV file with a header, in UTF-8") from None
    if not rows:
        raise InputError(f"{where}: there are no rows under the header")
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise InputError(
                f"{where}: row {number + 2} has {len(row)} cells and the header {len(header)}"
            )
    return [name.strip() for name in header], rows


def _label(header: Sequence[str], first: Sequence[str], given: str | None, where: str) -> list[str]:
    if given is not None:
        wanted = given.split(",")
        _require(header, wanted, where, "--label")
        return wanted
    usual = [name for name in header if name.lower() in _USUAL]
    if len(usual) != 1:
        odd = next((s for s in ";\t|" if len(header) == 1 and s in header[0]), None)
        hint = f" (cells are separated by commas in .csv, not by {odd!r})" if odd else ""
        words = [name for name, cell in zip(header, first, strict=True) if not _is_number(cell)]
        likely = words[0] if len(words) == 1 else header[-1]
        such = "" if hint else f", such as --label {likely!r}"
        raise InputError(
            f"{where}: choose the column of the labels with --label{such}; the header has "
            f"{_some(header)}{hint}"
        )
    return usual


def _require(header: Sequence[str], wanted: Sequence[str], where: str, option: str) -> None:
    missing = next((name for name in wanted if name not in header), None)
    if missing is not None:
        raise InputError(
            f"{where}: there is no column {missing!r} for {option}; the header has {_some(header)}"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:40]) for name in names[:8]) + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )


def _floats(
    header: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[str], where: str
) -> Array:
    if not columns:
        raise InputError(f"{where}: there is no column of features beside the labels")
    _require(header, columns, where, "--columns")
    places = [header.index(name) for name in columns]
    try:
        return np.array([[float(row[p]) for p in places] for row in rows], np.float32)
    except ValueError:
        for number, row in enumerate(rows):
            for place in places:
                if not _is_number(row[place]):
                    raise InputError(
                        f"{where}: row {number + 2}, column {header[place]!r} is {row[place]!r}, "
                        "not a number: choose the columns with --columns"
                    ) from None
        raise


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _labels(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    label: Sequence[str],
    element_type: int,
    classes: list[str] | None,
    where: str,
) -> tuple[Array, list[str] | None]:
    """Return integers as they are, and words as class indices."""
    if element_type not in _INTEGERS:
        return _floats(header, rows, label, where), classes
    words = [row[header.index(label[0])].strip() for row in rows]
    if not all(word.lstrip("-").isdecimal() for word in words) or (
        classes is not None and set(words) <= set(classes)
    ):
        return numbered(words, classes, where)
    try:
        return np.array([int(word) for word in words], np.int64), classes
    except (OverflowError, ValueError):
        raise InputError(f"{where}: column {label[0]!r} has numbers that are too large") from None
