"""The files of a folder of artifacts that a session is made of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxtrain.device.module import Model
from onnxtrain.device.state import CheckpointState
from onnxtrain.errors import ArgumentError, ModelError
from onnxtrain.format.checkpoint.file import Source
from onnxtrain.format.committed_folder import GRAPHS
from onnxtrain.format.folder_lock import reading

Graphs = tuple[Model, Model | None, Model | None, Model | None]


@contextmanager
def files_of(
    directory: str | os.PathLike[str], prefix: str, checkpoint: CheckpointState | Source | None
) -> Iterator[tuple[CheckpointState | Source, Graphs]]:
    """Find checkpoint and graphs in a folder, which no other process replaces in the meantime."""
    folder = Path(directory)
    if not folder.is_dir():
        raise ModelError(f"there is no folder {str(folder)!r}")
    with reading((folder / f"{prefix}checkpoint").parent):
        graphs = _graphs_in(folder, prefix)
        yield _checkpoint_file(folder, prefix) if checkpoint is None else checkpoint, graphs


def _graphs_in(folder: Path, prefix: str) -> tuple[Path, Path | None, Path | None, Path | None]:
    """Return the graphs in a folder of artifacts, of which the training graph has to be there."""
    train, eval_, optimizer, step = (
        _first_file(folder, f"{prefix}{stem}.onnx", f"{prefix}{stem}.ort") for stem in GRAPHS
    )
    if train is None:
        raise ModelError(
            f"there is no '{prefix}training_model.onnx' in {str(folder)!r}: it is not a folder "
            "of training artifacts"
        )
    return train, eval_, optimizer, step


def _checkpoint_file(folder: Path, prefix: str) -> Path:
    found = _first_file(folder, f"{prefix}checkpoint", f"{prefix}nominal_checkpoint")
    if found is None:
        raise ArgumentError(f"there is no '{prefix}checkpoint' in {str(folder)!r}")
    return found


def _first_file(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)
