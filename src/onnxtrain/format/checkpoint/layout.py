"""The layout of the files of a checkpoint, and their bytes."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, TypeVar

import numpy as np

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint import checksum
from onnxtrain.format.checkpoint.content import (
    CheckpointContent,
    OptimizerGroup,
    Property,
    RawTensor,
    Tensor,
    tensor_bytes,
    tensor_code,
    tensor_dims,
)
from onnxtrain.format.checkpoint.external_data import ALIGNMENT
from onnxtrain.format.checkpoint.flat_file import Bulk, Scalar, Table, lay_out
from onnxtrain.format.checkpoint.store import footer
from onnxtrain.format.element_types import STRING, data_size

IDENTIFIER = b"ODTC"
VERSION = 2
# ONNX Runtime's limits: files of this size, rounded up to whole mebibytes, have external data;
_MEBIBYTE = 1024 * 1024
EXTERNAL_DATA_THRESHOLD = 1800 * _MEBIBYTE
MOMENTUM_THRESHOLD = EXTERNAL_DATA_THRESHOLD
# smaller tensors stay in the file itself.
EXTERNAL_TENSOR_SIZE = 64

_Item = TypeVar("_Item")


class CheckpointLayout:
    """Offsets of everything in the files. The constructor checks the content."""

    def __init__(
        self, content: CheckpointContent, *, sort: bool, threshold: int, bond: tuple[str, str]
    ) -> None:
        self._sort = sort
        self._nominal = content.nominal
        self._identifier = bond[1]
        self._outside: list[Bulk] = []  # in the second file
        self._data_end = 0
        # Parameters with elements, and whether these are in the second file.
        self.parameters: dict[str, tuple[Bulk, bool]] = {}
        both = content.trainable.keys() & content.frozen.keys()
        if both:
            raise CheckpointError(f"{min(both)!r} is trainable and frozen at once")
        if content.nominal and content.optimizer_groups:
            raise CheckpointError("a nominal checkpoint holds no state of an optimizer")
        states = [group.states for group in content.optimizer_groups.values()]
        moments = _size((n, m) for state in states for n, ms in state.items() for m in ms)
        size = _size(content.trainable.items()) + _size(content.frozen.items()) + moments
        self.external = not self._nominal and (
            content.has_external_data or _rounded_up(size) >= threshold
        )
        # ONNX Runtime looks for momentums in the first file, so they leave it only if they do not
        # fit.
        self._external_moments = self.external and _rounded_up(moments) >= MOMENTUM_THRESHOLD
        properties = {**content.properties, **dict([bond] if self.external else [])}
        root = self._checkpoint(content, properties)
        head = IDENTIFIER + bytes(checksum.FRONT_SIZE)
        self._front, self._inside, end = lay_out(root, head)
        front = checksum.front(end + checksum.END_SIZE, len(self._front))
        self._front[8 : 8 + len(front)] = front

    def write_main(self, file: BinaryIO) -> None:
        """Write the file itself."""
        total = 0
        for chunk in self._main():
            file.write(chunk)
            total = zlib.crc32(chunk, total)
        file.write(checksum.end(total))

    def _main(self) -> Iterator[bytes | bytearray | memoryview]:
        yield self._front
        end = len(self._front)
        for bulk in self._inside:
            yield bytes(bulk.offset - 4 - end) + struct.pack("<I", bulk.length)
            if bulk.length:
                yield tensor_bytes(bulk.tensor)
            end = bulk.offset + bulk.length

    def write_data(self, file: BinaryIO) -> None:
        """Write the external data."""
        blocks, end = checksum.BlockWriter(file), 0
        for bulk in self._outside:
            blocks.write(bytes(bulk.offset - end))
            blocks.write(tensor_bytes(bulk.tensor))
            end = bulk.offset + bulk.length
        blocks.finish()
        file.write(footer(self._identifier))

    def _items(self, mapping: Mapping[str, _Item]) -> Iterable[tuple[str, _Item]]:
        return sorted(mapping.items(), key=lambda item: item[0]) if self._sort else mapping.items()

    def _checkpoint(self, content: CheckpointContent, properties: dict[str, Property]) -> Table:
        module: Table = {
            slot: [self._tensor(n, tensor, is_parameter=True) for n, tensor in self._items(tensors)]
            for slot, tensors in enumerate((content.trainable, content.frozen))
        }
        module[2] = Scalar("u8", content.nominal)
        module[3] = Scalar("u8", self.external)
        root: Table = {0: Scalar("i32", VERSION), 1: module}
        if self._sort or content.optimizer_groups:
            root[2] = [self._group(*item) for item in self._items(content.optimizer_groups)]
        if properties:
            root[3] = self._property_bag(properties)
        return root

    def _tensor(self, name: str, tensor: Tensor, is_parameter: bool = False) -> Table:
        code, dims = tensor_code(tensor, name), tensor_dims(tensor, name)
        table: Table = {0: _name(name), 2: () if self._nominal else dims, 3: Scalar("i32", code)}
        if self._nominal:
            table[4] = Bulk(tensor, 0, 4)
            return table
        if code == STRING:
            if isinstance(tensor, RawTensor):
                raise CheckpointError(f"tensor {name!r}: strings must be in an array")
            table[5] = [_text(str(text)) for text in tensor.flat]
            return table
        length = data_size(code, dims)
        if isinstance(tensor, RawTensor) and tensor.data.nbytes != length:
            raise CheckpointError(
                f"tensor {name!r}: {tensor.data.nbytes} bytes of data do not fill {dims}"
            )
        bulk = Bulk(tensor, length, ALIGNMENT if length >= EXTERNAL_TENSOR_SIZE else 8)
        external = self.external if is_parameter else self._external_moments
        external = external and length >= EXTERNAL_TENSOR_SIZE
        if external:
            bulk.offset = self._data_end + -self._data_end % ALIGNMENT
            self._data_end = bulk.offset + length
            self._outside.append(bulk)
            table[6] = Scalar("i64", bulk.offset, default=-1)
        else:
            table[4] = bulk
        if is_parameter and length:
            self.parameters[name] = bulk, external
        return table

    def _group(self, name: str, group: OptimizerGroup) -> Table:
        states = [
            {
                0: _name(parameter),
                1: [self._tensor(f"momentum{k}", m) for k, m in enumerate(moments)],
            }
            for parameter, moments in self._items(group.states)
        ]
        rate = _float32(group.initial_learning_rate, f"the learning rate of group {name!r}")
        step = _int64(group.step, f"the step of group {name!r}")
        return {0: _name(name), 1: Scalar("i64", step), 2: Scalar("f32", rate), 3: states}

    def _property_bag(self, properties: dict[str, Property]) -> Table:
        bags: Table = {0: [], 1: [], 2: []}
        for name, value in self._items(properties):
            what = f"the property {name!r}"
            stored: Scalar | bytes
            if isinstance(value, int | np.integer):
                slot, stored = 0, Scalar("i64", _int64(value, what))
            elif isinstance(value, float | np.floating):
                slot, stored = 1, Scalar("f32", _float32(value, what))
            elif isinstance(value, str):
                slot, stored = 2, _text(value)
            else:
                kind = type(value).__name__
                raise CheckpointError(f"{what} is a {kind}; a checkpoint holds int, float and str")
            bags[slot].append({0: _name(name), 1: stored})
        return bags


def _size(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Estimate the size of tensors in bytes."""
    return sum(len(n) + data_size(tensor_code(t, n), tensor_dims(t, n)) for n, t in tensors)


def _rounded_up(size: int) -> int:
    return max(1, -(-size // _MEBIBYTE)) * _MEBIBYTE


def _name(value: str) -> bytes:
    if not isinstance(value, str) or not value:
        raise CheckpointError(f"{value!r} is not a name")
    return _text(value)


def _text(value: str) -> bytes:
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"{value!r} cannot be written as UTF-8") from None


def _int64(value: int, what: str) -> int:
    if not -(2**63) <= value < 2**63:
        raise CheckpointError(f"{what} is {value}, which does not fit 64 bits")
    return int(value)


def _float32(value: float, what: str) -> float:
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if math.isinf(rounded) and not math.isinf(value):
        raise CheckpointError(f"{what} is {value}, which does not fit 32 bits")
    return rounded
