"""Upstream's table of training functions, called with ctypes on the wheel's own libonnxruntime."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from plain_tensors import CODES, PlainTensor, plain_tensors

Array = np.ndarray[Any, Any]

ENTRIES = (
    "LoadCheckpoint SaveCheckpoint CreateTrainingSession CreateTrainingSessionFromBuffer "
    "TrainingSessionGetTrainingModelOutputCount TrainingSessionGetEvalModelOutputCount "
    "TrainingSessionGetTrainingModelOutputName TrainingSessionGetEvalModelOutputName LazyResetGrad "
    "TrainStep EvalStep SetLearningRate GetLearningRate OptimizerStep RegisterLinearLRScheduler "
    "SchedulerStep GetParametersSize CopyParametersToBuffer CopyBufferToParameters "
    "ReleaseTrainingSession ReleaseCheckpointState ExportModelForInferencing SetSeed "
    "TrainingSessionGetTrainingModelInputCount TrainingSessionGetEvalModelInputCount "
    "TrainingSessionGetTrainingModelInputName TrainingSessionGetEvalModelInputName AddProperty "
    "GetProperty LoadCheckpointFromBuffer GetParameterTypeAndShape UpdateParameter GetParameter"
).split()
TYPES = {code: dtype for dtype, code in CODES.items()}


class OrtError(Exception):
    """A status of onnxruntime's: its code and its sentence."""


def library_of_the_wheel() -> Path:
    return next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*"))


class _Base(ctypes.Structure):
    _fields_ = (("GetApi", ctypes.CFUNCTYPE(c_void_p, ctypes.c_uint32)), ("GetVersion", c_void_p))


class Host:
    """A program with onnxruntime and libonnxtrain."""

    def __init__(self, library: Path, runtime: Path | None = None) -> None:
        loaded = ctypes.CDLL(str(runtime or library_of_the_wheel()))
        loaded.OrtGetApiBase.restype = POINTER(_Base)
        self.api = loaded.OrtGetApiBase().contents.GetApi(19)
        self._entries = ctypes.cast(self.api, POINTER(c_void_p))
        self.own = ctypes.CDLL(str(library))
        self.own.onnxtrain_training_api.restype = c_void_p
        self.own.onnxtrain_training_api.argtypes = [c_void_p]
        table = self.own.onnxtrain_training_api(self.api)
        self._table = ctypes.cast(table, POINTER(c_void_p))
        self.env = c_void_p()
        self.call(3, c_int(3), c_char_p(b"test"), byref(self.env))

    def check(self, status: int | None) -> None:
        if status is None:
            return
        message = ctypes.CFUNCTYPE(c_char_p, c_void_p)(self._entries[2])(status)
        code = ctypes.CFUNCTYPE(c_int, c_void_p)(self._entries[1])(status)
        text = message.decode()
        ctypes.CFUNCTYPE(None, c_void_p)(self._entries[93])(status)
        raise OrtError(code, text)

    def call(self, index: int, *given: Any) -> None:
        """Call an entry of onnxruntime's table."""
        kinds = [c_void_p if isinstance(g, _REFERENCE) else type(g) for g in given]
        self.check(ctypes.CFUNCTYPE(c_void_p, *kinds)(self._entries[index])(*map(_passed, given)))

    def train(self, name: str, *given: Any) -> None:
        """Call a function of the table for training."""
        address = self._table[ENTRIES.index(name)]
        kinds = [c_void_p if isinstance(g, _REFERENCE) else type(g) for g in given]
        if name.startswith("Release"):
            ctypes.CFUNCTYPE(None, *kinds)(address)(*map(_passed, given))
        else:
            self.check(ctypes.CFUNCTYPE(c_void_p, *kinds)(address)(*map(_passed, given)))

    def function(self, name: str, *given: Any) -> None:
        """Call a function of our own."""
        kinds = [c_void_p if isinstance(g, _REFERENCE) else type(g) for g in given]
        address = ctypes.cast(getattr(self.own, name), c_void_p).value
        self.check(ctypes.CFUNCTYPE(c_void_p, *kinds)(address)(*map(_passed, given)))

    @cached_property
    def allocator(self) -> c_void_p:
        found = c_void_p()
        self.call(78, byref(found))
        return found

    @cached_property
    def _memory(self) -> c_void_p:
        found = c_void_p()
        self.call(69, c_int(1), c_int(0), byref(found))
        return found

    def value(self, array: Array) -> c_void_p:
        """A tensor over the memory of an array."""
        made, dims = c_void_p(), (c_int64 * array.ndim)(*array.shape)
        self.call(
            49, self._memory, c_void_p(array.ctypes.data), c_size_t(array.nbytes), byref(dims),
            c_size_t(array.ndim), c_int(CODES[array.dtype]), byref(made),
        )  # fmt: skip
        return made

    def array(self, value: c_void_p) -> Array:
        """A copy of the elements of a tensor, which is released."""
        info, code, rank, data = c_void_p(), c_int(), c_size_t(), c_void_p()
        self.call(65, value, byref(info))
        self.call(60, info, byref(code))
        self.call(61, info, byref(rank))
        dims = (c_int64 * rank.value)()
        self.call(62, info, byref(dims), rank)
        self.release(99, info)
        self.call(51, value, byref(data))
        shape, dtype = tuple(dims), TYPES[code.value]
        count = int(np.prod(shape))
        found = np.frombuffer(ctypes.string_at(data.value or 0, count * dtype.itemsize), dtype)
        self.release(96, value)
        return found.reshape(shape).copy()

    def release(self, index: int, thing: c_void_p) -> None:
        ctypes.CFUNCTYPE(None, c_void_p)(self._entries[index])(thing)

    def options(self) -> c_void_p:
        made = c_void_p()
        self.call(10, byref(made))
        return made

    def take_text(self, text: c_void_p) -> str:
        found = ctypes.string_at(text.value or 0).decode()
        self.call(76, self.allocator, text)
        return found


