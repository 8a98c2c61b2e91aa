"""Files that are replaced atomically, and named arrays as bytes.

Bytes come from disks, servers and clients, so nothing is allocated before it is known to be there:
archives are not compressed, and the size of each array has to be the one in its header.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import OnnxTrainError, StateError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.checkpoint.store import translated
from onnxtrain.format.npy import read_header
from onnxtrain.format.replace_file import make_folder
from onnxtrain.format.replace_file import replace_file as write_anew


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    with translated("write", path):
        make_folder(path.parent)
        write_anew(path, lambda file: file.write(data))


def pack_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Return named arrays as bytes."""
    buffer = io.BytesIO()
    # Names may hold any characters, so arrays are numbered and the names listed apart.
    names = np.array([name.encode().hex() for name in arrays], dtype=np.str_)
    numbered: dict[str, Any] = {f"a{i}": array for i, array in enumerate(arrays.values())}
    np.savez(buffer, names=names, **numbered)
    return buffer.getvalue()


@contextmanager
def explained_damage(where: str) -> Iterator[None]:
    """Turn all that reading damaged content raises into an error of ours."""
    try:
        yield
    except OnnxTrainError:
        raise
    except Exception as error:  # zipfile, numpy, json and the codecs raise many kinds of errors
        what = f"{type(error).__name__}: {error}"
        raise StateError(f"{where} is damaged ({what}): delete it to start anew") from None


def unpack_arrays(data: bytes, where: str) -> dict[str, Array]:
    """Return the arrays that `pack_arrays` packed; `where` is for the error."""
    with explained_damage(where):
        entries = _entries(data)
        names = [bytes.fromhex(str(name)).decode() for name in read_npy(entries["names.npy"])]
        if len(set(names)) != len(names) or len(entries) != len(names) + 1:
            raise ValueError("the names do not match the arrays")
        return {name: read_npy(entries[f"a{i}.npy"]) for i, name in enumerate(names)}


def read_npy(data: bytes | memoryview) -> Array:
    """Return the array of an .npy file; numbers and text only, and as large as its header says."""
    header = read_header(io.BytesIO(data[:_MOST_HEADER]), len(data))
    if header.dtype.kind not in "biufcU":
        raise ValueError(f"an array of the type {header.dtype}")
    flat = np.frombuffer(data, header.dtype, math.prod(header.shape), header.start).copy()
    return flat.reshape(header.shape, order=header.order)


# An array takes 128 bytes and more, and about 60 in the directory of its archive.
_MOST_HEADER = 1 << 17
_MOST_DIRECTORY = 1 << 22
_END, _END64, _LOCATOR = b"PK\5\6", b"PK\6\6", b"PK\6\7"


def _entries(data: bytes) -> dict[str, memoryview]:
    """Return the content of a zip archive without compression, by name, without a copy."""
    end = data[-22:]
    if end[:4] != _END:
        raise ValueError("the end of the archive is missing")
    size = struct.unpack_from("<I", end, 12)[0]
    if data[-42:-38] == _LOCATOR and data[-98:-94] == _END64:
        size = struct.unpack_from("<Q", data[-98:], 40)[0]
    if size > _MOST_DIRECTORY:
        raise ValueError(f"the directory of the archive has {size} bytes")
    view, entries, total = memoryview(data), {}, 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        directory = archive.infolist()
    for info in directory:
        total += info.file_size
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"{info.filename!r} is compressed")
        if total > len(data):  # entries that overlap may declare more than there is
            raise ValueError("the archive declares more bytes than it has")
        lengths = struct.unpack_from("<4s22x2H", data, info.header_offset)
        begin = info.header_offset + 30 + lengths[1] + lengths[2]
        content = view[begin : begin + info.file_size]
        if lengths[0] != b"PK\3\4" or zlib.crc32(content) != info.CRC:
            raise ValueError(f"the checksum of {info.filename!r} is wrong")
        entries[info.filename] = content
    return entries
