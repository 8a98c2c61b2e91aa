"""Read files into memory of our own.

Nothing is mapped: a process that touches mapped memory of a file that another process has made
shorter is killed by the system, and what others write into the file would change the values.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64  # as large tensors have in the files; a cache line
_CHUNK = 1 << 26


class OpenFile:
    """A regular file that is open for reading: a context manager. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        # Before it is opened: opening a pipe would wait for its other end.
        _require_regular(os.stat(path).st_mode)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        try:
            found = os.fstat(self._file.fileno())
            _require_regular(found.st_mode)
        except OSError:
            self._file.close()
            raise
        self.path, self.size = path, found.st_size
        # What tells whether it is the same file, unchanged, when it is opened again.
        self.identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def last_bytes(self, size: int) -> bytes:
        """Return the last bytes, fewer if there are not so many."""
        size = min(size, self.size)
        return self.read(self.size - size, size)

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill the memory with the bytes from an offset on."""
        self._file.seek(offset)
        filled = 0
        while filled < len(memory):
            count = self._file.readinto(memory[filled : filled + _CHUNK])
            if not count:
                raise OSError(errno.EIO, "the file became shorter while it was read")
            filled += count

    def read(self, offset: int, size: int) -> bytes:
        """Return some bytes."""
        memory = bytearray(size)
        self.read_into(memoryview(memory), offset)
        return bytes(memory)

    def read_part(self, offset: int, size: int) -> memoryview:
        """Return many bytes, in memory that nobody else uses."""
        memory = allocate(size).data
        self.read_into(memory, offset)
        return memory

    def read_all(self) -> memoryview:
        """Return all bytes, in memory that nobody else uses."""
        return self.read_part(0, self.size)


def allocate(size: int) -> npt.NDArray[np.uint8]:
    """Return memory that begins at a multiple of 64 bytes; its content is arbitrary."""
    try:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError):
        raise OSError(errno.ENOMEM, f"it needs {size:,} bytes of memory") from None
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError("it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file")


def require_beside(path: Path, owner: Path) -> None:
    """Refuse a file that a link leads to out of the folder of the file that names it.

    The owner may be a link itself, with all that belongs to it in the folder of its target.
    """
    owners = {Path(os.path.realpath(owner.parent)), Path(os.path.realpath(owner)).parent}
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(folder) for folder in owners):
        raise OSError(f"it is a link to {target}, outside the folder")