_REFERENCE = (type(byref(c_int())), type(None))


def _passed(given: Any) -> Any:
    return ctypes.cast(given, c_void_p) if isinstance(given, _REFERENCE[0]) else given


class State:
    """A checkpoint state of the table."""

    def __init__(self, host: Host, source: Path | bytes | c_void_p) -> None:
        self.host = host
        self.pointer = c_void_p()
        if isinstance(source, bytes):
            size = c_size_t(len(source))
            host.train("LoadCheckpointFromBuffer", c_char_p(source), size, byref(self.pointer))
        elif isinstance(source, c_void_p):
            self.pointer = source
        else:
            host.train("LoadCheckpoint", c_char_p(str(source).encode()), byref(self.pointer))

    def save(self, path: Path, with_optimizer: bool = False) -> None:
        self.host.train(
            "SaveCheckpoint", self.pointer, c_char_p(str(path).encode()), c_bool(with_optimizer)
        )

    def add_property(self, name: str, value: int | float | str) -> None:
        if isinstance(value, str):
            kind, given = 2, ctypes.cast(c_char_p(value.encode()), c_void_p)
        else:
            held = c_int64(value) if isinstance(value, int) else c_float(value)
            kind, given = int(isinstance(value, float)), ctypes.cast(byref(held), c_void_p)
        self.host.train("AddProperty", self.pointer, c_char_p(name.encode()), c_int(kind), given)

    def get_property(self, name: str) -> int | float | str:
        kind, value = c_int(), c_void_p()
        self.host.train(
            "GetProperty", self.pointer, c_char_p(name.encode()), self.host.allocator, byref(kind),
            byref(value),
        )  # fmt: skip
        if kind.value == 2:
            return self.host.take_text(value)
        pointer = ctypes.cast(value, POINTER(c_float if kind.value else c_int64))
        found: int | float = pointer.contents.value
        self.host.call(76, self.host.allocator, value)
        return found

    def get_parameter(self, name: str) -> Array:
        value = c_void_p()
        self.host.train(
            "GetParameter", self.pointer, c_char_p(name.encode()), self.host.allocator, byref(value)
        )
        return self.host.array(value)

    def update_parameter(self, name: str, array: Array) -> None:
        value = self.host.value(array)
        try:
            self.host.train("UpdateParameter", self.pointer, c_char_p(name.encode()), value)
        finally:
            self.host.release(96, value)

    def close(self) -> None:
        self.host.train("ReleaseCheckpointState", self.pointer)


