"""Tensors that graphs read and write: each keeps its place in memory while training lasts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import ArgumentError
from onnxtrain.format.checkpoint.content import Array

_ALIGNMENT = 64  # bytes; a cache line, and the widest vector registers


class Device(NamedTuple):
    """Where tensors are kept: the kind of a device, and its number."""

    kind: str = "cpu"
    number: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether tensors are in the memory of the process, where numpy can read them."""
        return self.kind == "cpu"


CPU = Device()


class Variable:
    """A tensor whose memory graphs are bound to.

    On the CPU, `array` is that memory: it shows the present values, and training continues from
    what is written into it. On another device it is a copy.
    """

    def __init__(self, initial: Array, device: Device = CPU) -> None:
        self.device = device
        if device.is_cpu:
            self._array = _aligned(initial.shape, initial.dtype)
            np.copyto(self._array, initial)
            self.value: Any = ort.OrtValue.ortvalue_from_numpy(self._array)
        else:
            contiguous = np.ascontiguousarray(initial).reshape(initial.shape)
            self.value = ort.OrtValue.ortvalue_from_numpy(contiguous, device.kind, device.number)
        self.shape: tuple[int, ...] = tuple(initial.shape)
        self.dtype: np.dtype[Any] = initial.dtype

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device = CPU) -> Variable:
        """Make one that is all zero; on the CPU, its memory is not touched before it is used."""
        if not device.is_cpu:
            return cls(np.zeros(shape, dtype), device)
        made = cls.__new__(cls)
        made.device, made.shape, made.dtype = device, shape, dtype
        made._array = _aligned(shape, dtype)
        made.value = ort.OrtValue.ortvalue_from_numpy(made._array)
        return made

    @property
    def array(self) -> Array:
        """The elements: the memory itself on the CPU, a copy from elsewhere."""
        return self._array if self.device.is_cpu else np.asarray(self.value.numpy())

    def in_shape(self, shape: tuple[int, ...]) -> Any:
        """Return the same memory as an OrtValue of another shape; None where that cannot be."""
        if shape == self.shape:
            return self.value
        if not self.device.is_cpu or math.prod(shape) != math.prod(self.shape):
            return None
        return ort.OrtValue.ortvalue_from_numpy(self._array.reshape(shape))

    def assign(self, array: Array) -> None:
        """Replace the elements; shape and type have to be the same."""
        if self.device.is_cpu:
            np.copyto(self._array, array)
        else:
            self.value.update_inplace(np.ascontiguousarray(array).reshape(self.shape))


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that begin at a multiple of the alignment."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    array: Array = raw[start : start + size].view(dtype).reshape(shape)
    return array


def providers_of(device: str | Sequence[Any]) -> tuple[list[Any], Device]:
    """Return onnxruntime's providers for a device, and where its tensors are kept.

    `device` is "cpu", "cuda", "cuda:1", or a list of providers as onnxruntime takes it.
    """
    if isinstance(device, list | tuple) and device:
        pairs = [(given, {}) if isinstance(given, str) else given for given in device]
        _require([name for name, *_ in pairs])
        if pairs[0][0] != "CUDAExecutionProvider":
            return list(device), CPU
        return list(device), Device("cuda", int(pairs[0][1].get("device_id", 0)))
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    valid = kind in ("cpu", "cuda") and (not index or index.isdecimal())
    if not valid or (kind == "cpu" and int(index or 0) > 0):
        raise ArgumentError(
            f"device is 'cpu', 'cuda', 'cuda:<number>' or a list of providers, not {device!r}"
        )
    if kind == "cpu":
        return ["CPUExecutionProvider"], CPU
    cuda = Device("cuda", int(index or 0))
    _require(["CUDAExecutionProvider"])
    return [("CUDAExecutionProvider", {"device_id": cuda.number}), "CPUExecutionProvider"], cuda


def _require(wanted: list[str]) -> None:
    available = ort.get_available_providers()
    for provider in wanted:
        if provider not in available:
            raise ArgumentError(
                f"this onnxruntime has no {provider}; it has {', '.join(available)}"
            )
