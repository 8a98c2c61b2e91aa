"""Writing the artifact folder: all files appear together, or none does.

Everything is written into a hidden folder beside its destination first. Only when all of it is
there, on disk, are the files renamed into place; should a rename fail, those before it are undone.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

from onnxtrain.errors import ArgumentTypeError, OnnxTrainError

_log = logging.getLogger(__name__)


class Folder:
    """An artifact folder in the making; use it in a `with` statement and `publish` at the end."""

    def __init__(self, directory: str | bytes | os.PathLike[Any] | None, prefix: str) -> None:
        try:
            self.directory = Path.cwd() if directory is None else Path(os.fsdecode(directory))
        except TypeError:
            raise ArgumentTypeError(f"artifact_directory is a path, not {directory!r}") from None
        self.prefix = _checked(prefix)
        self._created: list[Path] = []  # the outermost new folder, if there is one
        self._staging: Path | None = None
        self._names: list[str] = []

    def __enter__(self) -> Folder:
        try:
            self._created = _make_folder(self.directory)[-1:]
            self._staging = Path(tempfile.mkdtemp(prefix=".onnxtrain-", dir=self.directory))
        except OSError as error:
            raise OnnxTrainError(
                f"the artifact directory {str(self.directory)!r} cannot be written: {error}; "
                "name another folder"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
        for folder in self._created if kind is not None else ():
            shutil.rmtree(folder, ignore_errors=True)

    def file(self, name: str) -> Path:
        """Return where to write a file before it is published, under its final name."""
        assert self._staging is not None, "use the folder in a with statement"
        full = f"{self.prefix}{name}"
        if full not in self._names:
            self._names.append(full)
        file = self._staging / full
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from None
        return file

    def publish(self) -> dict[str, int]:
        """Move all files into place and return their sizes by name."""
        assert self._staging is not None
        backup = self._staging / "replaced"
        present = [n for n in self._names if (self._staging / n).exists()]
        done: list[str] = []
        made: list[Path] = []
        try:
            for name in present:
                _sync(self._staging / name)
            for name in present:
                final, saved = self.directory / name, backup / name
                made += _make_folder(final.parent)
                if final.exists():
                    saved.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(final, saved)
                os.replace(self._staging / name, final)
                done.append(name)
        except BaseException as error:
            self._undo(present, done, backup, made)
            if isinstance(error, OSError):
                raise self._cannot_write(error) from None
            raise
        _log.info("wrote %d files to %s", len(present), self.directory)
        return {name: (self.directory / name).stat().st_size for name in present}

    def _undo(self, present: list[str], done: list[str], backup: Path, made: list[Path]) -> None:
        for name in present:
            final = self.directory / name
            if name in done:
                final.unlink(missing_ok=True)
            if (backup / name).exists():
                os.replace(backup / name, final)
        for folder in made:
            folder.rmdir()

    def _cannot_write(self, error: OSError) -> OnnxTrainError:
        return OnnxTrainError(
            f"the artifacts cannot be written to {str(self.directory)!r}: {error}; nothing was "
            "changed"
        )


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


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and those around it; return the new ones, the innermost first."""
    missing = list(takewhile(lambda f: not f.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _sync(file: Path) -> None:
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
