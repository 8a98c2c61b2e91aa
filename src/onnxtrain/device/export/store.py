"""Put an exported model on disk so that a crash at any moment leaves the old model or the new.

A model alone is replaced by a rename, which is atomic. A model with external data is two files,
`P` and `P.data`, and a new `P.data` must not be read with the old `P`. Where there is a `P.data`
already, the model is replaced twice:

1. write the new data to `P.data.<identifier>` and a model that refers to this name; sync both and
   rename the model to `P`: from here on the new model is in force;
2. link `P.data` to the new data, write the model that refers to `P.data`, and rename it to `P`;
3. delete `P.data.<identifier>`.

At any moment, `P` is a whole model and the file that it refers to is the right one.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from onnxtrain.device.export.layout import Chunks
from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.checkpoint.store import reason_of, sync_folder, write_synced

# What a killed process left behind is removed by the first export after this time.
_STALE_SECONDS = 3600


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what the operating system reports into an `OnnxTrainError`."""
    try:
        yield
    except OSError as error:
        raise OnnxTrainError(
            f"the model cannot be exported to {path}: {reason_of(error)}; nothing was changed"
        ) from error


def check_target(path: Path) -> None:
    """Say early that a model cannot be written there."""
    if path.is_dir() or not path.name:
        raise OnnxTrainError(f"the model cannot be exported to {path}, which is a directory")
    if not path.parent.is_dir():
        raise OnnxTrainError(
            f"the model cannot be exported to {path}: there is no directory {path.parent}; create "
            "it first"
        )


def store(path: Path, model: Chunks) -> None:
    """Write a model that is one file."""
    with translated(path):
        _replace(path, model)
    _remove_stale(path)


def store_with_data(path: Path, model: Callable[[str], Chunks], data: Chunks) -> None:
    """Write a model and its external data; `model` takes the name of the data file."""
    final = path.with_name(path.name + ".data")
    in_use = final
    with translated(path):
        if final.exists():
            in_use = _replace_pair(path, final, model, data)
        else:
            # No model refers to the data yet, so that they may come first.
            _replace(final, data)
            try:
                _replace(path, model(final.name))
            except BaseException:
                final.unlink(missing_ok=True)
                raise
    _remove_stale(path, in_use.name)


def _replace_pair(path: Path, final: Path, model: Callable[[str], Chunks], data: Chunks) -> Path:
    """Replace both, as described above; return where the data are."""
    staged = final.with_name(f"{final.name}.{os.urandom(8).hex()}")
    try:
        write_synced(staged, data.write, final)
        _replace(path, model(staged.name))
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    try:
        _link(staged, final)
        _replace(path, model(final.name))
    except OSError:
        # No links on this file system, or the disk is full: the new model is in force and goes on
        # with the other name of its data.
        return staged
    with contextlib.suppress(OSError):
        staged.unlink()
    return final


def _link(staged: Path, final: Path) -> None:
    link = final.with_name(f".{staged.name}.tmp")
    try:
        os.link(staged, link)
    except OSError:
        final.unlink()  # nothing refers to the old data any more
        raise
    os.replace(link, final)
    _sync(final.parent)


def _replace(path: Path, content: Chunks) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        write_synced(temporary, content.write, path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make a rename durable; it has been made, so that no error may speak against it."""
    with contextlib.suppress(OSError):
        sync_folder(folder)


def _remove_stale(path: Path, in_use: str = "") -> None:
    """Remove what processes that were killed while they exported to `path` have left behind."""
    name = re.escape(path.name)
    leftover = re.compile(rf"\.{name}(\.data)?\.[0-9a-f]{{16}}\.tmp|{name}\.data\.[0-9a-f]{{16}}")
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if (
                leftover.fullmatch(entry.name)
                and entry.name != in_use
                and now - entry.stat().st_mtime > _STALE_SECONDS
            ):
                os.unlink(entry.path)
