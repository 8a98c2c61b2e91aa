"""Write checkpoints so that a crash at any moment leaves a readable checkpoint.

A rename replaces one file atomically. A checkpoint with external data has two files, `P` and
`P.data`, and no file system renames two files at once. An identifier links them: it is a property
of `P` and the last bytes of the data file. A save takes these steps:

1. write the new data to `P.data.<new identifier>` and the new `P` to a temporary file, sync both;
2. rename `P.data` to `P.data.old`;
3. rename the temporary file to `P`, which makes the new checkpoint valid;
4. rename `P.data.<new identifier>` to `P.data`;
5. delete `P.data.old`.

`open_data` looks for the data of `P` under all three names, so a crash leaves the old checkpoint
readable before step 3 and the new one after it. ONNX Runtime looks for `P.data` only: after a crash
between steps 2 and 4 it reports a missing file (never wrong values) until the next save, which
first restores the names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeGuard

from onnxtrain.errors import CheckpointDataError, CheckpointError
from onnxtrain.format.file_bytes import OpenFile

FOOTER_MARK = b"ODTCDATA"
FOOTER_SIZE = len(FOOTER_MARK) + 16
# A save removes temporary files of killed processes that are older than this.
_STALE_SECONDS = 3600

Write = Callable[[BinaryIO], object]


def is_identifier(found: object) -> TypeGuard[str]:
    """Whether an untrusted value is an identifier, and so safe in a file name."""
    return isinstance(found, str) and re.fullmatch(r"[0-9a-f]{16}", found) is not None


def footer(identifier: str) -> bytes:
    """Return the last bytes of the data file."""
    return FOOTER_MARK + identifier.encode("ascii")


def data_path(path: Path, suffix: str = "") -> Path:
    """Return the path of the external data of a checkpoint."""
    return path.with_name(f"{path.name}.data{suffix}")


@contextlib.contextmanager
def translated(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {action} {path}: {reason_of(error)}") from error


def reason_of(error: OSError) -> str:
    """Return the reason that the operating system reports."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason += " (the disk is full, or a limit on file sizes is reached)"
    return reason


def open_bytes(path: Path) -> memoryview:
    """Return the bytes of a checkpoint file."""
    require_file(path)
    with translated("read", path), OpenFile(path) as file:
        return file.read_all()


def require_file(path: Path) -> None:
    """Say what a directory is not."""
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a directory; checkpoints of ONNX Runtime before 1.16, "
            "which were directories, cannot be read"
        )


def open_data(path: Path, identifier: str | None, may_be_unmarked: bool) -> OpenFile:
    """Open the external data of the checkpoint `path`.

    Without an identifier, or if ONNX Runtime has rewritten both files, the name decides. Data with
    the identifier of another checkpoint are never returned.
    """
    final = data_path(path)
    staged = [] if identifier is None else [data_path(path, f".{identifier}")]
    unmarked: OpenFile | None = None
    for candidate in [final, *staged, data_path(path, ".old")]:
        with contextlib.ExitStack() as files, translated("read", candidate):
            try:
                file = files.enter_context(OpenFile(candidate))
            except FileNotFoundError:
                continue
            mark = file.last_bytes(FOOTER_SIZE)
            if identifier is not None and mark == footer(identifier):
                files.pop_all()
                if unmarked is not None:
                    unmarked.close()
                return file
            if unmarked is None and not mark.startswith(FOOTER_MARK):
                files.pop_all()
                unmarked = file
    if unmarked is not None and may_be_unmarked:
        return unmarked
    if unmarked is not None:
        unmarked.close()
        raise CheckpointDataError(f"{unmarked.path} is damaged: it has lost its end")
    if final.exists():
        raise CheckpointDataError(f"{final} belongs to another checkpoint than {path}")
    raise CheckpointDataError(f"{path} has external data, but {final} does not exist")


def store(
    path: Path, main: Write, data: Write | None, identifier: str, live_identifier: str | None
) -> None:
    """Write a checkpoint and, if `data` is given, its external data, as described above.

    `live_identifier` is that of the present checkpoint at `path`, if any.
    """
    final, old = data_path(path), data_path(path, ".old")
    staged = data_path(path, f".{identifier}")
    temporary = path.with_name(f".{path.name}.{identifier}.tmp")
    aside = False
    with translated("write", path):
        try:
            _settle(path, live_identifier)
            if data is not None:
                write_synced(staged, data, final)
            write_synced(temporary, main, path)
            if data is not None:
                if final.exists():
                    os.replace(final, old)
                    aside = True
                sync_folder(path.parent)
            os.replace(temporary, path)
        except BaseException:
            if aside:
                os.replace(old, final)
            for leftover in (temporary, staged):
                leftover.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
        if data is not None:
            os.replace(staged, final)
            sync_folder(path.parent)
        elif _is_ours(final):
            final.unlink()
        old.unlink(missing_ok=True)
    name = re.escape(path.name)
    remove_stale(path.parent, rf"\.{name}\.[0-9a-f]{{16}}\.tmp|{name}\.data\.[0-9a-f]{{16}}")


def _settle(path: Path, live_identifier: str | None) -> None:
    """Complete or undo a save that was interrupted between renames."""
    final, old = data_path(path), data_path(path, ".old")
    staged = data_path(path, f".{live_identifier}")
    if live_identifier is not None and staged.exists():
        os.replace(staged, final)
    if not final.exists() and old.exists():
        os.replace(old, final)


def write_synced(path: Path, write: Write, successor_of: Path) -> None:
    """Write a new file that will replace another, and wait until it is on the disk."""
    with open(path, "xb") as file:
        # The new file gets the permissions of the old one.
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IMODE(os.stat(successor_of).st_mode))
        write(file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames durable, if the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems cannot sync folders.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-FOOTER_SIZE, os.SEEK_END)
            return file.read(len(FOOTER_MARK)) == FOOTER_MARK
    except OSError:
        return False


def remove_stale(folder: Path, leftovers: str) -> None:
    """Remove old files of a name pattern that killed processes left behind."""
    now = time.time()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if re.fullmatch(leftovers, entry.name) and now - entry.stat().st_mtime > _STALE_SECONDS:
                os.unlink(entry.path)
