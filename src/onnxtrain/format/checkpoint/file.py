"""Read and write checkpoint files in ONNX Runtime's format: FlatBuffers, identifier `ODTC`.

`docs/format.md` describes the fields. It reads files of ONNX Runtime 1.16 to 1.19 (versions 1 and
2), and writes version 2, which 1.18 and 1.19 read.
"""

from __future__ import annotations

import math
import os
import time
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.errors import CheckpointDataError, CheckpointError
from onnxtrain.format.checkpoint import checksum
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
from onnxtrain.format.checkpoint.external_data import (
    TensorEntry,
    read_external,
    require_apart,
)
from onnxtrain.format.checkpoint.flat_file import FlatReader, FlatTable
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


def read_checkpoint(source: Source, *, verify: bool = True) -> CheckpointContent:
    """Read a checkpoint from a file, or from bytes if it has no external data.

    All of the file is read, and nothing of it is mapped: what happens to it afterwards changes
    nothing. Arrays are read-only views of one piece of memory. Without `verify` its checksums are
    not computed, for storage that has its own: damage then goes unnoticed.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        try:
            data = memoryview(source).cast("B").toreadonly()
        except TypeError:
            raise CheckpointError("the bytes of a checkpoint must be contiguous") from None
        return _CheckpointReader(data, None).read(verify)
    path, attempts = Path(source), 1
    while True:
        try:
            with disk.open_file(path) as file, disk.translated("read", path):
                data = file.read_all()
            return _CheckpointReader(data, path).read(verify)
        except CheckpointDataError:
            if attempts == _ATTEMPTS:
                raise
        attempts += 1
        time.sleep(_PAUSE)


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
    target, identifier = Path(path), os.urandom(8).hex()
    if not target.name:
        raise CheckpointError(f"{str(path)!r} does not name a file")
    layout = CheckpointLayout(
        content, sort=sort, threshold=external_data_threshold, bond=(_DATA_ID, identifier)
    )
    write_data = layout.write_data if layout.external else None
    disk.store(target, layout.write_main, write_data, identifier, lambda: _live_identifier(target))
    return _written(target, layout)


def plan_checkpoint(path: Path, content: CheckpointContent) -> WrittenCheckpoint:
    """Return what `write_checkpoint` would with `sort=False`, without writing anything."""
    bond = _DATA_ID, "0" * 16
    layout = CheckpointLayout(content, sort=False, threshold=EXTERNAL_DATA_THRESHOLD, bond=bond)
    return _written(path, layout)


def _written(path: Path, layout: CheckpointLayout) -> WrittenCheckpoint:
    beside = disk.data_path(path)
    locations = {
        name: TensorLocation(beside if is_external else path, bulk.offset, bulk.length)
        for name, (bulk, is_external) in layout.parameters.items()
    }
    return WrittenCheckpoint(path, beside if layout.external else None, locations)


def _live_identifier(path: Path) -> str | None:
    """Return the identifier that links the checkpoint at `path` to its external data."""
    try:
        return _CheckpointReader(_structure(path), path).properties()[1]
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(
            error.__cause__, FileNotFoundError
        ):
            raise  # it may be whole, and its data no leftovers
        # Missing or damaged: nothing to preserve.
        return None


def _structure(path: Path) -> memoryview:
    """Return all of a file but its tensors, if its front says where they begin."""
    with disk.open_file(path) as file, disk.translated("read", path):
        size = checksum.structure_size(file.read(0, min(file.size, checksum.START_SIZE)))
        return memoryview(file.read(0, min(file.size, file.size if size is None else size)))


class _CheckpointReader:
    """Reads a checkpoint in one pass, from bytes or its file. Field numbers are the schema's."""

    def __init__(self, data: memoryview, path: Path | None) -> None:
        self._bytes, self._path = data, path
        # Each tensor that was found, and its place in the content.
        self._found: list[tuple[TensorEntry, dict[str, Tensor] | list[Tensor], Any]] = []
        reader = FlatReader(data, "checkpoint" if path is None else str(path))
        self._root = reader.root(IDENTIFIER, "checkpoint")
        version = self._root.number(0, "i32", "version")
        if version not in _READABLE_VERSIONS:
            self._root.fail(
                f"the format version is {version}; versions {_READABLE_VERSIONS} can be read"
            )

    def read(self, verify: bool) -> CheckpointContent:
        """Read all. Nothing is allocated or copied before everything is checked."""
        try:
            announced = checksum.check_file(self._bytes, verify)
        except ValueError as wrong:
            self._root.fail(str(wrong))
        properties, identifier = self.properties()
        content = CheckpointContent(properties=properties)
        parameters = ChainMap(content.trainable, content.frozen)
        module = self._root.table(1, "module_state")
        if module is not None:
            content.nominal = module.flag(2, "is_nominal_state")
            content.has_external_data = module.flag(3, "has_external_data")
            for slot, field, tensors in (
                (0, "requires_grad_params", content.trainable),
                (1, "frozen_params", content.frozen),
            ):
                for table in module.tables(slot, field):
                    name = _name(table, parameters)
                    self._put(self._entry(table, content.nominal), tensors, name)
        groups = content.optimizer_groups
        for table in self._root.tables(2, "optimizer_groups"):
            name = _name(table, groups, "group_name")
            groups[name] = self._group(table)
        self._fill(content, identifier, announced, verify)
        return content

    def _put(self, entry: TensorEntry, holder: dict[str, Tensor] | list[Tensor], key: Any) -> None:
        """Note where a tensor belongs, and keep the place."""
        holder[key] = _NOTHING
        self._found.append((entry, holder, key))

    def _fill(
        self, content: CheckpointContent, identifier: str | None, announced: bool, verify: bool
    ) -> None:
        """Make the tensors."""
        entries = [entry for entry, _, _ in self._found]
        outside = [entry for entry in entries if entry.is_external]
        require_apart(entry for entry in entries if not entry.is_external)
        data = memoryview(b"")
        if content.has_external_data:
            if self._path is None:
                raise CheckpointError("the checkpoint has external data: read it by its path")
            data = read_external(self._path, identifier, outside, announced, verify)
        elif outside:
            outside[0].table.fail("the tensor is in external data, but the checkpoint has none")
        for entry, holder, key in self._found:
            source = data if entry.is_external else self._bytes
            holder[key] = _tensor(entry, source, content.nominal)

    def properties(self) -> tuple[dict[str, Property], str | None]:
        """Read the properties, and the identifier of the external data if there is a valid one."""
        found: dict[str, Property] = {}
        bag = self._root.table(3, "property_bag")
        if bag is not None:
            for table in bag.tables(0, "ints"):
                found[_name(table, found)] = table.number(1, "i64", "value")
            for table in bag.tables(1, "floats"):
                found[_name(table, found)] = table.number(1, "f32", "value", 0.0)
            for table in bag.tables(2, "strings"):
                found[_name(table, found)] = table.string(1, "value")
        identifier = found.pop(_DATA_ID, None)
        return found, identifier if disk.is_identifier(identifier) else None

    def _group(self, table: FlatTable) -> OptimizerGroup:
        group = OptimizerGroup(
            table.number(1, "i64", "step"), table.number(2, "f32", "initial_learning_rate", 0.0)
        )
        if group.step < 0:
            table.fail(f"the step is {group.step}")
        for state in table.tables(3, "optimizer_states"):
            parameter = _name(state, group.states, "param_name")
            moments: dict[str, TensorEntry] = {}
            for moment in state.tables(1, "momentums"):
                name = _name(moment, moments)
                moments[name] = self._entry(moment, nominal=False)
            expected = [f"momentum{index}" for index in range(len(moments))]
            if set(moments) != set(expected):
                state.fail(f"the momentums are called {sorted(moments)} instead of {expected}")
            tensors = group.states[parameter] = [_NOTHING] * len(expected)
            for index, name in enumerate(expected):
                self._put(moments[name], tensors, index)
        return group

    def _entry(self, table: FlatTable, nominal: bool) -> TensorEntry:
        code = table.number(3, "i32", "data_type")
        if code not in ELEMENT_TYPES:
            table.fail(f"the element type {code} is unknown")
        dims = table.int64s(2, "dims", MAX_RANK)
        elements = 1
        for dim in dims:
            elements *= max(dim, 1)  # numpy checks the product without zeros, too
            if dim < 0 or elements >= 2**58:
                table.fail(f"the dimensions {dims} are impossible")
        if nominal:
            if table.span(4, "raw_data")[1]:
                table.fail("a nominal checkpoint has data")
            return TensorEntry(table, code, dims)
        if code == STRING:
            texts = table.strings(5, "string_data")
            if len(texts) != math.prod(dims):
                table.fail(f"{len(texts)} strings do not fill the dimensions {dims}")
            return TensorEntry(table, code, dims, strings=texts)
        size = data_size(code, dims)
        offset = table.number(6, "i64", "external_data_offset", default=-1)
        if offset != -1:
            return TensorEntry(table, code, dims, offset, size, is_external=True)
        start, count = table.span(4, "raw_data")
        if count != size:
            table.fail(f"the dimensions need {size} bytes of data, but there are {count}")
        return TensorEntry(table, code, dims, start, size)


