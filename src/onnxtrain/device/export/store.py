"""Put an exported model on disk so that a crash at any moment leaves the old model or the new.

A model alone is replaced by a rename, which is atomic. A model with external data is two files,
`P` and `P.data`, and a new `P.data` must not be read with the old `P`. So the model is replaced
twice:

1. write the new data to `P.data.<identifier>` and to a temporary file, and two models that refer to
   `P.data.<identifier>` and to `P.data`; sync all four;
2. rename the first model to `P`: from here on the new model is in force;
3. delete the old `P.data`, which nothing refers to any more;
4. rename the temporary data to `P.data`, and then the second model to `P`;
5. delete `P.data.<identifier>`.

At any moment, `P` is a whole model and the file that it refers to is the right one. The data are
written twice, since two names of one file (hard links) are refused by loaders of models.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from onnxtrain.device.export.layout import Chunks
from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.format.checkpoint.store import reason_of
from onnxtrain.format.committed_folder import sync_folder
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.replace_file import NewFiles, leftovers_of, temporary_for


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
    temporary = temporary_for(path)
    with translated(path), _new_files(path) as new:
        new.write(temporary, model.write, path)
        with new.committing(), _replacing(path) as replaced:
            _rename(temporary, path)
            _remove(path, replaced)


def store_with_data(path: Path, model: Callable[[str], Chunks], data: Chunks) -> None:
    """Write a model and its external data; `model` takes the name of the data file."""
    final = path.with_name(f"{path.name}.data")
    staged = final.with_name(f"{final.name}.{os.urandom(8).hex()}")
    first, second, copy = temporary_for(path), temporary_for(path), temporary_for(final)
    with translated(path), _new_files(path) as new:
        new.write(staged, data.write, final)
        new.write(first, model(staged.name).write, path)
        has_copy = True
        try:
            new.write(copy, data.write, final)
            new.write(second, model(final.name).write, path)
        except OSError:
            # The disk is full: the new model goes on with the other name of its data.
            has_copy = False
        with new.committing(), _replacing(path) as replaced:
            sync_folder(path.parent)  # the data have their name before the model that refers to it
            new.keep(staged)  # from the next rename on, it is in use
            try:
                _rename(first, path)
            except BaseException:
                if first.exists():
                    staged.unlink(missing_ok=True)
                raise
            with contextlib.suppress(OSError):
                _remove(path, replaced)
                if has_copy:
                    _rename(copy, final)
                    _rename(second, path)
                    staged.unlink()


def _new_files(path: Path) -> NewFiles:
    name = re.escape(path.name)
    pattern = leftovers_of(path, rf"\.{name}\.data\.[0-9a-f]{{16}}\.tmp", _staged_names(path))
    return NewFiles(path.parent, pattern, lambda: _in_use(path))


def _staged_names(path: Path) -> str:
    return rf"{re.escape(path.name)}\.data\.[0-9a-f]{{16}}"


def _data_names(path: Path) -> set[str]:
    """Return the names of the data files of ours that the present model refers to."""
    try:
        locations = {tensor.location for tensor in ModelFile.read(path).external.values()}
    except ModelError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return set()
    staged, final = re.compile(_staged_names(path)), f"{path.name}.data"
    return {name for name in locations if name == final or staged.fullmatch(name)}


def _in_use(path: Path) -> set[str]:
    """Return the names of data files that are no leftovers.

    If the model goes on with another name of its data, `P.data` is a leftover itself. It may even
    be the same file: earlier versions, killed, left two names (hard links), which loaders refuse.
    """
    used, final = _data_names(path), f"{path.name}.data"
    if used or _announcement(path).exists():
        _remove(path, {final} - used)
    return used


def _announcement(path: Path) -> Path:
    """Return the file that is there while data of ours lose their model.

    If the process dies before it has removed them, the next one knows by it whose they are.
    """
    return path.with_name(f".{path.name}.replaced")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[set[str]]:
    """Return the names of data that the new model will replace, and announce it."""
    replaced = _data_names(path)
    with contextlib.suppress(OSError):  # on a full disk, data may stay behind
        if replaced:
            _announcement(path).touch()
            sync_folder(path.parent)
    try:
        yield replaced
    except BaseException:
        _remove(path, set())
        raise


def _remove(path: Path, names: set[str]) -> None:
    """Remove data that no model refers to any more."""
    for name in (*names, _announcement(path).name):
        with contextlib.suppress(OSError):
            path.with_name(name).unlink()
            sync_folder(path.parent)


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)
    with contextlib.suppress(OSError):  # it has been made, so that no error may speak against it
        sync_folder(target.parent)
