"""Where commands may write: refused early is what could not be written, or must not be lost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from onnxtrain.errors import ArgumentError

_IDENTIFIER = b"ODTC"  # at byte 4 of every checkpoint


def check_target(path: Path, option: str, read: Mapping[Path, str] | None = None) -> None:
    """Check that a file can be written and is none of those that are `read`, with what they are."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ArgumentError(f"{option}: there is no folder {str(parent)!r}: make it first")
    if path.is_dir():
        raise ArgumentError(f"{option}: {str(path)!r} is a folder: give the name of a file")
    if not os.access(parent, os.W_OK):
        raise ArgumentError(f"{option}: {str(parent)!r} cannot be written: give another place")
    for file, what in (read or {}).items():
        if path.exists() and file.exists() and path.samefile(file):
            raise ArgumentError(f"{option}: {str(path)!r} is {what}: name another file")


def of_artifacts(folder: Path) -> dict[Path, str]:
    """Return the files that training reads."""
    what = "a part of the artifacts"
    models = (p for p in folder.glob("*_model*") if p.suffix in (".onnx", ".ort", ".data"))
    return dict.fromkeys((*models, *folder.glob("*checkpoint"), *folder.glob("*checkpoint.data")),
                         what)  # fmt: skip


def check_run(saved: Path, resume: bool, restart: bool) -> None:
    """Check that a run that is there is to be gone on with, or to be replaced."""
    if not saved.exists():
        return
    if not _is_checkpoint(saved):
        raise ArgumentError(
            f"--checkpoint: {str(saved)!r} is there and is no checkpoint: name another file"
        )
    if not (resume or restart):
        raise ArgumentError(
            f"{str(saved)!r} holds a run: go on with it by --resume, begin anew by --restart, or "
            "name another file with --checkpoint"
        )


def _is_checkpoint(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8)[4:] == _IDENTIFIER
