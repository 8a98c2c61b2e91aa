"""CSV files as data: a column of labels, and columns of features."""

from __future__ import annotations

import csv
import re
from array import array
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
_INTEGER, _WHOLE = re.compile("-?[0-9]+"), re.compile(r"-?[0-9]+(\.0*)?")


def read_table(path: Path, inputs: Sequence[ValueType], reading: Reading, where: str) -> Data:
    """Read a CSV file with a header, for a model with one input and labels."""
    with _Table(path, where) as table:
        label = _label(table.header, table.first, reading.about.label, where)
        columns = reading.about.columns or [name for name in table.header if name not in label]
        is_classes = inputs[1].element_type in _INTEGERS
        features, targets, words = table.read(columns, [] if is_classes else label, label[0])
    classes = reading.about.classes
    if is_classes:
        targets, classes = _labels(words, label[0], classes, where)
    found = {inputs[0].name: features, inputs[1].name: targets}
    about = replace(reading.about, label=",".join(label), columns=list(columns), classes=classes)
    return Data(found, replace(reading, about=about))


def read_features(path: Path, reading: Reading, where: str) -> Array:
    """Read the features of a CSV file: the columns of training, or all that are no labels."""
    labels = (reading.about.label or "").split(",")
    with _Table(path, where) as table:
        others = [
            name
            for name in table.header
            if name not in labels and (labels != [""] or name.lower() not in _USUAL)
        ]
        return table.read(reading.about.columns or others, [], None)[0]


def has_label_column(path: Path, reading: Reading, where: str) -> bool:
    """Whether a CSV file has labels: one column with a usual name, or those of training."""
    known = (reading.about.label or "").split(",")
    with _Table(path, f"{where}: {path}") as table:
        usual = [name for name in table.header if name.lower() in _USUAL]
        return len(usual) == 1 or all(name in table.header for name in known)


class _Table:
    """A CSV file that is read row by row: as text, a number takes fifty times its place."""

    def __init__(self, path: Path, where: str) -> None:
        self._path, self._where = path, where
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        self._file = path.open(newline="", encoding="utf-8-sig")
        self._rows = csv.reader(self._file, delimiter=separator)

    def __enter__(self) -> _Table:
        try:
            self.header = [name.strip() for name in self._next() or ()]
            if not self.header:
                raise self._no_table()
            found = self._next()
            if found is None:
                raise InputError(f"{self._where}: there are no rows under the header")
            self._require_cells(2, found)
        except BaseException:
            self._file.close()
            raise
        self.first = found
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _no_table(self) -> InputError:
        return InputError(f"{self._where}: this is not a CSV file with a header, in UTF-8")

    def _next(self) -> list[str] | None:
        """Return the next row that is not empty; None at the end."""
        try:
            return next((row for row in self._rows if row), None)
        except (UnicodeDecodeError, csv.Error, ValueError):
            raise self._no_table() from None

    def _require_cells(self, number: int, row: Sequence[str]) -> None:
        if len(row) != len(self.header):
            raise InputError(
                f"{self._where}: row {number} has {len(row)} cells and the header "
                f"{len(self.header)}"
            )

    def read(
        self, columns: Sequence[str], targets: Sequence[str], word: str | None
    ) -> tuple[Array, Array, list[str]]:
        """Return the numbers of two groups of columns, and the texts of one."""
        if not columns:
            raise InputError(f"{self._where}: there is no column of features beside the labels")
        groups = [self._places(columns), self._places(targets)]
        place = None if word is None else self.header.index(word)
        numbers = [array("f"), array("f")]
        words: list[str] = []
        known: dict[str, str] = {}  # most words are there many times
        row: list[str] | None = self.first
        count = 0
        while row is not None:
            count += 1
            self._require_cells(count + 1, row)
            for found, places in zip(numbers, groups, strict=True):
                try:
                    found.extend([float(row[p]) for p in places])
                except ValueError:
                    raise self._no_number(count + 1, row, places) from None
            if place is not None:
                text = row[place].strip()
                if not text:
                    raise InputError(
                        f"{self._where}: row {count + 1} has no label in column {word!r}: fill it "
                        "in, or leave the row out"
                    )
                words.append(known.setdefault(text, text))
            row = self._next()
        features, others = (
            np.frombuffer(found, np.float32).reshape(count, len(places))
            for found, places in zip(numbers, groups, strict=True)
        )
        return features, others, words

    def _places(self, columns: Sequence[str]) -> list[int]:
        _require(self.header, columns, self._where, "--columns")
        return [self.header.index(name) for name in columns]

    def _no_number(self, number: int, row: Sequence[str], places: Sequence[int]) -> InputError:
        place = next(p for p in places if not _is_number(row[p]))
        return InputError(
            f"{self._where}: row {number}, column {self.header[place]!r} is "
            f"{row[place][:80]!r}, not a number: choose the columns with --columns"
        )


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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _labels(
    words: Sequence[str], label: str, classes: list[str] | None, where: str
) -> tuple[Array, list[str] | None]:
    """Return integers as they are, and words as class indices."""
    if all(_WHOLE.fullmatch(word) for word in words) and not set(words) <= set(classes or ()):
        words = [word.partition(".")[0] for word in words]
    if not all(_INTEGER.fullmatch(word) for word in words) or (
        classes is not None and set(words) <= set(classes)
    ):
        return numbered(words, classes, where)
    try:
        return np.array([int(word) for word in words], np.int64), classes
    except (OverflowError, ValueError):
        raise InputError(f"{where}: column {label!r} has numbers that are too large") from None
