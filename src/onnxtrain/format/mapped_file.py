"""Memory-mapped files."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file, mapped into memory.

    On Windows, where a mapped file cannot be replaced, the file is read instead. Truncating the
    file in place breaks the mapping; our writers rename new files into place.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):  # opening a pipe would wait for its other end
        raise OSError("it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        if os.name == "nt":
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
