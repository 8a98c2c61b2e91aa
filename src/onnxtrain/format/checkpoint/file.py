"""Read and write checkpoint files in ONNX Runtime's format: FlatBuffers, identifier `ODTC`.

`docs/format.md` describes the fields. It reads files of ONNX Runtime 1.16 to 1.19 (versions 1 and
2), and writes version 2, which 1.18 and 1.19 read.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxtrain.errors import CheckpointDataError, CheckpointError
from onnxtrain.format.checkpoint import store as disk
from onnxtrain.format.checkpoint.content import (
    MAX_RANK,
    RESERVED_PREFIX,
    Array,
    CheckpointContent,
    OptimizerGroup,
    Property,
    RawTensor,
    Tensor,
)
from onnxtrain.format.checkpoint.flat_reader import FlatReader, FlatTable
from onnxtrain.format.checkpoint.layout import (
    EXTERNAL_DATA_THRESHOLD,
    IDENTIFIER,
    VERSION,
    CheckpointLayout,
)
from onnxtrain.format.element_types import BOOL, ELEMENT_TYPES, STRING, data_size

_READABLE_VERSIONS = (1, VERSION)
# A reader may come between the two renames of a writer.
_ATTEMPTS, _PAUSE = 5, 0.02
_DATA_ID = RESERVED_PREFIX + "external_data"

Source = str | os.PathLike[str] | bytes | bytearray | memoryview


@dataclass(frozen=True)
class TensorLocation:
    """The file, offset and length of the elements of a tensor."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class WrittenCheckpoint:
    """The files of a checkpoint, and the locations of its parameters.

    Strings and tensors without elements are not in `locations`.
    """

    path: Path
    data_path: Path | None
    locations: dict[str, TensorLocation]


def read_checkpoint(source: Source) -> CheckpointContent:
    """Read a checkpoint from a file, or from bytes if it has no external data.

    Arrays are read-only views of the memory-mapped file. They stay valid if the file is replaced or
    deleted.
    """
    return _read(source)


def write_checkpoint(
    path: str | os.PathLike[str],
    content: CheckpointContent,
    *,
    sort: bool = True,
    external_data_threshold: int = EXTERNAL_DATA_THRESHOLD,
) -> WrittenCheckpoint:
    """Write the checkpoint at `path` atomically; `store` describes how.

    If the file exceeds the threshold, or the content came from such a file, parameters of 64 bytes
    and more go to `<path>.data`. `sort` orders everything by name, as in a saved training state;
    otherwise the order is that of the mappings, as in the checkpoint of an artifact folder.
    """
    target = Path(path)
    if not target.name:
        raise CheckpointError(f"{str(path)!r} does not name a file")
    identifier = disk.new_identifier()
    layout = CheckpointLayout(
        content,
        sort=sort,
        threshold=external_data_threshold,
        bond=(_DATA_ID, identifier),
    )
    disk.store(
        target,
        layout.write_main,
        layout.write_data if layout.external else None,
        identifier,
        _live_identifier(target),
    )
    external = disk.data_path(target) if layout.external else None
    return WrittenCheckpoint(
        target,
        external,
        {
            name: TensorLocation(external if is_external and external else target, offset, length)
            for name, (is_external, offset, length) in layout.parameter_places().items()
        },
    )


def _read(source: Source) -> CheckpointContent:
    if isinstance(source, bytes | bytearray | memoryview):
        try:
            data = memoryview(source).cast("B").toreadonly()
        except TypeError:
            raise CheckpointError("the bytes of a checkpoint must be contiguous") from None
        return _CheckpointReader(data, "checkpoint", _no_external_data).read()
    path = Path(source)
    for _ in range(_ATTEMPTS - 1):
        try:
            return _read_file(path)
        except CheckpointDataError:
            time.sleep(_PAUSE)
    return _read_file(path)


def _read_file(path: Path) -> CheckpointContent:
    return _CheckpointReader(
        disk.open_bytes(path), str(path), lambda identifier: disk.open_data(path, identifier)
    ).read()


