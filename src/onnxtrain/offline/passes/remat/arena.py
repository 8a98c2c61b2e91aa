"""What onnxruntime's allocator makes of values that come and go.

It takes memory from the system in regions, cuts them into pieces and joins free neighbours. Pieces
of unequal sizes leave gaps, so a process takes more than what lives: up to half more, by bad luck.
Walking through the allocations of a step as the allocator does tells how much.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from onnxtrain.offline.passes.remat.flow import Flow, bytes_alive

_UNIT = 256  # bytes; sizes are rounded up to it
_FIRST_REGION = 1 << 20
_PAGE = 1 << 14
# A free piece is cut when it is twice as large as wanted, or when this much would be lost.
DEFAULT_LOSS = 1 << 27
LEAN_LOSS = 1 << 18


class _Piece:
    __slots__ = ("after", "before", "is_free", "size", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size, self.is_free = start, size, True
        self.before: _Piece | None = None
        self.after: _Piece | None = None


class _Arena:
    def __init__(self, loss: int) -> None:
        self._loss = loss
        self._free: list[tuple[int, int, _Piece]] = []  # by size, then by place
        self._end = 0
        self._region = _FIRST_REGION
        self._touched = bytearray()

    @property
    def resident(self) -> int:
        """How many bytes have been written to at least once."""
        return self._touched.count(1) * _PAGE

    def take(self, size: int) -> _Piece:
        wanted = -(-size // _UNIT) * _UNIT
        index = bisect_left(self._free, (wanted, -1))
        if index == len(self._free):
            self._extend(wanted)
            index = bisect_left(self._free, (wanted, -1))
        piece = self._free.pop(index)[2]
        if piece.size >= 2 * wanted or piece.size - wanted >= self._loss:
            self._cut(piece, wanted)
        piece.is_free = False
        first, last = piece.start // _PAGE, -(-(piece.start + size) // _PAGE)
        self._touched[first:last] = b"\1" * (last - first)
        return piece

    def _extend(self, wanted: int) -> None:
        grown = self._region < wanted
        while self._region < wanted:
            self._region *= 2
        self._add(_Piece(self._end, self._region))
        self._end += self._region
        self._touched.extend(bytes(self._end // _PAGE - len(self._touched)))
        if not grown:
            self._region *= 2

    def _cut(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.start + size, piece.size - size)
        piece.size = size
        rest.before, rest.after = piece, piece.after
        if piece.after is not None:
            piece.after.before = rest
        piece.after = rest
        self._add(rest)

    def _add(self, piece: _Piece) -> None:
        piece.is_free = True
        insort(self._free, (piece.size, piece.start, piece))

    def _remove(self, piece: _Piece) -> None:
        del self._free[bisect_left(self._free, (piece.size, piece.start))]

    def give(self, piece: _Piece) -> None:
        if piece.after is not None and piece.after.is_free:
            self._remove(piece.after)
            _join(piece, piece.after)
        before = piece.before
        if before is not None and before.is_free:
            self._remove(before)
            _join(before, piece)
            piece = before
        self._add(piece)


def _join(piece: _Piece, after: _Piece) -> None:
    piece.size += after.size
    piece.after = after.after
    if after.after is not None:
        after.after.before = piece


def resident_bytes(
    flow: Flow, order: Sequence[int], sizes: Mapping[str, int], loss: int = LEAN_LOSS
) -> int:
    """Return how much memory a run of the graph takes from the system."""
    _, life = bytes_alive(flow, order, sizes)
    ends: dict[int, list[str]] = {}
    starts: dict[int, list[str]] = {}
    for name, (first, last) in life.items():
        if sizes.get(name, 0) and name not in flow.outputs:
            starts.setdefault(first, []).append(name)
            ends.setdefault(last, []).append(name)
    arena, pieces = _Arena(loss), {}
    for now in range(len(order)):
        for name in starts.get(now, ()):
            pieces[name] = arena.take(sizes[name])
        for name in ends.get(now, ()):
            arena.give(pieces.pop(name))
    return arena.resident
