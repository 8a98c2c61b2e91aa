"""numpy's files of arrays (.npy, .npz), which may be damaged or made to harm.

numpy trusts the header of an array: a negative dimension of elements without a size ends the whole
process, and a huge one asks for memory before a byte is read. Here the header has to fit the file.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.format.checkpoint.content import Array

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# An archive may become this many bytes, or times its size; more is made to fill the memory.
_ALWAYS, _TIMES = 2**28, 200
_MOST_DIRECTORY, _MOST_COMMENT = 2**22, 2**16
_NPZ = "an .npz file of plain arrays: write it with numpy.savez"


class Header(NamedTuple):
    """Shape, order and type of an array, and where its elements begin."""

    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype[Any]
    start: int


def map_npy(path: str | os.PathLike[str]) -> Array:
    """Map the array of a .npy file; only what is used of it is read."""
    with _reading(path, "a .npy file: write it with numpy.save"), open(path, "rb") as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        if math.prod(header.shape) == 0:
            return np.zeros(header.shape, header.dtype)
        mapped: Array = np.memmap(
            file,
            header.dtype,
            mode="r",
            offset=header.start,
            shape=header.shape,
            order=header.order,
        )
        return mapped


def npz_names(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the arrays of an .npz file."""
    with _reading(path, _NPZ), _archive(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_npz(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read the arrays of an .npz file by their names."""
    with _reading(path, _NPZ), _archive(path) as archive:
        members = archive.infolist()
        size, packed = sum(member.file_size for member in members), os.path.getsize(path)
        if size > max(_ALWAYS, _TIMES * packed):
            raise InputError(
                f"{os.fspath(path)!r} says that its {packed:,} bytes become {size:,}: if that is "
                "meant, write it with numpy.savez, not savez_compressed"
            )
        found: dict[str, Array] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in found:
                raise ValueError(f"the array {name!r} is there twice")
            with archive.open(member) as file:
                found[name] = _read_array(file, member.file_size)
    return found


@contextmanager
def _archive(path: str | os.PathLike[str]) -> Iterator[zipfile.ZipFile]:
    """Open an archive, unless its directory alone would fill the memory."""
    with open(path, "rb") as file:
        file.seek(-min(_MOST_COMMENT + 22, os.path.getsize(path)), os.SEEK_END)
        end = file.read()
        if _directory_size(end) > _MOST_DIRECTORY:
            raise ValueError("it is an archive of too many arrays")
        with zipfile.ZipFile(file) as archive:
            yield archive


def _directory_size(end: bytes) -> int:
    """Return the size of an archive's directory, from its last bytes."""
    place = end.rfind(b"PK\5\6")
    if place < 0:
        raise ValueError("it is no archive")
    large = end[max(0, place - 76) : place]  # of an archive of more than 4 GB
    if b"PK\6\7" in large:
        if len(large) < 76 or large[:4] != b"PK\6\6" or large[56:60] != b"PK\6\7":
            raise ValueError("the end of the archive is damaged")
        return int.from_bytes(large[40:48], "little")
    return int.from_bytes(end[place + 12 : place + 16], "little")


def _read_array(file: Any, size: int) -> Array:
    header = read_header(file, size)
    data = file.read(size - header.start)  # the last byte lets it compare the checksum
    if math.prod(header.shape) == 0:
        return np.zeros(header.shape, header.dtype)
    return np.frombuffer(data, header.dtype).reshape(header.shape, order=header.order)


def read_header(file: BinaryIO, size: int) -> Header:
    """Read the beginning of an array's file of `size` bytes; a ValueError says what is wrong."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the format is not supported")
    shape, is_fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"elements of type {dtype} are not supported")
    if len(shape) > 32 or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise ValueError(f"the shape {shape} is impossible")
    start = file.tell()
    if math.prod(shape) * dtype.itemsize != size - start:
        raise ValueError(f"{size - start:,} bytes do not fit the shape {shape} of {dtype}")
    return Header(shape, "F" if is_fortran else "C", dtype, start)


@contextmanager
def _reading(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn what numpy, zipfile and zlib raise about a file into our error."""
    try:
        yield
    except (InputError, PermissionError):
        raise
    except Exception as error:  # they have no common class, and no list of what they raise
        reason = f"{type(error).__name__}: {error}"[:200]
        raise InputError(f"{os.fspath(path)!r} is not {kind} ({reason})") from None
