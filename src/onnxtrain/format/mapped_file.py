"""Files as bytes in memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file: mapped, so that what is not looked at takes no memory.

    A mapped file cannot be replaced on Windows, where the file is read instead. Only a program that
    shortens the file in place disturbs a mapping; what is written here is renamed into place.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        if os.name == "nt":
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
