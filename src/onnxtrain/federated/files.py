"""Files that are replaced atomically, and named arrays as bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import StateError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.checkpoint.store import translated
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


def unpack_arrays(data: bytes, where: str) -> dict[str, Array]:
    """Return the arrays that `pack_arrays` packed; `where` is for the error."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            names = [bytes.fromhex(str(name)).decode() for name in archive["names"]]
            return {name: archive[f"a{i}"] for i, name in enumerate(names)}
    except Exception as error:  # zipfile, numpy and the codecs raise many kinds of errors
        raise StateError(f"{where} is damaged ({error}): delete it to start anew") from None
