"""Replace files so that a crash at any moment leaves the old or the new, and no litter.

New files are written beside their places under temporary names, synced, and renamed. A temporary
file is held open, so that other processes leave it alone while its owner lives. Whoever writes next
removes what dead processes left behind, before anything is written: a full disk frees itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from onnxtrain.format.committed_folder import remove_tree, sync_folder
from onnxtrain.format.folder_lock import (
    OWNER,
    SCRATCH,
    changing,
    entries_of,
    hold,
    is_abandoned,
    is_old,
    remove_scratch,
)

Write = Callable[[BinaryIO], object]


def temporary_for(path: Path, identifier: str | None = None) -> Path:
    """Return a new temporary name beside a file."""
    return path.with_name(f".{path.name}.{identifier or os.urandom(8).hex()}.tmp")


def leftovers_of(path: Path, *others: str) -> str:
    """Return the pattern of temporary names beside a file, and of others."""
    return "|".join([rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp", *others])


class NewFiles:
    """Files in the making, in the folder that they will appear in.

    `leftovers` is the pattern of names that dead processes may have left there; `before_writing` is
    called first, and returns names that are in use in spite of that.
    Write all, then rename them within `committing`; `replace_file` is an example.
    """

    def __init__(
        self,
        folder: Path,
        leftovers: str,
        before_writing: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._folder = folder
        self._leftovers = re.compile(leftovers)
        self._before_writing = before_writing
        self._open: dict[Path, BinaryIO] = {}

    def __enter__(self) -> NewFiles:
        with changing(self._folder) as has_locks:
            in_use = self._before_writing()
            remove_scratch(self._folder, has_locks)
            for entry in entries_of(self._folder):
                if self._leftovers.fullmatch(entry.name) and entry.name not in in_use:
                    _remove_abandoned(entry, has_locks)
        return self

    def write(self, path: Path, write: Write, successor_of: Path) -> None:
        """Write a new file that will replace another, and wait until it is on the disk."""
        with changing(self._folder):
            file = self._open[path] = open(path, "xb")  # noqa: SIM115  (`__exit__` closes it)
            hold(file)
        # The new file gets the permissions of the old one.
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IMODE(os.stat(successor_of).st_mode))
        write(file)
        file.flush()
        os.fsync(file.fileno())

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Let no other process change the names in the folder while files are renamed."""
        with changing(self._folder):
            for file in self._open.values():
                file.close()  # Windows renames no file that is open
            yield

    def keep(self, path: Path) -> None:
        """Let a file stay under the name that it was written to."""
        del self._open[path]

    def __exit__(self, *error: object) -> None:
        for path, file in self._open.items():
            with contextlib.suppress(OSError):  # what could not be written before cannot be now
                file.close()
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def replace_file(path: Path, write: Write) -> None:
    """Replace one file."""
    temporary = temporary_for(path)
    with NewFiles(path.parent, leftovers_of(path)) as new:
        new.write(temporary, write, path)
        with new.committing():
            os.replace(temporary, path)
            sync_folder(path.parent)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and those around it, durably; return the new ones, the innermost first."""
    missing = list(takewhile(lambda f: not f.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)
    return missing


class ScratchFolder:
    """A hidden folder for files in the making, which is removed at the end or by the next one."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"{SCRATCH}{os.urandom(8).hex()}"
        self._owner: BinaryIO | None = None

    def __enter__(self) -> ScratchFolder:
        with changing(self.path.parent) as has_locks:
            remove_scratch(self.path.parent, has_locks)
            self.path.mkdir(0o700)
            try:
                self._owner = open(self.path / OWNER, "xb")
            except BaseException:
                self.path.rmdir()
                raise
            hold(self._owner)
        return self

    def release(self) -> None:
        """Give up the folder, so that it can be renamed; the caller holds its parent's lock."""
        if self._owner is not None:
            self._owner.close()
            (self.path / OWNER).unlink(missing_ok=True)
        self._owner = None

    def __exit__(self, *error: object) -> None:
        if self._owner is not None:
            self._owner.close()
        remove_tree(self.path, ignore_errors=True)


def _remove_abandoned(entry: os.DirEntry[str], has_locks: bool) -> None:
    with contextlib.suppress(OSError):
        if entry.is_file(follow_symlinks=False) and (
            is_abandoned(entry.path) if has_locks else is_old(entry.path)
        ):
            os.unlink(entry.path)
