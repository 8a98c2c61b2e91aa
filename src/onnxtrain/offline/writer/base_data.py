"""The base: tensors that no training changes, in one file that all graphs of a folder share.

onnxruntime maps it into memory, so that processes which train or run adapters of the same base have
it once.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.format.generation import Digest
from onnxtrain.offline.graph.shapes import FLOATS

_PAGE = 4096  # systems map files by pages
# onnxruntime wants what shape inference reads, such as shapes and scales, in the graph.
_MOST_FLOATS, _MOST_OTHERS = 64, 1024  # bytes


Place = tuple[int, int]  # offset and length


class BaseData:
    """The file of a base in the making: what is equal in several graphs is written once.

    Equal tensors of one graph have places of their own, as readers take overlaps for an attack.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[bytes, list[Place]] = {}
        self._size = self._crc = 0
        path.write_bytes(b"")

    @property
    def digest(self) -> Digest:
        """Size and CRC-32 of the file so far."""
        return self._size, self._crc

    def add(self, data: bytes | memoryview, taken: set[Place]) -> Place:
        """Return where the bytes of a tensor are; `taken` are the places of the same graph."""
        places = self._places.setdefault(hashlib.sha256(data).digest(), [])
        place = next((place for place in places if place not in taken), None)
        if place is None:
            place = self._write(data)
            places.append(place)
        taken.add(place)
        return place

    def _write(self, data: bytes | memoryview) -> Place:
        gap = bytes(-self._size % _PAGE)
        with self.path.open("ab") as file:
            for piece in (gap, data):
                file.write(piece)
                self._crc = zlib.crc32(piece, self._crc)
        self._size += len(gap) + len(data)
        return self._size - len(data), len(data)

    def move_out(self, model: ir.Model, names: Collection[str]) -> None:
        """Let a graph take initializers from this file."""
        taken = set[Place]()
        for name in names:
            value = model.graph.initializers.get(name)
            tensor = None if value is None else value.const_value
            if value is None or tensor is None or not is_stored(tensor.dtype, tensor.nbytes):
                continue
            offset, length = self.add(tensor.tobytes(), taken)
            value.const_value = ir.ExternalTensor(
                self.path.name, offset, length, tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()), name=name, base_dir=self.path.parent,
            )  # fmt: skip

    def point(self, tensor: onnx.TensorProto, data: bytes, taken: set[Place]) -> None:
        """Let a tensor without data take it from this file."""
        offset, length = self.add(data, taken)
        entries = {"location": self.path.name, "offset": offset, "length": length}
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))


def is_stored(dtype: ir.DataType, size: int) -> bool:
    """Whether a tensor of so many bytes is in the file of the base, and not in the graphs."""
    return dtype != ir.DataType.STRING and size > (
        _MOST_FLOATS if dtype in FLOATS else _MOST_OTHERS
    )


def fingerprint(tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]]) -> str:
    """Return 32 hexadecimal digits for names, types, shapes and digests of tensors."""
    found = hashlib.sha256()
    for name, (code, dims, digest) in sorted(tensors.items()):
        found.update(f"{len(name)} {name} {code} {list(dims)} ".encode() + digest)
    return found.hexdigest()[:32]
