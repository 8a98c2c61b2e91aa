"""The bytes of a model file, and of the files beside it that its tensors are in."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onnxtrain.errors import ModelError
from onnxtrain.format.file_bytes import OpenFile, require_beside
from onnxtrain.format.folder_lock import settle
from onnxtrain.format.generation import Digest
from onnxtrain.format.model.tensor import ExternalTensor

# The bytes of a larger file are not kept, and onnxruntime reads it by its path.
_LARGE = 1 << 26
_PIECE = 1 << 22


@contextmanager
def _opened(path: Path) -> Iterator[OpenFile]:
    settle(path.parent)
    try:
        with OpenFile(path) as file:
            yield file
    except FileNotFoundError:
        raise ModelError(f"there is no model at {path}") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ModelError(f"cannot read the model {path}: {error}") from error


def read_bytes(path: Path) -> memoryview:
    """Return the bytes of a model file."""
    with _opened(path) as file:
        return file.read_all()


def digest_of_base(path: Path, model: Path, size: int) -> Digest:
    """Return size and CRC-32 of the file of a base; of one of another size, the size alone."""
    with _opened(path) as file:
        require_beside(path, model)
        crc = 0
        for start in range(0, file.size if file.size == size else 0, _PIECE):
            crc = zlib.crc32(file.read(start, min(_PIECE, file.size - start)), crc)
        return file.size, crc


class ModelBytes:
    """The bytes of a model. Those of a large file are read again when they are needed again."""

    def __init__(self, source: Path | memoryview) -> None:
        self._file = source if isinstance(source, Path) else None
        self._identity: tuple[int, ...] | None = None
        self._lent: weakref.ref[Any] | None = None
        self._kept = None if isinstance(source, Path) else source
        if self._file is not None:
            data = self.data()
            self._kept = data if len(data) <= _LARGE else None

    @property
    def is_kept(self) -> bool:
        """Whether the bytes are in memory, and not read again for each use."""
        return self._kept is not None

    def data(self) -> memoryview:
        """Return the bytes; do not keep those of a large file longer than needed."""
        if self._kept is not None:
            return self._kept
        lent = None if self._lent is None else self._lent()
        if lent is not None:
            return memoryview(lent)
        with self._unchanged() as file:
            data = file.read_all()
        self._lent = weakref.ref(data.obj)
        return data

    def loadable(self) -> str | bytes:
        """Return what onnxruntime makes a session of: the path of a large file, else the bytes."""
        if self._kept is not None:
            return bytes(self._kept)
        with self._unchanged() as file:
            return str(file.path)

    @contextmanager
    def _unchanged(self) -> Iterator[OpenFile]:
        assert self._file is not None
        with _opened(self._file) as file:
            if self._identity is None:
                self._identity = file.identity
            if file.identity != self._identity:
                raise ModelError(f"{self._file} has changed since it was read: load it again")
            yield file


class ExternalFiles:
    """Reads tensors from the files that a model names; `model` is its path."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._left: dict[str, int] = {}

    def read(self, tensor: ExternalTensor) -> memoryview:
        """Return the elements of a tensor.

        All that is read of a file is at most its size: thousands of tensors of the same bytes would
        fill the memory.
        """
        path = self._model.parent / tensor.location
        where = f"{self._model}: initializer {tensor.name!r}"
        with _opened(path) as file:
            require_beside(path, self._model)
            end = tensor.offset + tensor.length
            if end > file.size:
                raise ModelError(
                    f"{where} ends at byte {end} of {tensor.location}, which is shorter"
                )
            left = self._left[tensor.location] = (
                self._left.get(tensor.location, file.size) - tensor.length
            )
            if left < 0:
                raise ModelError(f"{where} overlaps with other tensors in {tensor.location}")
            return file.read_part(tensor.offset, tensor.length)
