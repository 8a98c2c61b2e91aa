"""Memory that stays bound to graphs: nothing is copied between runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from onnxtrain.device.run.cuda_graph import SETTING, RecordedRun
from onnxtrain.device.run.graph import Graph
from onnxtrain.errors import ArgumentError, RunError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.element_types import ELEMENT_TYPES, STRING
from onnxtrain.format.model.file import ValueType

_ALIGNMENT = 64  # bytes; a cache line, and the widest vector registers
_SMALL = 4096  # bytes


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

    def __init__(self, initial: Array, device: Device = CPU, *, take: bool = False) -> None:
        """Copy the initial values; with `take`, use their memory if graphs can be bound to it."""
        self.device = device
        if device.is_cpu:
            if take and initial.ctypes.data % _ALIGNMENT == 0 and initial.flags.c_contiguous:
                self._array = initial
                self._array.flags.writeable = True
            else:
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
        return cls.many_zeros([(shape, dtype)], device)[0]

    @classmethod
    def many_zeros(
        cls, kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], device: Device = CPU
    ) -> list[Variable]:
        """Make several that are all zero, by shape and type.

        They share one piece of memory, as the system hands out zeros for a large piece only when
        they are used; small pieces are filled with zeros at once.
        """
        if not device.is_cpu:
            return [cls(np.zeros(shape, dtype), device) for shape, dtype in kinds]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        memory = _aligned((ends[-1] if ends else 0,), np.dtype(np.uint8))
        made = []
        for (shape, dtype), size, start in zip(kinds, sizes, [0, *ends], strict=False):
            one = cls.__new__(cls)
            one.device, one.shape, one.dtype = device, shape, dtype
            one._array = memory[start : start + size].view(dtype).reshape(shape)
            one.value = ort.OrtValue.ortvalue_from_numpy(one._array)
            made.append(one)
        return made

    @property
    def array(self) -> Array:
        """The elements: the memory itself on the CPU, a copy from elsewhere."""
        return self._array if self.device.is_cpu else np.asarray(self.value.numpy())

    def bind_as_output(self, binding: Any, name: str, shape: tuple[int, ...]) -> bool:
        """Let an output be written into this memory; False where its shape does not fit."""
        if shape == self.shape:
            binding.bind_ortvalue_output(name, self.value)
        elif math.prod(shape) != math.prod(self.shape):
            return False
        elif self.device.is_cpu:
            reshaped = ort.OrtValue.ortvalue_from_numpy(self._array.reshape(shape))
            binding.bind_ortvalue_output(name, reshaped)
        else:
            kind, number = self.device
            address = self.value.data_ptr()
            binding.bind_output(name, kind, number, self.dtype, list(shape), address)
        return True

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

    `device` is "cpu", "cuda", "cuda:1", or a list of providers as onnxruntime takes it. "cuda"
    multiplies in float32; a list can say otherwise.
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
    # Without it, products are rounded to 10 bits (TF32): training went other ways than on the CPU.
    settings = {"device_id": cuda.number, "use_tf32": 0, SETTING: 1}
    return [("CUDAExecutionProvider", settings), "CPUExecutionProvider"], cuda


def _require(wanted: list[str]) -> None:
    available = ort.get_available_providers()
    for provider in wanted:
        if provider not in available:
            raise ArgumentError(
                f"this onnxruntime has no {provider}; it has {', '.join(available)}"
            )


class Binding:
    """A graph with everything bound to it that stays the same from run to run.

    It reads the variables in `state` and writes those in `results`, by the names of inputs and
    outputs; `inputs` and `outputs` are those that each run takes and returns. `check` are the
    outputs with which a graph tells whether a run has changed anything: `passed` is false where it
    was not finite, and `sums` says why.
    """

    def __init__(
        self,
        graph: Graph,
        state: Mapping[str, Variable],
        results: Mapping[str, Variable],
        inputs: Sequence[ValueType],
        outputs: Sequence[ValueType],
        check: Sequence[ValueType] = (),
    ) -> None:
        self.passed = True
        self.sums: Array | None = None
        self._checks = len(check)
        self._graph = graph
        self._state, self._results = dict(state), dict(results)
        self._inputs = list(inputs)
        self._outputs = [_Output(value) for value in outputs]
        self._outputs += [_Output(value, is_check=True) for value in check]
        self._has_symbols = any(
            isinstance(d, str) for value in (*outputs, *check) for d in value.dims or ()
        )
        self._has_strings = any(value.element_type == STRING for value in (*self._inputs, *outputs))
        self._session: Any = None
        self._binding: Any = None
        self._copied: dict[str, Variable] = {}  # what is not written in place
        self._fed: dict[str, Variable] = {}  # what is bound anew before each run
        self._recorded: RecordedRun | None = None

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run the graph; return an array, or an OrtValue, for each output that is asked for."""
        if self._has_strings:
            return self._run_copied(values)
        if not self._graph.is_current or self._session is not self._graph.session:
            self._bind()
        if self._recorded is not None:
            return self._run_recorded(self._recorded, values)
        binding = self._binding
        for name, variable in self._fed.items():
            binding.bind_ortvalue_input(name, variable.value)
        for declared, value in zip(self._inputs, values, strict=True):
            binding.bind_ortvalue_input(declared.name, value)
        symbols = self._symbols(values) if self._has_symbols else {}
        are_ours = [output.bind(binding, symbols) for output in self._outputs]
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            self._session = None
            raise self._failed(error) from None
        if all(are_ours):
            made = [output.take() for output in self._outputs]
        else:
            # Take what onnxruntime has allocated, and learn whether that was as declared.
            made = binding.get_outputs()[len(self._results) :]
            for index, (output, value) in enumerate(zip(self._outputs, made, strict=True)):
                if are_ours[index]:
                    made[index] = output.take()
                else:
                    output.learn(tuple(value.shape()), symbols)
        made = self._without_check(made)
        if self._copied:
            self._copy_results()
        return made

    def _without_check(self, made: list[Any]) -> list[Any]:
        """Keep what the graph says about the run, and return the other outputs."""
        if not self._checks:
            return made
        count = len(made) - self._checks
        flag, *sums = map(as_array, made[count:])
        self.passed = all(flag.ravel().tolist())  # a seventh of the time of numpy's all
        self.sums = sums[0] if sums else None
        return made[:count]

    def _run_recorded(self, recorded: RecordedRun, values: Sequence[Any]) -> list[Any]:
        try:
            return self._without_check(recorded.run(values))
        except RunError:
            raise
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            self._session = None
            raise self._failed(error) from None

    def _run_copied(self, values: Sequence[Any]) -> list[Any]:
        """Run a graph with strings, which onnxruntime does not bind."""
        feeds = {name: variable.array for name, variable in self._state.items()}
        feeds |= {v.name: value.numpy() for v, value in zip(self._inputs, values, strict=True)}
        names = [*self._results, *(output.name for output in self._outputs)]
        try:
            made = self._graph.session.run(names, feeds)
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            raise self._failed(error) from None
        outputs = self._without_check(list(made[len(self._results) :]))
        for variable, array in zip(self._results.values(), made, strict=False):
            if self.passed:
                variable.assign(array.reshape(variable.shape))
        return outputs

    def _failed(self, error: Exception) -> RunError:
        message = f"onnxruntime failed to run {self._graph.name}: {error}"
        if self._results and not self._has_strings:
            message += (
                ". What the graph had written by then stays written: continue from a checkpoint, "
                "unless the error is one of the inputs"
            )
        return RunError(message)

    def _bind(self) -> None:
        self._session = self._binding = self._recorded = None  # free the old memory first
        self._session = self._graph.session
        if self._graph.records:
            results = {name: (v, self._shape_of(name, v)) for name, v in self._results.items()}
            values = [self._graph.fixed(v) for v in self._inputs]
            outputs = [self._graph.fixed(output.declared) for output in self._outputs]
            self._recorded = RecordedRun(self._session, self._state, results, values, outputs)
            return
        self._binding = self._session.io_binding()
        for output in self._outputs:
            output.forget()
        for name, variable in self._state.items():
            self._binding.bind_ortvalue_input(name, variable.value)
        self._fed = _copied_when_bound(self._session, self._state)
        self._copied = {}
        # Other graphs do not see to it that nobody reads a parameter when its update is written.
        in_place = self._graph.model.metadata.target != "webgpu"
        for name, variable in self._results.items():
            shape = self._shape_of(name, variable)
            if not (in_place and variable.bind_as_output(self._binding, name, shape)):
                self._copied[name] = variable
                self._binding.bind_output(name)

    def _shape_of(self, name: str, variable: Variable) -> tuple[int, ...]:
        """Return the shape in which the graph writes a variable.

        A large tensor is updated as a list of pieces of it, or as a row: the graph declares it.
        """
        dims = self._graph.model.output_dims(name)
        sizes = tuple(dim for dim in dims or () if isinstance(dim, int))
        return sizes if dims is not None and len(sizes) == len(dims) else variable.shape

    def _copy_results(self) -> None:
        """Take over what could not be written in place: pieces, on another device than the CPU."""
        made = dict(zip(self._results, self._binding.get_outputs(), strict=False))
        for name, variable in self._copied.items():
            if self.passed:
                variable.assign(made[name].numpy().reshape(variable.shape))
            self._binding.bind_output(name)

    def _symbols(self, values: Sequence[Any]) -> dict[str, int]:
        """What the symbolic dimensions are in this run."""
        return {
            dim: size
            for declared, value in zip(self._inputs, values, strict=True)
            for dim, size in zip(declared.dims or (), value.shape(), strict=False)
            if isinstance(dim, str)
        }


