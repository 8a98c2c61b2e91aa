"""Write checkpoints so that a crash at any moment leaves a readable checkpoint.

A rename replaces one file atomically. A checkpoint with external data has two files, `P` and
`P.data`, and no file system renames two files at once. An identifier links them: it is a property
of `P` and the last bytes of the data file. A save takes these steps:

1. write the new data to `P.data.<new identifier>` and the new `P` to a temporary file, sync both;
2. lock the folder, and rename `P.data` to `P.data.old`;
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

from onnxtrain.errors import CheckpointDataError, CheckpointError
from onnxtrain.format.committed_folder import sync_folder
from onnxtrain.format.file_bytes import OpenFile
from onnxtrain.format.folder_lock import settle
from onnxtrain.format.replace_file import NewFiles, Write, leftovers_of, temporary_for

FOOTER_MARK = b"ODTCDATA"
FOOTER_SIZE = len(FOOTER_MARK) + 16


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


def open_file(path: Path) -> OpenFile:
    """Open a checkpoint file."""
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a directory; checkpoints of ONNX Runtime before 1.16, "
            "which were directories, cannot be read"
        )
    settle(path.parent)
    with translated("read", path):
        return OpenFile(path)


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
    path: Path,
    main: Write,
    data: Write | None,
    identifier: str,
    live_identifier: Callable[[], str | None],
) -> None:
    """Write a checkpoint and, if `data` is given, its external data, as described above.

    `live_identifier` returns that of the present checkpoint at `path`, if any.
    """
    staged, temporary = data_path(path, f".{identifier}"), temporary_for(path, identifier)
    pattern = leftovers_of(path, rf"{re.escape(path.name)}\.data\.[0-9a-f]{{16}}")

    def complete_interrupted() -> tuple[str, ...]:
        _complete(path, live_identifier())
        return ()

    with translated("write", path), NewFiles(path.parent, pattern, complete_interrupted) as new:
        if data is not None:
            new.write(staged, data, data_path(path))
        new.write(temporary, main, path)
        with new.committing():
            complete_interrupted()
            if data is not None:
                new.keep(staged)  # from the next rename on, it may be in use
            _exchange(path, temporary, None if data is None else staged)


def _exchange(path: Path, temporary: Path, staged: Path | None) -> None:
    """Rename the new files into place; an error before the first is leaves the old ones."""
    final, old = data_path(path), data_path(path, ".old")
    aside = False
    try:
        if staged is not None:
            if final.exists():
                aside = True
                os.replace(final, old)
            sync_folder(path.parent)
        os.replace(temporary, path)
    except BaseException:
        if temporary.exists():  # an interrupt may come after the rename
            if aside and old.exists():
                os.replace(old, final)
            if staged is not None:
                staged.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    if staged is not None:
        os.replace(staged, final)
        sync_folder(path.parent)
    elif _mark(final):
        final.unlink()
    old.unlink(missing_ok=True)


def _complete(path: Path, live_identifier: str | None) -> None:
    """Complete or undo a save that was interrupted between renames."""
    final, old = data_path(path), data_path(path, ".old")
    wanted = b"" if live_identifier is None else footer(live_identifier)
    if wanted and _mark(final) != wanted:
        for candidate in (data_path(path, f".{live_identifier}"), old):
            if _mark(candidate) == wanted:
                os.replace(candidate, final)
                break
    if old.exists() and not final.exists():
        os.replace(old, final)
    elif old.exists() and wanted and _mark(final) == wanted:
        sync_folder(path.parent)
        old.unlink()


def _mark(path: Path) -> bytes:
    """Return what a data file of ours ends with, which has its identifier; b"" for others."""
    try:
        with open(path, "rb") as file:
            file.seek(-FOOTER_SIZE, os.SEEK_END)
            found = file.read()
    except OSError:
        return b""
    return found if found.startswith(FOOTER_MARK) else b""
