"""A graph of the artifacts, and the onnxruntime session that runs it.

The session is made when the graph runs for the first time: a program that takes fused steps never
pays for the graphs that it does not use. Between runs nothing is copied: what training changes is
bound once, as input and, in place, as output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain.api.checkpoint_content import (
    ELEMENT_TYPES,
    STRING,
    Array,
    RawTensor,
    Tensor,
    tensor_bytes,
)
from onnxtrain.api.model_file import ModelFile, ValueType
from onnxtrain.api.rewrite import stored_data, with_initializers
from onnxtrain.api.variables import Place, Variable
from onnxtrain.errors import ArgumentError, ModelError, RunError

Options = Any  # ort.SessionOptions, or a function that makes one
# A larger file is given to onnxruntime by its path, which spares a copy.
_LARGE = 1 << 26


@dataclass
class Settings:
    """How sessions are made.

    `options` is the user's own SessionOptions, a function that makes one, or None. `batch` fixes
    the symbolic dimension that all inputs begin with.
    """

    providers: Sequence[Any]
    place: Place
    options: Options = None
    batch: int | None = None

    def new_options(self) -> tuple[Any, bool]:
        """Return the options for a session, and whether they are this session's own."""
        if self.options is None:
            return default_options(), True
        if callable(self.options):
            return self.options(), True
        if not isinstance(self.options, ort.SessionOptions):
            raise ArgumentError(
                "session_options is an onnxruntime.SessionOptions, or a function that makes one, "
                f"not {type(self.options).__name__}"
            )
        return self.options, False


def default_options() -> Any:
    """Options for training: nodes run in the order of the file, memory is used again at once.

    In its own order, onnxruntime computes all gradients of activations before those of weights
    and keeps everything for them: twice the memory.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    return options


@dataclass
class Frozen:
    """The values that graphs take for constants; `version` counts how often they changed."""

    values: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0


class Graph:
    """One graph file of the artifacts."""

    def __init__(self, model: ModelFile, settings: Settings, frozen: Frozen) -> None:
        self.model = model
        self.settings = settings
        self._frozen = frozen
        self._session: Any = None
        self._version = -1
        self._batch: int | None = None
        if model.is_ort:
            self._take_interface()

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.model.source_name

    def _take_interface(self) -> None:
        """Ask the session for what a file in the ORT format does not tell us."""
        session = self.session
        self.model.inputs = tuple(_value_type(v) for v in session.get_inputs())
        self.model.outputs = tuple(_value_type(v) for v in session.get_outputs())

    @property
    def is_current(self) -> bool:
        """Whether the session is there and was made for what holds now."""
        return (
            self._session is not None
            and self._version == self._frozen.version
            and self._batch == self.settings.batch
        )

    @property
    def session(self) -> Any:
        """The session, made anew where a constant has changed."""
        if not self.is_current:
            self._session = None  # free the memory of the old one first
            self._session = self._make_session()
            self._version, self._batch = self._frozen.version, self.settings.batch
        return self._session

    def _make_session(self) -> Any:
        options, own = self.settings.new_options()
        if self.settings.batch is not None:
            _fix_batch(options, self.model.inputs, self.settings.batch)
        inline = self._inline_changes()
        external = {name: self._value(name) for name in self.model.external}
        if external and own:
            names = list(external)
            options.add_external_initializers(names, [_ortvalue(external[n], n) for n in names])
        elif external:
            # The user's options serve several graphs, and each would have to have all of these.
            inline.update(external)
        try:
            return ort.InferenceSession(
                self._source(inline), options, providers=list(self.settings.providers)
            )
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            raise ModelError(f"onnxruntime does not load {self.name}: {error}") from None

    def _inline_changes(self) -> dict[str, Tensor]:
        """The small constants that are in the file itself, with a value that no longer holds."""
        shared = self._frozen.values.keys() & set(self.model.initializer_names)
        return {
            name: self._frozen.values[name]
            for name, data in stored_data(self.model, shared).items()
            if not _same(self._frozen.values[name], data)
        }

    def _value(self, name: str) -> Tensor:
        try:
            return self._frozen.values[name]
        except KeyError:
            raise ModelError(
                f"{self.name} takes the frozen parameter {name!r} from the checkpoint, which does "
                "not have it: they do not belong together"
            ) from None

    def _source(self, changes: Mapping[str, Tensor]) -> str | bytes:
        if changes:
            return with_initializers(self.model, changes)
        if self.model.path is not None and len(self.model.data) > _LARGE:
            return str(self.model.path)
        return bytes(self.model.data)


class Binding:
    """A graph with everything bound to it that stays the same from run to run.

    Args:
        graph: the graph to run.
        state: what it reads that is kept in memory, by the name of the input.
        results: what it writes in place, by the name of the output.
        inputs: what is given with each run.
        outputs: what each run gives back.

    """

    def __init__(
        self,
        graph: Graph,
        state: Mapping[str, Variable],
        results: Mapping[str, Variable],
        inputs: Sequence[ValueType],
        outputs: Sequence[ValueType],
    ) -> None:
        self._graph = graph
        self._state, self._results = dict(state), dict(results)
        self._inputs = list(inputs)
        self._outputs = [_Output(value) for value in outputs]
        self._session: Any = None
        self._binding: Any = None

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Run the graph; return an array, or an OrtValue, for each output that is asked for."""
        if not self._graph.is_current or self._session is not self._graph.session:
            self._bind()
        binding = self._binding
        for declared, value in zip(self._inputs, values, strict=True):
            binding.bind_ortvalue_input(declared.name, value)
        symbols = self._symbols(values)
        made = [output.bind(binding, symbols) for output in self._outputs]
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            self._session = None
            raise RunError(f"onnxruntime failed to run {self._graph.name}: {error}") from None
        if any(array is None for array in made):
            self._collect(made, symbols)
        return made

    def _bind(self) -> None:
        self._session = self._graph.session
        self._binding = self._session.io_binding()
        for name, variable in self._state.items():
            self._binding.bind_ortvalue_input(name, variable.value)
        for name, variable in self._results.items():
            self._binding.bind_ortvalue_output(name, variable.value)

    def _symbols(self, values: Sequence[Any]) -> dict[str, int]:
        """What the symbolic dimensions are in this run."""
        return {
            dim: size
            for declared, value in zip(self._inputs, values, strict=True)
            for dim, size in zip(declared.dims or (), value.shape(), strict=False)
            if isinstance(dim, str)
        }

    def _collect(self, made: list[Any], symbols: Mapping[str, int]) -> None:
        """Take what onnxruntime has allocated, and learn whether that was as declared."""
        found = self._binding.get_outputs()[len(self._results) :]
        for index, (output, value) in enumerate(zip(self._outputs, found, strict=True)):
            if made[index] is None:
                made[index] = value
                output.learn(tuple(value.shape()), symbols)


