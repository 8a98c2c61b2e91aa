"""Checksums of the two files of a checkpoint; `docs/format.md` specifies them.

The file itself says in its front how long it is, which also says that it ends with a checksum, so
that a file without its end is not taken for one of ONNX Runtime, which writes no checksums. The
data file has one for each block of a mebibyte: they can be verified while it is read.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from onnxtrain.format.file_bytes import OpenFile, allocate

Buffer = bytes | memoryview

# ---- the file itself -----------------------------------------------------------------------------

_FRONT = struct.Struct("<8sQQ")  # mark, length of the file, length of the part before tensors
_FRONT_MARK, _FRONT_AT = b"ODTCSIZE", 8
FRONT_SIZE = _FRONT.size
START_SIZE = _FRONT_AT + FRONT_SIZE
# The last bytes: this, and eight hexadecimal digits, the CRC-32 of the rest.
_END_MARK = b"ODTCCRC="
END_SIZE = len(_END_MARK) + 8


def front(length: int, structure: int) -> bytes:
    """Return bytes 8 to 32 of a file that has `length` bytes with its checksum."""
    return _FRONT.pack(_FRONT_MARK, length, structure)


def end(crc: int) -> bytes:
    """Return the last bytes of a file."""
    return _END_MARK + b"%08x" % crc


def structure_size(start: bytes) -> int | None:
    """Return how many bytes come before the tensors, from the first 32; None if it is not said."""
    mark, _, structure = _FRONT.unpack_from(start.ljust(START_SIZE), _FRONT_AT)
    return structure if mark == _FRONT_MARK else None


def check_file(data: memoryview, verify: bool) -> bool:
    """Check length and checksum, and return whether the front announces them.

    Raises `ValueError` with what is wrong. Files of ONNX Runtime have neither, those of older
    versions of onnxtrain only the checksum. Without `verify` the checksum is not computed.
    """
    start = bytes(data[:START_SIZE])
    mark, length, _ = _FRONT.unpack_from(start.ljust(START_SIZE), _FRONT_AT)
    announced = _is_mark(mark, _FRONT_MARK)
    if announced and length != len(data):
        raise ValueError(
            f"the file has {len(data)} bytes instead of {length}: it is cut off or damaged"
        )
    last = bytes(data[-END_SIZE:])
    if not announced and not _is_mark(last, _END_MARK):
        return False
    rest = data[:-END_SIZE]
    if last != end(zlib.crc32(rest)) if verify else not last.startswith(_END_MARK):
        raise ValueError("the checksum does not match: the file is damaged")
    return announced


def _is_mark(found: bytes, mark: bytes) -> bool:
    """Whether it is a mark, even if half of its bytes are damaged."""
    return 2 * sum(a == b for a, b in zip(found, mark, strict=False)) >= len(mark)


# ---- external data -------------------------------------------------------------------------------

BLOCK_SIZE, _SMALLEST_BLOCK = 1 << 20, 1 << 16
# Behind the checksums of the blocks: mark, length of the data, size of a block, CRC-32 of the
# checksums and of the three fields before. The identifier of `store` follows.
_TABLE = struct.Struct("<8sQII")
_TABLE_MARK = b"ODTCBLKS"
TABLE_SIZE = _TABLE.size


class BlockWriter:
    """Writes the elements of a data file, and the checksums of its blocks behind them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sums: list[int] = []
        self._written = 0

    def write(self, data: Buffer) -> None:
        """Write a part of the data."""
        self._file.write(data)
        for block, part in _blocks(self._written, memoryview(data)):
            if block == len(self._sums):
                self._sums.append(0)
            self._sums[block] = zlib.crc32(part, self._sums[block])
        self._written += len(data)

    def finish(self) -> None:
        """Write the checksums."""
        sums = struct.pack(f"<{len(self._sums)}I", *self._sums)
        self._file.write(sums + _table(sums, self._written, BLOCK_SIZE))


def _blocks(position: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Cut data that begin at a position of the file where blocks begin."""
    start = 0
    while start < len(data):
        block, inside = divmod(position + start, BLOCK_SIZE)
        stop = start + BLOCK_SIZE - inside
        yield block, data[start:stop]
        start = stop


def _table(sums: bytes, length: int, block: int) -> bytes:
    fields = _TABLE.pack(_TABLE_MARK, length, block, 0)[:-4]
    return fields + struct.pack("<I", zlib.crc32(fields, zlib.crc32(sums)))


def read_checked(file: OpenFile, end: int, length: int, verify: bool) -> memoryview:
    """Return the data, of so many bytes, of a file with checksums before the position `end`.

    Raises `ValueError` if they do not fit the file, and `DamagedBlock` for the first block that its
    checksum does not match.
    """
    fields = file.read(end - TABLE_SIZE, TABLE_SIZE) if end >= TABLE_SIZE else bytes(TABLE_SIZE)
    mark, stated, block, _ = _TABLE.unpack(fields)
    count = -(-length // max(block, 1))
    # Many small blocks would keep a reader busy.
    if mark != _TABLE_MARK or block < _SMALLEST_BLOCK or stated != length:
        raise ValueError("the list of its checksums is missing or damaged")
    if length + 4 * count + TABLE_SIZE != end:
        raise ValueError("it has more or fewer bytes than its checksums are for")
    sums = file.read(length, 4 * count)
    if _table(sums, length, block) != fields:
        raise ValueError("the list of its checksums is damaged")
    return read_blocks(file, length, block, np.frombuffer(sums, "<u4") if verify else None)


# Reading takes turns, so that more threads than this find nothing to do.
_THREADS = 4


def read_blocks(
    file: OpenFile,
    size: int,
    block: int = 0,
    sums: npt.NDArray[np.uint32] | None = None,
) -> memoryview:
    """Return the first bytes of a file, in memory of our own; verify blocks if there are sums.

    Raises `DamagedBlock` for the first block that its checksum does not match.
    """
    if sums is None:
        return file.read_part(0, size)
    memory = allocate(size).data
    lock, left, damaged = threading.Lock(), iter(range(len(sums))), list[int]()

    def work() -> None:
        while not damaged:
            with lock:
                index = next(left, None)
                if index is None:
                    return
                part = memory[index * block : (index + 1) * block]
                file.read_into(part, index * block)
            if zlib.crc32(part) != sums[index]:
                damaged.append(index)

    workers = min(_THREADS, len(sums) // 8)
    if workers < 2:
        work()
    else:
        from concurrent.futures import ThreadPoolExecutor  # 0.7 MB, with `logging`

        with ThreadPoolExecutor(workers) as threads:
            for future in [threads.submit(work) for _ in range(workers)]:
                future.result()
    if damaged:
        first = min(damaged)
        raise DamagedBlock(first * block, min((first + 1) * block, size))
    return memory


class DamagedBlock(Exception):
    """Bytes of the data that their checksum does not match: from the first to the second."""
