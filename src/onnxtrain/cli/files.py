"""Checks before a command starts: whether a file can be written, and what it would replace."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from onnxtrain.errors import ArgumentError

_IDENTIFIER = b"ODTC"  # at byte 4 of every checkpoint


def check_target(path: Path, option: str, read: Mapping[Path, str] | None = None) -> None:
    """Check that a file can be written and is none of `read` (files and what they are)."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ArgumentError(f"{option}: the folder {str(parent)!r} does not exist: create it first")
    if path.is_dir():
        raise ArgumentError(f"{option}: {str(path)!r} is a folder: give the name of a file")
    if not os.access(parent, os.W_OK):
        raise ArgumentError(f"{option}: {str(parent)!r} is not writable: choose another folder")
    check_not_read(path, option, read or {})


def check_not_read(path: Path, option: str, read: Mapping[Path, str]) -> None:
    """Check that a file or a folder to write is none of those that are read."""
    for file, what in read.items():
        if path.exists() and file.exists() and path.samefile(file):
            raise ArgumentError(f"{option}: {str(path)!r} is {what}: choose another file")


def of_artifacts(folder: Path) -> dict[Path, str]:
    """Return the files that training reads."""
    files = [p for p in folder.glob("*_model*") if p.suffix in (".onnx", ".ort", ".data")]
    files += [*folder.glob("*checkpoint"), *folder.glob("*checkpoint.data")]
    return dict.fromkeys(files, "a part of the artifacts")


def of_data(given: Iterable[str]) -> dict[Path, str]:
    """Return the files that data comes from, FILE or NAME=FILE."""
    paths = [path for text in given for path in (Path(text), Path(text.partition("=")[2]))]
    return dict.fromkeys((path for path in paths if path.is_file()), "a file of the data")


def of_run(checkpoint: Path) -> dict[Path, str]:
    """Return the files of a checkpoint."""
    beside = checkpoint.with_name(f"{checkpoint.name}.data")
    return dict.fromkeys((checkpoint, beside), "the checkpoint to read")


def check_run(saved: Path, resume: bool, restart: bool) -> None:
    """Check that an existing run is to be resumed or replaced."""
    if not saved.exists():
        return
    if not is_checkpoint(saved):
        raise ArgumentError(
            f"--checkpoint: {str(saved)!r} exists and is not a checkpoint: choose another file"
        )
    if not (resume or restart):
        raise ArgumentError(
            f"{str(saved)!r} holds a run: continue it with --resume, replace it with --restart, or "
            "choose another file with --checkpoint"
        )


def is_checkpoint(path: Path) -> bool:
    """Whether a file begins as a checkpoint does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8)[4:] == _IDENTIFIER
