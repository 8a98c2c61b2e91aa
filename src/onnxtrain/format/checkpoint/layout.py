"""The layout of the files of a checkpoint, and their bytes."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np

from onnxtrain.errors import CheckpointError
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
from onnxtrain.format.checkpoint.flat_writer import Bulk, Int64s, Node, Table, Text, Vector, lay_out
from onnxtrain.format.checkpoint.store import checksum, footer
from onnxtrain.format.element_types import STRING, data_size

IDENTIFIER = b"ODTC"
VERSION = 2
# ONNX Runtime's limits: files of this size, rounded up to whole mebibytes, have external data;
_MEBIBYTE = 1024 * 1024
EXTERNAL_DATA_THRESHOLD = 1800 * _MEBIBYTE
MOMENTUM_THRESHOLD = EXTERNAL_DATA_THRESHOLD
# smaller tensors stay in the file itself.
EXTERNAL_TENSOR_SIZE = 64
# For vector instructions; ONNX Runtime needs 4 or 8.
ALIGNMENT = 64

_Item = TypeVar("_Item")


class _Placed(NamedTuple):
    """A tensor with elements, and their place: external data, or bulk data of the file."""

    name: str
    tensor: Tensor
    length: int
    external_offset: int
    bulk: Bulk | None


class _Summed:
    """A file that computes the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write data."""
        self._file.write(data)
        self._sum = zlib.crc32(data, self._sum)

    def checksum(self) -> bytes:
        """Return the last bytes of the file."""
        return checksum(self._sum)


class CheckpointLayout:
    """Offsets of everything in the files. The constructor checks the content."""

    def __init__(
        self, content: CheckpointContent, *, sort: bool, threshold: int, bond: tuple[str, str]
    ) -> None:
        self._sort = sort
        self._nominal = content.nominal
        self._bond = bond[1]
        self._placed: list[_Placed] = []
        self._parameters: list[_Placed] = []
        self._data_end = 0
        both = content.trainable.keys() & content.frozen.keys()
        if both:
            raise CheckpointError(f"{min(both)!r} is trainable and frozen at once")
        if content.nominal and content.optimizer_groups:
            raise CheckpointError("a nominal checkpoint holds no state of an optimizer")
        inline, moments = _sizes(content)
        self.external = not self._nominal and (
            content.has_external_data or _rounded_up(inline + moments) >= threshold
        )
        # ONNX Runtime looks for momentums in the first file, so they leave it only if they do not
        # fit.
        self._external_moments = self.external and _rounded_up(moments) >= MOMENTUM_THRESHOLD
        properties = dict(content.properties)
        if self.external:
            properties[bond[0]] = bond[1]
        self._main = lay_out(self._checkpoint(content, properties), IDENTIFIER)

    def parameter_places(self) -> dict[str, tuple[bool, int, int]]:
        """Return whether each parameter with elements is external, its offset and length."""
        return {
            p.name: (not p.bulk, p.bulk.offset if p.bulk else p.external_offset, p.length)
            for p in self._parameters
        }

    def write_main(self, target: BinaryIO) -> None:
        """Write the file itself."""
        file = _Summed(target)
        file.write(self._main.front)
        end = len(self._main.front)
        tensors = {id(item.bulk): item.tensor for item in self._placed if item.bulk is not None}
        for bulk in self._main.bulks:
            file.write(bytes(bulk.offset - 4 - end) + struct.pack("<I", bulk.length))
            if bulk.length:
                file.write(tensor_bytes(tensors[id(bulk)]))
            end = bulk.offset + bulk.length
        target.write(file.checksum())

    def write_data(self, file: BinaryIO) -> None:
        """Write the external data."""
        end = 0
        for item in self._placed:
            if item.bulk is None:
                file.write(bytes(item.external_offset - end))
                file.write(tensor_bytes(item.tensor))
                end = item.external_offset + item.length
        file.write(footer(self._bond))

    def _items(self, mapping: Mapping[str, _Item]) -> Iterable[tuple[str, _Item]]:
        return sorted(mapping.items(), key=lambda item: item[0]) if self._sort else mapping.items()

    def _checkpoint(self, content: CheckpointContent, properties: dict[str, Property]) -> Table:
        module = Table()
        for slot, tensors in enumerate((content.trainable, content.frozen)):
            items = [self._parameter(name, tensor) for name, tensor in self._items(tensors)]
            module.refer(slot, Vector(items))
        module.set(2, "bool", content.nominal)
        module.set(3, "bool", self.external)
        root = Table()
        root.set(0, "i32", VERSION)
        root.refer(1, module)
        if self._sort or content.optimizer_groups:
            groups = self._items(content.optimizer_groups)
            root.refer(2, Vector([self._group(name, group) for name, group in groups]))
        if properties:
            root.refer(3, self._property_bag(properties))
        return root

    def _parameter(self, name: str, tensor: Tensor) -> Table:
        before = len(self._placed)
        table = self._tensor(name, tensor, self.external)
        self._parameters += self._placed[before:]
        return table

    def _tensor(self, name: str, tensor: Tensor, external: bool) -> Table:
        code, dims = tensor_code(tensor, name), tensor_dims(tensor, name)
        table = Table()
        table.refer(0, _text(name))
        table.refer(2, Int64s(() if self._nominal else dims))
        table.set(3, "i32", code)
        if self._nominal:
            table.refer(4, Bulk(0, 4))
            return table
        if code == STRING:
            if isinstance(tensor, RawTensor):
                raise CheckpointError(f"tensor {name!r}: strings must be in an array")
            table.refer(5, Vector([_text(str(text)) for text in tensor.flat]))
            return table
        length = data_size(code, dims)
        if isinstance(tensor, RawTensor) and tensor.data.nbytes != length:
            raise CheckpointError(
                f"tensor {name!r}: {tensor.data.nbytes} bytes of data do not fill {dims}"
            )
        if external and length >= EXTERNAL_TENSOR_SIZE:
            offset = self._data_end + -self._data_end % ALIGNMENT
            self._data_end = offset + length
            table.set(6, "i64", offset, default=-1)
            self._placed.append(_Placed(name, tensor, length, offset, None))
            return table
        bulk = Bulk(length, ALIGNMENT if length >= EXTERNAL_TENSOR_SIZE else 8)
        table.refer(4, bulk)
        if length:
            self._placed.append(_Placed(name, tensor, length, -1, bulk))
        return table

    def _group(self, name: str, group: OptimizerGroup) -> Table:
        states: list[Node] = []
        for parameter, moments in self._items(group.states):
            state = Table()
            state.refer(0, _text(parameter))
            tensors = [
                self._tensor(f"momentum{index}", moment, self._external_moments)
                for index, moment in enumerate(moments)
            ]
            state.refer(1, Vector(tensors))
            states.append(state)
        table = Table()
        table.refer(0, _text(name))
        table.set(1, "i64", _int64(group.step, f"the step of group {name!r}"))
        rate = _float32(group.initial_learning_rate, f"the learning rate of group {name!r}")
        table.set(2, "f32", rate)
        table.refer(3, Vector(states))
        return table

    def _property_bag(self, properties: dict[str, Property]) -> Table:
        bags: tuple[list[Node], list[Node], list[Node]] = ([], [], [])
        for name, value in self._items(properties):
            table = Table()
            table.refer(0, _text(name))
            if isinstance(value, int | np.integer):
                table.set(1, "i64", _int64(value, f"the property {name!r}"))
                bags[0].append(table)
            elif isinstance(value, float | np.floating):
                table.set(1, "f32", _float32(value, f"the property {name!r}"))
                bags[1].append(table)
            elif isinstance(value, str):
                table.refer(1, _text(value, empty=True))
                bags[2].append(table)
            else:
                raise CheckpointError(
                    f"the property {name!r} is a {type(value).__name__}; "
                    "a checkpoint holds int, float and str"
                )
        table = Table()
        for slot, bag in enumerate(bags):
            table.refer(slot, Vector(bag))
        return table


def _sizes(content: CheckpointContent) -> tuple[int, int]:
    """Estimate the sizes of the parameters and of the optimizer state in bytes."""

    def size(name: str, tensor: Tensor) -> int:
        return len(name) + data_size(tensor_code(tensor, name), tensor_dims(tensor, name))

    parameters = (*content.trainable.items(), *content.frozen.items())
    moments = (
        (parameter, moment)
        for group in content.optimizer_groups.values()
        for parameter, tensors in group.states.items()
        for moment in tensors
    )
    return sum(size(*item) for item in parameters), sum(size(*item) for item in moments)


def _rounded_up(size: int) -> int:
    return max(1, -(-size // _MEBIBYTE)) * _MEBIBYTE


def _text(value: str, empty: bool = False) -> Text:
    if not isinstance(value, str) or not (value or empty):
        raise CheckpointError(f"{value!r} is not a name")
    try:
        return Text(value.encode("utf-8"))
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