def _no_external_data(identifier: str | None) -> memoryview:
    raise CheckpointError("the checkpoint has external data in a second file: read it by its path")


def _live_identifier(path: Path) -> str | None:
    """Return the identifier that links the checkpoint at `path` to its external data."""
    try:
        reader = _CheckpointReader(disk.open_bytes(path), str(path), lambda identifier: None)
        return _identifier(reader.properties().get(_DATA_ID))
    except CheckpointError:
        # Missing or damaged: nothing to preserve.
        return None


def _identifier(bond: Property | None) -> str | None:
    """Return the identifier in a property, if it is a valid one."""
    return bond if isinstance(bond, str) and disk.is_identifier(bond) else None


class _CheckpointReader:
    """Reads a checkpoint file in one pass. Field numbers are those of the schema."""

    def __init__(
        self,
        data: memoryview,
        source: str,
        open_data: Callable[[str | None], memoryview | None],
    ) -> None:
        self._reader = FlatReader(data, source)
        self._open_data = open_data
        self._data: memoryview | None = None
        self._root = self._reader.root(IDENTIFIER, "checkpoint")
        version = self._root.number(0, "i32", "version")
        if version not in _READABLE_VERSIONS:
            self._reader.fail(
                f"the format version is {version}; versions {_READABLE_VERSIONS} can be read",
                "checkpoint.version",
            )

    def _verify_checksum(self) -> None:
        """Compare the checksum, if there is one: ONNX Runtime writes none."""
        data, size = self._reader.data, disk.CHECKSUM_SIZE
        found = bytes(data[-size:])
        if found.startswith(disk.CHECKSUM_MARK):
            wanted = disk.checksum(zlib.crc32(data[:-size]))
            if found != wanted:
                self._reader.fail("the checksum does not match: the file is damaged", "checkpoint")

    def read(self) -> CheckpointContent:
        """Read all."""
        self._verify_checksum()
        properties = self.properties()
        bond = _identifier(properties.pop(_DATA_ID, None))
        content = CheckpointContent(properties=properties)
        parameters = ChainMap(content.trainable, content.frozen)
        module = self._root.table(1, "module_state")
        if module is not None:
            content.nominal = module.flag(2, "is_nominal_state")
            content.has_external_data = module.flag(3, "has_external_data")
            if content.has_external_data:
                self._data = self._open_data(bond)
            for slot, field, tensors in (
                (0, "requires_grad_params", content.trainable),
                (1, "frozen_params", content.frozen),
            ):
                for table in module.tables(slot, field):
                    name = self._name(table, 0, "name", parameters)
                    tensors[name] = self._tensor(table, content.nominal)
        for table in self._root.tables(2, "optimizer_groups"):
            name = self._name(table, 0, "group_name", content.optimizer_groups)
            content.optimizer_groups[name] = self._group(table)
        return content

    def properties(self) -> dict[str, Property]:
        """Read the properties."""
        found: dict[str, Property] = {}
        bag = self._root.table(3, "property_bag")
        if bag is None:
            return found
        for table in bag.tables(0, "ints"):
            found[self._name(table, 0, "name", found)] = table.number(1, "i64", "value")
        for table in bag.tables(1, "floats"):
            found[self._name(table, 0, "name", found)] = table.number(1, "f32", "value", 0.0)
        for table in bag.tables(2, "strings"):
            name = self._name(table, 0, "name", found)
            found[name] = table.string(1, "value") or ""
        return found

    def _name(self, table: FlatTable, slot: int, field: str, taken: Mapping[str, object]) -> str:
        name = table.string(slot, field)
        if not name:
            self._reader.fail(f"{field} is missing", table.where, table.position)
        if name in taken:
            self._reader.fail(f"the name {name!r} occurs twice", table.where, table.position)
        table.where += f" ({name[:80]!r})"
        return name

    def _group(self, table: FlatTable) -> OptimizerGroup:
        group = OptimizerGroup(
            table.number(1, "i64", "step"), table.number(2, "f32", "initial_learning_rate", 0.0)
        )
        if group.step < 0:
            self._reader.fail(f"the step is {group.step}", table.where, table.position)
        for state in table.tables(3, "optimizer_states"):
            parameter = self._name(state, 0, "param_name", group.states)
            moments: dict[str, Tensor] = {}
            for moment in state.tables(1, "momentums"):
                name = self._name(moment, 0, "name", moments)
                moments[name] = self._tensor(moment, nominal=False)
            expected = [f"momentum{index}" for index in range(len(moments))]
            if set(moments) != set(expected):
                self._reader.fail(
                    f"the momentums are called {sorted(moments)} instead of {expected}",
                    state.where,
                    state.position,
                )
            group.states[parameter] = [moments[name] for name in expected]
        return group

    def _tensor(self, table: FlatTable, nominal: bool) -> Tensor:
        code = table.number(3, "i32", "data_type")
        if code not in ELEMENT_TYPES:
            self._reader.fail(f"the element type {code} is unknown", table.where, table.position)
        dims = self._dims(table)
        if nominal:
            raw = table.target(4, "raw_data")
            if raw is not None and self._reader.vector(raw, 1, table.where)[1]:
                self._reader.fail("a nominal checkpoint has data", table.where, raw)
            return RawTensor(code, dims, np.empty(0, np.uint8))
        if code == STRING:
            return self._strings(table, dims)
        data = np.frombuffer(self._data_of(table, data_size(code, dims)), np.uint8)
        if code == BOOL and data.size and data.max() > 1:
            self._reader.fail("a bool is neither 0 nor 1", table.where, table.position)
        dtype = ELEMENT_TYPES[code].dtype
        if dtype is None:
            return RawTensor(code, dims, data)
        array: Array = data.view(dtype).reshape(dims)
        if not array.flags.aligned:
            # Files of ONNX Runtime align to four bytes, which makes arithmetic slow.
            array = array.copy()
            array.flags.writeable = False
        return array

    def _dims(self, table: FlatTable) -> tuple[int, ...]:
        at = table.target(2, "dims")
        if at is None:
            return ()
        dims = self._reader.i64s(at, f"{table.where}.dims", MAX_RANK)
        # numpy checks the product without zeros, too.
        elements = 1
        for dim in dims:
            elements *= max(dim, 1)
            if dim < 0 or elements >= 2**58:
                self._reader.fail(f"the dimensions {dims} are impossible", table.where, at)
        return dims

    def _data_of(self, table: FlatTable, size: int) -> memoryview:
        """Return the elements of a tensor, which must have `size` bytes."""
        offset = table.number(6, "i64", "external_data_offset", default=-1)
        if offset == -1:
            raw = table.target(4, "raw_data")
            start, length = (0, 0) if raw is None else self._reader.vector(raw, 1, table.where)
            if length != size:
                self._reader.fail(
                    f"the dimensions need {size} bytes of data, but there are {length}",
                    table.where,
                    raw,
                )
            return self._reader.data[start : start + size]
        if self._data is None:
            self._reader.fail(
                "the tensor is in external data, but the checkpoint has none",
                table.where,
                table.position,
            )
        if offset < 0 or offset + size > len(self._data):
            self._reader.fail(
                f"bytes {offset} to {offset + size} of the external data are needed, but there "
                f"are {len(self._data)}",
                table.where,
                table.position,
            )
        return self._data[offset : offset + size]

    def _strings(self, table: FlatTable, dims: tuple[int, ...]) -> Array:
        at = table.target(5, "string_data")
        texts = [] if at is None else self._reader.strings(at, f"{table.where}.string_data")
        array = np.empty(len(texts), object)
        array[:] = texts
        if len(texts) != int(np.prod(dims, dtype=object)):
            self._reader.fail(
                f"{len(texts)} strings do not fill the dimensions {dims}", table.where, at
            )
        return array.reshape(dims)