def _copied_when_bound(session: Any, state: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return what a session does not read where it is.

    onnxruntime copies an input when it is bound, if the nodes that read it compute elsewhere. Such
    an input is bound anew before each run: otherwise the session would not see what has changed
    since, such as the learning rate, or a parameter on the GPU that a node on the CPU reads.
    """
    if set(session.get_providers()) == {"CPUExecutionProvider"}:
        return {}
    if not hasattr(session, "get_input_memory_infos"):  # onnxruntime before 1.23
        return dict(state)
    places = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    kinds = {declared.name: place.name.lower() for declared, place in places}
    return {n: v for n, v in state.items() if kinds.get(n) != v.device.kind or v.device.is_cpu}


class _Output:
    """An output that each run returns.

    Asking onnxruntime for its outputs takes time for every parameter. So once an output has had
    the shape that the graph declares, memory of that shape is bound to it before the run. That of
    the check, and of small outputs such as the loss, stays bound: to copy a few numbers takes less
    time than to bind other memory.
    """

    def __init__(self, value: ValueType, is_check: bool = False) -> None:
        self._memory: Array | None = None  # what is bound already
        self._is_check = is_check
        element = ELEMENT_TYPES.get(value.element_type)
        self.declared = value
        self.name = value.name
        self._dims = value.dims
        self._dtype = None if element is None else element.dtype
        self._declared_right = value.dims == ()
        # Most outputs, such as the loss, have the same shape in each run.
        self._fixed = self._shape({})

    def _shape(self, symbols: Mapping[str, int]) -> tuple[int, ...] | None:
        sizes = [symbols.get(d, -1) if isinstance(d, str) else d for d in self._dims or ()]
        if self._dims is None or any(size is None or size < 0 for size in sizes):
            return None
        return tuple(size for size in sizes if size is not None)

    def bind(self, binding: Any, symbols: Mapping[str, int]) -> bool:
        """Bind memory for the next run; return whether it is ours."""
        shape = None
        if self._declared_right:
            shape = self._shape(symbols) if self._fixed is None else self._fixed
        if shape is None or self._dtype is None:
            self._memory = None
            binding.bind_output(self.name)
            return False
        if self._memory is None or self._memory.shape != shape:
            self._memory = np.empty(shape, self._dtype)
            value = ort.OrtValue.ortvalue_from_numpy(self._memory)
            binding.bind_ortvalue_output(self.name, value)
        return True

    def take(self) -> Array:
        """Return what the run has written; the next run writes over that of a check only."""
        memory = self._memory
        assert memory is not None
        if self._is_check:
            return memory
        if memory.nbytes <= _SMALL:
            return memory.copy()
        self._memory = None
        return memory

    def forget(self) -> None:
        """Take other memory in the next run, which has another binding."""
        self._memory = None

    def learn(self, shape: tuple[int, ...], symbols: Mapping[str, int]) -> None:
        """Remember whether the declared shape is the one that the output has had."""
        self._declared_right = self._shape(symbols) == shape


def as_array(value: Any) -> Array:
    """Return what a run gave as an array of its own."""
    return value if isinstance(value, np.ndarray) else np.array(value.numpy())


def as_ortvalue(value: Any) -> Any:
    """Return what a run gave as a value that owns its memory.

    One made of an array borrows it: `.numpy()` of such a value is left without it.
    """
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind not in "fiub":
        return ort.OrtValue.ortvalue_from_numpy(value)  # texts are copied
    owner = ort.OrtValue.ortvalue_from_shape_and_type(list(value.shape), value.dtype.type)
    if value.size:
        owner.update_inplace(np.ascontiguousarray(value))
    return owner
