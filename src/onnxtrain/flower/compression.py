"""Smaller updates: a client sends the difference to what it received, in fewer bytes.

What rounding or leaving out takes from an update is not lost: it is kept on the client and added
to its next update (error feedback), except with float16, which loses too little to matter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from onnxtrain.api.checkpoint_content import Array as NumpyArray
from onnxtrain.errors import ArgumentError, NonFiniteError

_STYPE = "onnxtrain/"
KINDS = ("float16", "int8", "top-k")


@dataclass(frozen=True)
class Compression:
    """How updates are made smaller: "float16", "int8", or "top-k" with the fraction to keep.

    Written as text, as in a run's configuration: `float16`, `int8`, `top-k:0.05`.
    """

    kind: str
    fraction: float = 0.05

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(
                f"compression is one of {', '.join(KINDS)}, not {self.kind!r}; the fraction that "
                "top-k keeps is written behind it: 'top-k:0.05'"
            )
        if not 0 < self.fraction <= 1:
            raise ArgumentError(f"top-k keeps a fraction above 0, up to 1, not {self.fraction}")

    @classmethod
    def read(cls, given: str | Compression | None) -> Compression | None:
        """Return a compression from its text; None for none."""
        if isinstance(given, Compression) or given is None or given in ("", "none"):
            return given if isinstance(given, Compression) else None
        kind, colon, fraction = str(given).partition(":")
        try:
            return cls(kind, float(fraction)) if colon else cls(kind)
        except ValueError as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"the fraction of top-k is a number, not {fraction!r}") from None

    @property
    def has_memory(self) -> bool:
        """Whether a client keeps what an update lost."""
        return self.kind != "float16"

    def encode(
        self, update: Mapping[str, NumpyArray], residual: Mapping[str, NumpyArray]
    ) -> tuple[ArrayRecord, dict[str, NumpyArray]]:
        """Return an update in fewer bytes, and what it lost, by name."""
        wanted = {
            name: np.asarray(array, np.float32) + residual[name]
            if name in residual and residual[name].shape == array.shape
            else np.asarray(array, np.float32)
            for name, array in update.items()
        }
        least = _least(wanted, self.fraction) if self.kind == "top-k" else 0.0
        record, lost = ArrayRecord(), {}
        for name, array in wanted.items():
            data = _pack(self.kind, array, least)
            record[name] = Array("float32", tuple(array.shape), f"{_STYPE}{self.kind}", data)
            if self.has_memory:
                lost[name] = array - _unpack(self.kind, data, array.shape)
        return record, lost


def is_compressed(array: Any) -> bool:
    """Whether an array of a record is a compressed update."""
    return isinstance(array.stype, str) and array.stype.startswith(_STYPE)


def decode(record: ArrayRecord, base: Mapping[str, NumpyArray]) -> dict[str, NumpyArray]:
    """Return the arrays of a reply: those that are compressed are updates of `base`."""
    made = {}
    for name, array in record.items():
        if not is_compressed(array):
            made[name] = np.asarray(array.numpy())
            continue
        if name not in base:
            raise ArgumentError(f"there is an update of {name!r}, which was not sent")
        kind, shape = array.stype.removeprefix(_STYPE), base[name].shape
        if kind not in KINDS:
            raise ArgumentError(f"the update of {name!r} is compressed in an unknown way: {kind!r}")
        if tuple(array.shape) != shape:
            raise ArgumentError(
                f"the update of {name!r} has the shape {list(array.shape)}, and {list(shape)} was "
                "sent"
            )
        made[name] = (base[name] + _unpack(kind, array.data, shape)).astype(base[name].dtype)
    return made


def _least(update: Mapping[str, NumpyArray], fraction: float) -> float:
    """Return the smallest magnitude that is among the largest of all tensors together."""
    sizes = np.concatenate([np.abs(a).reshape(-1) for a in update.values()])
    if not np.isfinite(sizes).all():
        raise NonFiniteError("the update has numbers that are not finite")
    kept = max(1, math.ceil(fraction * sizes.size))
    return float(np.partition(sizes, sizes.size - kept)[sizes.size - kept])


def _pack(kind: str, array: NumpyArray, least: float) -> bytes:
    if kind == "float16":
        largest = float(np.finfo(np.float16).max)
        return np.clip(array, -largest, largest).astype("<f2").tobytes()
    if kind == "int8":
        peak = float(np.abs(array).max(initial=0.0))
        if not math.isfinite(peak):
            raise NonFiniteError("the update has numbers that are not finite")
        scale = np.float32(peak / 127)
        steps = np.rint(array / scale) if scale > 0 else np.zeros_like(array)
        return struct.pack("<f", scale) + np.clip(steps, -127, 127).astype(np.int8).tobytes()
    flat = array.reshape(-1)
    chosen = np.flatnonzero((np.abs(flat) >= least) & (flat != 0))
    values = flat[chosen].astype("<f4").tobytes()
    marks = np.packbits(np.isin(np.arange(flat.size), chosen, assume_unique=True)).tobytes()
    if len(marks) < 4 * chosen.size:  # a bit for each number, or four bytes for each kept one
        return b"\1" + marks + values
    return b"\0" + chosen.astype("<u4").tobytes() + values


def _unpack(kind: str, data: bytes, shape: tuple[int, ...]) -> NumpyArray:
    size = math.prod(shape)
    wrong = ArgumentError(f"a compressed update of {size} numbers has {len(data)} bytes")
    if kind == "float16":
        if len(data) != 2 * size:
            raise wrong
        return np.frombuffer(data, "<f2").astype(np.float32).reshape(shape)
    if kind == "int8":
        if len(data) != 4 + size:
            raise wrong
        scale = np.float32(struct.unpack("<f", data[:4])[0])
        return (np.frombuffer(data, np.int8, offset=4) * scale).astype(np.float32).reshape(shape)
    flat = np.zeros(size, np.float32)
    if data[:1] == b"\1":
        length = (size + 7) // 8
        bits = np.frombuffer(data[1 : 1 + length], np.uint8)
        if len(bits) != length:
            raise wrong
        chosen, values = np.flatnonzero(np.unpackbits(bits, count=size)), data[1 + length :]
    else:
        kept = (len(data) - 1) // 8
        chosen, values = np.frombuffer(data[1 : 1 + 4 * kept], "<u4"), data[1 + 4 * kept :]
    if len(values) != 4 * len(chosen) or (len(chosen) and int(chosen.max()) >= size):
        raise wrong
    flat[chosen] = np.frombuffer(values, "<f4")
    return flat.reshape(shape)