class Session:
    """A training session of the table, of a folder of artifacts."""

    def __init__(
        self, host: Host, folder: Path, checkpoint: Path | None = None, fused: bool = True
    ):
        self.host = host
        self.pointer = c_void_p()
        if fused:
            state = c_void_p()
            given = None if checkpoint is None else str(checkpoint).encode()
            host.function(
                "onnxtrain_open", c_char_p(str(folder).encode()), c_char_p(given), c_void_p(),
                byref(self.pointer),
            )  # fmt: skip
            host.function("onnxtrain_state", self.pointer, byref(state))
            self.state = State(host, state)
            return
        self.state = State(host, folder / "checkpoint" if checkpoint is None else checkpoint)
        options = host.options()
        graphs = ("training_model", "eval_model", "optimizer_model")
        paths = [c_char_p(str(folder / f"{graph}.onnx").encode()) for graph in graphs]
        host.train(
            "CreateTrainingSession", host.env, options, self.state.pointer, *paths,
            byref(self.pointer),
        )  # fmt: skip
        host.release(100, options)

    def _run(self, call: Any, arrays: Sequence[Array], outputs: int) -> list[Array]:
        values = [self.host.value(array) for array in arrays]
        fed = (c_void_p * len(values))(*values)
        made = (c_void_p * outputs)()
        try:
            call(
                self.pointer, c_void_p(), c_size_t(len(values)), byref(fed), c_size_t(outputs),
                byref(made),
            )  # fmt: skip
        finally:
            for value in values:
                self.host.release(96, value)
        return [self.host.array(c_void_p(value)) for value in made]

    def train_step(self, *arrays: Array) -> Array:
        call = lambda *given: self.host.train("TrainStep", *given)  # noqa: E731
        return self._run(call, arrays, 1)[0]

    def eval_step(self, *arrays: Array) -> Array:
        call = lambda *given: self.host.train("EvalStep", *given)  # noqa: E731
        return self._run(call, arrays, 1)[0]

    def step(self, *arrays: Array) -> Array:
        fed = plain_tensors(*arrays)
        made = (PlainTensor * 1)()
        self.host.function(
            "onnxtrain_step", self.pointer, byref(fed), c_size_t(len(arrays)), byref(made),
            c_size_t(1),
        )  # fmt: skip
        return self.host.array(c_void_p(made[0].value))

    def optimizer_step(self) -> None:
        self.host.train("OptimizerStep", self.pointer, c_void_p())

    def lazy_reset_grad(self) -> None:
        self.host.train("LazyResetGrad", self.pointer)

    def set_learning_rate(self, rate: float) -> None:
        self.host.train("SetLearningRate", self.pointer, c_float(rate))

    def get_learning_rate(self) -> float:
        rate = c_float()
        self.host.train("GetLearningRate", self.pointer, byref(rate))
        return rate.value

    def register_linear_lr_scheduler(self, warmup: int, total: int, rate: float) -> None:
        given = c_int64(warmup), c_int64(total), c_float(rate)
        self.host.train("RegisterLinearLRScheduler", self.pointer, *given)

    def scheduler_step(self) -> None:
        self.host.train("SchedulerStep", self.pointer)

    def names(self, what: str) -> list[str]:
        """`what` is TrainingModelInput, EvalModelOutput and so on."""
        count = c_size_t()
        self.host.train(f"TrainingSessionGet{what}Count", self.pointer, byref(count))
        found = []
        for index in range(count.value):
            text = c_void_p()
            call = f"TrainingSessionGet{what}Name"
            self.host.train(call, self.pointer, c_size_t(index), self.host.allocator, byref(text))
            found.append(self.host.take_text(text))
        return found

    def parameters_size(self, trainable_only: bool) -> int:
        size = c_size_t()
        self.host.train("GetParametersSize", self.pointer, byref(size), c_bool(trainable_only))
        return size.value

    def to_buffer(self, trainable_only: bool) -> Array:
        made = np.empty(self.parameters_size(trainable_only), np.float32)
        value = self.host.value(made)
        self.host.train("CopyParametersToBuffer", self.pointer, value, c_bool(trainable_only))
        self.host.release(96, value)
        return made

    def from_buffer(self, array: Array, trainable_only: bool) -> None:
        value = self.host.value(array)
        try:
            self.host.train("CopyBufferToParameters", self.pointer, value, c_bool(trainable_only))
        finally:
            self.host.release(96, value)

    def export(self, path: Path, names: Sequence[str]) -> None:
        texts = (c_char_p * len(names))(*(name.encode() for name in names))
        target = c_char_p(str(path).encode())
        self.host.train(
            "ExportModelForInferencing", self.pointer, target, c_size_t(len(names)), byref(texts)
        )

    def close(self) -> None:
        self.host.train("ReleaseTrainingSession", self.pointer)
        self.state.close()
