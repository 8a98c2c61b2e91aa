"""Locks that leave no file behind: writers of a folder take turns, and the dead are told apart.

A folder is locked by its own descriptor (`flock`), on Windows by a file in the system's folder for
temporary files. The system releases a lock when its process ends, however it ends. Who holds the
lock finds no half-finished change: `changing` completes first what a killed process had committed.
On file systems without locks, such as some on a network, writers do not take turns, and what a
process left behind is told by its age.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from onnxtrain.errors import ModelError
from onnxtrain.format.committed_folder import finish_moves, is_unfinished, remove_tree

# Locks are held for a few renames. A process that holds one for longer is stopped, or its disk is.
WAIT_SECONDS = 30.0
_PAUSE = 0.005
# Without locks, what is older than this has no owner.
_STALE_SECONDS = 3600
# Hidden folders for files in the making. While the file in them is open, the owner lives.
SCRATCH, OWNER = ".onnxtrain-", "owner"
_SCRATCH_NAME = re.compile(rf"{re.escape(SCRATCH)}([0-9a-f]{{16}}|[0-9a-z_]{{8}})")

if sys.platform == "win32":
    import hashlib
    import msvcrt
    import tempfile

    def _open(folder: Path) -> int:
        name = hashlib.sha256(os.path.normcase(os.path.realpath(folder)).encode()).hexdigest()
        path = os.path.join(tempfile.gettempdir(), f"onnxtrain-{name[:16]}.lock")
        return os.open(path, os.O_RDWR | os.O_CREAT)

    def _take(descriptor: int, shared: bool) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _release(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

    def hold(file: BinaryIO) -> None:
        """Let others see that the owner of a file lives; here an open file is enough."""

    def is_abandoned(path: str) -> bool:
        """Whether the owner of a file is dead; Windows removes no file that is open."""
        return True

else:
    import fcntl

    def _open(folder: Path) -> int:
        return os.open(folder, os.O_RDONLY)

    def _take(descriptor: int, shared: bool) -> None:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def _release(descriptor: int) -> None:
        # A child process may have inherited the descriptor, so that closing it is not enough.
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def hold(file: BinaryIO) -> None:
        """Let others see that the owner of a file lives, as long as the file is open."""
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_abandoned(path: str) -> bool:
        """Whether the owner of a file is dead, or the file is old where that cannot be known."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        except OSError:
            return is_old(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:
            return is_old(path)
        finally:
            os.close(descriptor)


def is_old(path: str) -> bool:
    """Whether a file was last written long ago."""
    return time.time() - os.lstat(path).st_mtime > _STALE_SECONDS


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[bool]:
    """Let no other process change the names in a folder; tells whether there are locks."""
    with _locked(folder, shared=False) as has_lock:
        finish_moves(folder)
        yield has_lock


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Let no other process replace files while several that belong together are opened."""
    settle(folder)
    if any(_scratch_folders(folder)):
        with contextlib.suppress(OSError), changing(folder) as has_locks:
            remove_scratch(folder, has_locks)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            # Without it, files of two generations may be opened, which are refused.
            stack.enter_context(_locked(folder, shared=True))
        yield


def settle(folder: Path) -> None:
    """Complete a change of a folder that a killed process had committed."""
    if not is_unfinished(folder):
        return
    try:
        with changing(folder):
            pass
    except OSError as error:
        raise ModelError(
            f"a process ended while it replaced the files in {str(folder)!r}, and the rest cannot "
            f"be done now ({error.strerror or error}): open the folder once with a program that "
            "may write there"
        ) from None


def remove_scratch(folder: Path, has_locks: bool) -> None:
    """Remove the scratch folders of dead processes; the caller holds the lock of the folder."""
    for path in _scratch_folders(folder):
        owner = os.path.join(path, OWNER)
        with contextlib.suppress(OSError):
            if is_abandoned(owner) if has_locks else is_old(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(owner)  # Windows refuses this while it is open
                remove_tree(path)


def _scratch_folders(folder: Path) -> list[str]:
    return [
        entry.path
        for entry in entries_of(folder)
        if _SCRATCH_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing where that cannot be known."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


@contextlib.contextmanager
def _locked(folder: Path, shared: bool) -> Iterator[bool]:
    try:
        descriptor = _open(folder)
    except PermissionError:  # of a folder that may be written and not be listed
        yield False
        return
    try:
        if not _wait(descriptor, folder, shared):
            yield False
            return
        try:
            yield True
        finally:
            _release(descriptor)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, folder: Path, shared: bool) -> bool:
    """Take the lock; return whether there are locks here."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            _take(descriptor, shared)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
                return False
        if time.monotonic() > end:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"another process has kept the folder {str(folder)!r} locked for "
                f"{WAIT_SECONDS:.0f} seconds; it may be stopped: let it go on, or end it",
            )
        time.sleep(_PAUSE)