# Stands for a tensor until all are checked.
_NOTHING = RawTensor(1, (0,), np.empty(0, np.uint8))


def _tensor(entry: TensorEntry, source: memoryview, nominal: bool) -> Tensor:
    if entry.strings is not None:
        strings = np.empty(len(entry.strings), object)
        strings[:] = entry.strings
        return strings.reshape(entry.dims)
    data = np.empty(0, np.uint8)
    if entry.size:  # without elements, the offset may be anywhere
        data = np.frombuffer(source, np.uint8, entry.size, entry.offset)
    data.flags.writeable = False
    if entry.code == BOOL and data.size and data.max() > 1:
        entry.table.fail("a bool is neither 0 nor 1")
    dtype = ELEMENT_TYPES[entry.code].dtype
    if dtype is None or nominal:
        return RawTensor(entry.code, entry.dims, data)
    array: Array = data.view(dtype).reshape(entry.dims)
    if not array.flags.aligned:
        # Files of ONNX Runtime align to four bytes, which makes arithmetic slow.
        array = array.copy()
        array.flags.writeable = False
    return array


def _name(table: FlatTable, taken: Mapping[str, object], field: str = "name") -> str:
    name = table.string(0, field)
    if not name:
        table.fail(f"{field} is missing")
    if name in taken:
        table.fail(f"the name {name!r} occurs twice")
    table.where += f" ({name[:80]!r})"
    return name