class _Output:
    """An output that each run gives back.

    Asking onnxruntime for its outputs takes time for every parameter. So once an output has had
    the shape that the graph declares, memory of that shape is bound to it before the run.
    """

    def __init__(self, value: ValueType) -> None:
        element = ELEMENT_TYPES.get(value.element_type)
        self._name = value.name
        self._dims = value.dims
        self._dtype = None if element is None or value.element_type == STRING else element.dtype
        self._declared_right = value.dims == ()

    def _shape(self, symbols: Mapping[str, int]) -> tuple[int, ...] | None:
        sizes = [symbols.get(d, -1) if isinstance(d, str) else d for d in self._dims or ()]
        if self._dims is None or any(size is None or size < 0 for size in sizes):
            return None
        return tuple(size for size in sizes if size is not None)

    def bind(self, binding: Any, symbols: Mapping[str, int]) -> Array | None:
        """Bind memory for the next run, and return it if it is ours."""
        shape = self._shape(symbols) if self._declared_right else None
        if shape is None or self._dtype is None:
            binding.bind_output(self._name)
            return None
        array = np.empty(shape, self._dtype)
        binding.bind_ortvalue_output(self._name, ort.OrtValue.ortvalue_from_numpy(array))
        return array

    def learn(self, shape: tuple[int, ...], symbols: Mapping[str, int]) -> None:
        """Remember whether the declared shape is the one that the output has had."""
        self._declared_right = self._shape(symbols) == shape


def as_array(value: Any) -> Array:
    """Return what a run gave as an array of its own."""
    return value if isinstance(value, np.ndarray) else np.array(value.numpy())


def as_ortvalue(value: Any) -> Any:
    """Return what a run gave as onnxruntime's value."""
    return ort.OrtValue.ortvalue_from_numpy(value) if isinstance(value, np.ndarray) else value


def batch_symbol(inputs: Sequence[ValueType]) -> str | None:
    """Return the symbolic dimension that the inputs begin with, if it is one and has a name."""
    first = {v.dims[0] for v in inputs if v.dims}
    symbols = {dim for dim in first if isinstance(dim, str)}
    return symbols.pop() if len(symbols) == 1 else None


def _fix_batch(options: Any, inputs: Sequence[ValueType], size: int) -> None:
    symbol = batch_symbol(inputs)
    if symbol is not None:
        options.add_free_dimension_override_by_name(symbol, size)


def _ortvalue(tensor: Tensor, name: str) -> Any:
    if not isinstance(tensor, RawTensor):
        return ort.OrtValue.ortvalue_from_numpy(tensor)
    make: Callable[..., Any] | None = getattr(
        ort.OrtValue, "ortvalue_from_numpy_with_onnx_type", None
    )
    element = ELEMENT_TYPES[tensor.code]
    if make is None or element.bits < 8:
        raise ModelError(
            f"the frozen parameter {name!r} is of type {element.name}, which this onnxruntime does "
            "not take from memory"
        )
    return make(tensor.bits(), tensor.code)


def _same(tensor: Tensor, data: memoryview | None) -> bool:
    if data is None:
        return False
    held = np.frombuffer(tensor_bytes(tensor), np.uint8)
    return np.array_equal(held, np.frombuffer(data, np.uint8))


_ORT_TYPES = {
    "tensor(float)": 1, "tensor(uint8)": 2, "tensor(int8)": 3, "tensor(uint16)": 4,
    "tensor(int16)": 5, "tensor(int32)": 6, "tensor(int64)": 7, "tensor(string)": 8,
    "tensor(bool)": 9, "tensor(float16)": 10, "tensor(double)": 11, "tensor(uint32)": 12,
    "tensor(uint64)": 13, "tensor(bfloat16)": 16,
}  # fmt: skip


def _value_type(value: Any) -> ValueType:
    return ValueType(value.name, _ORT_TYPES.get(value.type, 0), tuple(value.shape))
