"""Writing the artifact folder: all files appear together, or none does.

Everything is written into a hidden folder beside its destination first. Only when all of it is on
disk is this folder committed, with one rename; `format/committed_folder.py` describes the rest.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from onnxtrain.errors import ArgumentTypeError, OnnxTrainError
from onnxtrain.format.committed_folder import (
    ARTIFACTS,
    COMMITTED,
    finish_moves,
    list_files,
    sync_folder,
)
from onnxtrain.format.folder_lock import changing
from onnxtrain.format.replace_file import ScratchFolder, make_folder

_log = logging.getLogger(__name__)


class Folder:
    """An artifact folder in the making; use it in a `with` statement and `publish` at the end."""

    def __init__(self, directory: str | bytes | os.PathLike[Any] | None, prefix: str) -> None:
        try:
            self.directory = Path.cwd() if directory is None else Path(os.fsdecode(directory))
        except TypeError:
            raise ArgumentTypeError(f"artifact_directory is a path, not {directory!r}") from None
        self.prefix = _checked(prefix)
        # A prefix may name a folder inside of the folder, which is then the one with the files.
        first = self.directory / f"{self.prefix}{ARTIFACTS[0]}"
        self._place, self._begin = first.parent, first.name.removesuffix(ARTIFACTS[0])
        self._created: list[Path] = []
        self._scratch: ScratchFolder | None = None
        self._names: list[str] = []
        self._open = ExitStack()

    def __enter__(self) -> Folder:
        try:
            self._created = make_folder(self._place)
            self._scratch = self._open.enter_context(ScratchFolder(self._place))
        except OSError as error:
            self._remove_created()
            raise OnnxTrainError(
                f"the artifact directory {str(self.directory)!r} cannot be written: {error}; "
                "name another folder"
            ) from None
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._open.close()
        if kind is not None:
            self._remove_created()

    def _remove_created(self) -> None:
        with suppress(OSError):  # another process writes there, too
            for folder in self._created:
                folder.rmdir()

    def file(self, name: str) -> Path:
        """Return where to write a file before it is published, under its final name."""
        assert self._scratch is not None, "use the folder in a with statement"
        if name not in self._names:
            self._names.append(name)
        return self._scratch.path / f"{self._begin}{name}"

    def publish(self) -> dict[str, int]:
        """Move all files into place and return their sizes by name."""
        assert self._scratch is not None
        present = [name for name in self._names if self.file(name).exists()]
        sizes = {f"{self.prefix}{name}": self.file(name).stat().st_size for name in present}
        try:
            self._commit(present)
        except OSError as error:
            raise OnnxTrainError(
                f"the artifacts cannot be written to {str(self.directory)!r}: {error}; nothing was "
                "changed"
            ) from None
        _log.info("wrote %d files to %s", len(present), self.directory)
        return sizes

    def _commit(self, present: list[str]) -> None:
        """Make all files the artifacts with one rename, and move them into place."""
        assert self._scratch is not None
        for name in present:
            _sync(self.file(name))
        names, others = (
            [f"{self._begin}{name}" for name in chosen]
            for chosen in (present, [name for name in ARTIFACTS if name not in present])
        )
        for name in names:
            if (self._place / name).is_dir():
                raise IsADirectoryError(f"{self._place / name} is a directory")
        list_files(self._scratch.path, names, others)
        sync_folder(self._scratch.path)
        with changing(self._place):
            self._scratch.release()
            os.rename(self._scratch.path, self._place / COMMITTED)
            self._created = []
            try:
                sync_folder(self._place)
                finish_moves(self._place)
            except OSError as error:
                raise OnnxTrainError(
                    f"the artifacts are in {str(self._place / COMMITTED)!r}, but cannot be moved "
                    f"to their places: {error}. Whatever opens the folder next goes on with it"
                ) from None


def _checked(prefix: str) -> str:
    """Return the prefix if file names can begin with it; it may name folders inside of the folder.

    One that leads elsewhere would put files where nothing takes them back.
    """
    if not isinstance(prefix, str):
        raise ArgumentTypeError(f"prefix is the beginning of file names, not {prefix!r}")
    if os.path.isabs(prefix) or ".." in Path(prefix).parts:
        raise OnnxTrainError(
            f"the prefix {prefix!r} leads out of the artifact directory: give another "
            "artifact_directory instead"
        )
    return prefix


def _sync(file: Path) -> None:
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
