"""Compressed updates: a client sends the difference to the received weights in fewer bytes.

The client keeps what rounding or sparsification removed, and adds it to its next update (error
feedback). Two exceptions: float16 loses too little to matter, and a clipped update must stay
within its bound.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from onnxtrain.errors import ArgumentError, NonFiniteError
from onnxtrain.federated.arrays import read_array
from onnxtrain.format.checkpoint.content import Array as NumpyArray

_STYPE = "onnxtrain/"
KINDS = ("float16", "int8", "top-k")


@dataclass(frozen=True)
class Compression:
    """How updates are compressed: "float16", "int8", or "top-k" with the fraction to keep.

    As a string, in a run's configuration: `float16`, `int8`, `top-k:0.05`.
    """

    kind: str
    fraction: float = 0.05

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(
                f"compression is one of {', '.join(KINDS)}, not {self.kind!r}; top-k takes the "
                "fraction to keep: 'top-k:0.05'"
            )
        if not isinstance(self.fraction, int | float) or not 0 < self.fraction <= 1:
            raise ArgumentError(f"top-k keeps a fraction above 0, up to 1, not {self.fraction!r}")

    @classmethod
    def read(cls, given: str | Compression | None) -> Compression | None:
        """Return a compression from its string; None for none."""
        if isinstance(given, Compression):
            return given
        if given is None or given in ("", "none"):
            return None
        kind, colon, fraction = str(given).partition(":")
        if not colon:
            return cls(kind)
        if kind in KINDS and kind != "top-k":
            raise ArgumentError(f"compression {kind!r} takes no number, but is {given!r}")
        try:
            share = float(fraction)
        except ValueError:
            raise ArgumentError(f"the fraction of top-k is a number, not {fraction!r}") from None
        return cls(kind, share)

    @property
    def has_memory(self) -> bool:
        """Whether the client uses error feedback."""
        return self.kind != "float16"

    def encode(
        self,
        update: Mapping[str, NumpyArray],
        residual: Mapping[str, NumpyArray],
        *,
        bounded: bool = False,
    ) -> tuple[ArrayRecord, dict[str, NumpyArray]]:
        """Return a compressed update and, by name, what compression removed from it.

        A `bounded` update does not grow: values are rounded towards zero, without error feedback.
        """
        if bounded:
            wanted = {name: not_beyond(0.0, a, np.float32) for name, a in update.items()}
        else:
            wanted = {name: np.asarray(a, np.float32) for name, a in update.items()}
            for name, rest in residual.items():
                if name in wanted and wanted[name].shape == rest.shape:
                    wanted[name] = wanted[name] + rest
        least = _least(wanted, self.fraction) if self.kind == "top-k" else 0.0
        record, lost = ArrayRecord(), {}
        for name, array in wanted.items():
            data = _pack(self.kind, array, least, bounded)
            record[name] = Array("float32", tuple(array.shape), f"{_STYPE}{self.kind}", data)
            if self.has_memory and not bounded:
                lost[name] = array - _unpack(self.kind, data, array.shape)
        return record, lost


def clip(trained: dict[str, NumpyArray], received: Mapping[str, NumpyArray], most: float) -> None:
    """Scale the update of all parameters together so that its norm is at most `most`."""
    updates = {n: a.astype(np.float64) - received[n] for n, a in trained.items()
               if a.dtype.kind == "f"}  # fmt: skip
    norm = math.sqrt(sum(float(np.square(update).sum()) for update in updates.values()))
    if norm > most:
        factor = most * (1 - 1e-12) / norm  # the norm is a rounded number itself
        for name, update in updates.items():
            trained[name] = not_beyond(received[name], update * factor, trained[name].dtype)


def not_beyond(origin: NumpyArray | float, step: NumpyArray, dtype: Any) -> NumpyArray:
    """Return origin + step in a type, rounded so that no value is further from its origin."""
    near = np.asarray(origin + step).astype(dtype)
    beyond = np.abs(near.astype(np.float64) - origin) > np.abs(step)
    return np.where(beyond, np.nextafter(near, np.asarray(origin, near.dtype)), near)


def decode(record: ArrayRecord, base: Mapping[str, NumpyArray]) -> dict[str, NumpyArray]:
    """Return the arrays of a reply, with compressed updates added to `base`."""
    made = {}
    for name, array in record.items():
        if not str(array.stype).startswith(_STYPE):
            made[name] = read_array(name, array)
            continue
        if name not in base:
            raise ArgumentError(f"there is an update of {name!r}, which was not sent")
        kind, shape = array.stype.removeprefix(_STYPE), base[name].shape
        if kind not in KINDS:
            raise ArgumentError(f"the update of {name!r} is compressed in an unknown way: {kind!r}")
        if tuple(array.shape) != shape:
            shapes = f"{list(array.shape)} instead of {list(shape)}"
            raise ArgumentError(f"the update of {name!r} has the shape {shapes}")
        with np.errstate(all="ignore"):  # the caller looks for values that are not finite
            made[name] = (base[name] + _unpack(kind, array.data, shape)).astype(base[name].dtype)
    return made


def _least(update: Mapping[str, NumpyArray], fraction: float) -> float:
    """Return the smallest magnitude to keep, over all tensors together."""
    sizes = np.concatenate([np.abs(a).reshape(-1) for a in update.values()])
    kept = max(1, math.ceil(fraction * sizes.size))
    return float(np.partition(sizes, sizes.size - kept)[sizes.size - kept])


def _pack(kind: str, array: NumpyArray, least: float, bounded: bool) -> bytes:
    peak = float(np.abs(array).max(initial=0.0))
    if not math.isfinite(peak):
        raise NonFiniteError("the update has values that are not finite")
    if kind == "float16":  # the exponent of a common scale in a byte, then values up to 1
        exponent = min(max(math.frexp(peak)[1], -127), 127)
        scaled = np.ldexp(array, -exponent)
        halves = not_beyond(0.0, scaled, np.float16) if bounded else scaled.astype(np.float16)
        return struct.pack("<b", exponent) + halves.astype("<f2").tobytes()
    if kind == "int8":
        return _pack_int8(array, peak, bounded)
    flat = array.reshape(-1)
    chosen = np.flatnonzero((np.abs(flat) >= least) & (flat != 0))
    values = flat[chosen].astype("<f4").tobytes()
    marks = np.packbits(np.isin(np.arange(flat.size), chosen, assume_unique=True)).tobytes()
    if len(marks) < 4 * chosen.size:  # a bit for each element, or four bytes for each kept one
        return b"\1" + marks + values
    return b"\0" + chosen.astype("<u4").tobytes() + values


def _pack_int8(array: NumpyArray, peak: float, bounded: bool) -> bytes:
    """Return the scale, then int8 values."""
    scale = np.float32(peak / 127)
    if bounded:
        scale = np.float32(not_beyond(0.0, np.asarray(peak / 127), np.float32))
    if scale == 0:
        steps = np.zeros_like(array)
    elif bounded:
        steps = np.trunc(array.astype(np.float64) / float(scale))
    else:
        steps = np.rint(array / scale)
    return struct.pack("<f", scale) + np.clip(steps, -127, 127).astype(np.int8).tobytes()


def _unpack(kind: str, data: bytes, shape: tuple[int, ...]) -> NumpyArray:
    size = math.prod(shape)
    wrong = ArgumentError(f"a compressed update of {size} elements has {len(data)} bytes")
    if kind == "float16":
        if len(data) not in (2 * size, 2 * size + 1):
            raise wrong
        # Earlier versions wrote no exponent in front of the values.
        exponent = struct.unpack("<b", data[:1])[0] if len(data) > 2 * size else 0
        halves = np.frombuffer(data[len(data) - 2 * size :], "<f2").astype(np.float32)
        return np.ldexp(halves, exponent).reshape(shape)
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
