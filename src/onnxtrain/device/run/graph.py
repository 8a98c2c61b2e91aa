"""A graph of the artifacts, and the onnxruntime session that runs it.

The session is made when the graph runs for the first time: a program that takes fused steps never
pays for the graphs that it does not use. Between runs nothing is copied: what training changes is
bound once, as input and, in place, as output.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain.device.export.layout import (
    stored_data,
    with_initializers,
    with_outputs,
    without_functions,
)
from onnxtrain.device.run.base_file import (
    FINDS_FILES,
    FOLDER_OF_DATA,
    folder_of_base,
    read_base,
)
from onnxtrain.device.run.cuda_graph import are_fixed, asks_to_record, without_recording
from onnxtrain.device.run.session_settings import Settings, has_lean_arena, needless_optimizers
from onnxtrain.errors import (
    ArgumentError,
    ModelError,
    OnnxTrainError,
    StateError,
    TrainingWarning,
)
from onnxtrain.format.checkpoint.content import Array, RawTensor, Tensor, tensor_bytes
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.metadata import METADATA_KEY
from onnxtrain.format.model.file import ModelFile, ValueType, read_metadata
from onnxtrain.format.model.source import ModelBytes
from onnxtrain.format.model.wire import Reader
from onnxtrain.format.names import BUFFER, GRADIENT, GRADIENTS_CHECKED

_LARGEST = 1_900_000_000  # protobuf reads 2 GB at most
_MANY_NODES, _MANY_BESIDE_QUANTIZED = 3000, 1000
_NBITS = re.compile(b"MatMulNBits")


@dataclass
class Frozen:
    """The values that graphs take for constants.

    `version` counts how often they changed. `baked` maps those that are inside of a graph file
    where nothing can change them, to that file.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0
    baked: dict[str, str] = field(default_factory=dict)

    def change(self, name: str, array: Array) -> None:
        """Set a value; graphs are rebuilt if it is a different one."""
        self.require_changeable(name, array)
        if not self._holds(name, array):
            self.values[name] = array.copy()
            self.version += 1

    def require_changeable(self, name: str, array: Array) -> None:
        """Refuse to change what a graph would not see."""
        if name in self.baked and not self._holds(name, array):
            raise StateError(
                f"the frozen parameter {name!r} is a constant of {self.baked[name]}, which is in "
                "the ORT format and cannot be changed: use the graphs in the ONNX format"
            )

    def _holds(self, name: str, array: Array) -> bool:
        held = tensor_bytes(self.values[name])
        return array.nbytes == len(held) and _same(array, held)


class Graph:
    """One graph file of the artifacts.

    With `is_checked`, that of an optimizer does not check gradients, as the training graph has.
    """

    def __init__(
        self, model: ModelFile, settings: Settings, frozen: Frozen, *, is_checked: bool = False
    ) -> None:
        self.model = model
        self._is_checked = is_checked
        self.settings = settings
        self._frozen = frozen
        self._session: Any = None
        self._version = -1
        self._batch: int | None = None
        self._is_closed = False
        self._base: Mapping[str, Tensor] = {}  # what the session reads, if it was read for it
        self._runs_plain = model.is_ort  # a file in the ORT format has no functions
        self._cannot_record = model.is_ort
        if model.is_ort:
            self._take_interface()
        self._has_batch = batch_symbol(model.inputs) is not None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.model.source_name

    @property
    def kernels(self) -> tuple[str, ...]:
        """The functions of the graph that native kernels stand in for."""
        functions = () if self._runs_plain else self.model.metadata.kernels
        library = self.settings.library if functions else None
        return () if library is None else library.served(functions)

    def _take_interface(self) -> None:
        """Ask onnxruntime for what a file in the ORT format does not tell us."""
        model, session = self.model, self._make_session(None)
        model.inputs = tuple(value_type(v) for v in session.get_inputs())
        model.outputs = tuple(value_type(v) for v in session.get_outputs())
        model.properties = dict(session.get_modelmeta().custom_metadata_map)
        metadata = model.properties.pop(METADATA_KEY, None)
        if metadata is not None:
            model.metadata = read_metadata(Reader(self.name), metadata)
        if self.settings.batch is None:
            self._session, self._version = session, self._frozen.version

    @property
    def gradients(self) -> tuple[str, ...]:
        """The gradients of a training graph that its session has as outputs beside its own.

        A file in the ORT format cannot be changed, and a large one is read by onnxruntime itself.
        """
        model = self.model
        if not model.metadata.gradients or model.is_ort or not model.content.is_kept:
            return ()
        inputs = {value.name for value in model.inputs}
        taken = inputs | {value.name for value in model.outputs}
        return tuple(
            name
            for name in dict.fromkeys(model.metadata.gradients)
            if name not in taken and f"{name.removesuffix(GRADIENT)}{BUFFER}" in inputs
        )

    def checked(self) -> Graph | None:
        """Return this graph of an optimizer without its check of the gradients.

        The check is behind a constant of the file: where that is true, onnxruntime folds away the
        branches, and runs the updates alone. None where there is no such constant.
        """
        model = self.model
        can_change = not model.is_ort and model.content.is_kept
        if not can_change or GRADIENTS_CHECKED not in model.initializer_names:
            return None
        return Graph(model, self.settings, self._frozen, is_checked=True)

    def note_constants(self) -> None:
        """Remember which frozen parameters cannot change, as they are inside of the graph."""
        if self.model.is_ort:
            inputs = {value.name for value in self.model.inputs}
            constants = (name for name in self._frozen.values if name not in inputs)
            self._frozen.baked.update(dict.fromkeys(constants, self.name))

    @property
    def records(self) -> bool:
        """Whether the session records its runs: one of a graph for CUDA, with sizes that are fixed.

        A graph with a part that has to run on the CPU cannot be recorded.
        """
        model, given = self.model, self.settings.providers
        if self._cannot_record or model.metadata.target != "cuda" or not asks_to_record(given):
            return False
        return are_fixed(self.fixed(value) for value in (*model.inputs, *model.outputs))

    def fixed(self, value: ValueType) -> ValueType:
        """Return a value with the size of a batch in its dimensions, where that is fixed."""
        batch, symbol = self._wanted_batch, batch_symbol(self.model.inputs)
        if batch is None or value.dims is None:
            return value
        return replace(value, dims=tuple(batch if d == symbol else d for d in value.dims))

    @property
    def _wanted_batch(self) -> int | None:
        return self.settings.batch if self._has_batch else None

    @property
    def is_current(self) -> bool:
        """Whether the session is there and was made for what holds now."""
        return (
            self._session is not None
            and self._version == self._frozen.version
            and self._batch == self._wanted_batch
        )

    def close(self) -> None:
        """Free the session and the file; the graph cannot run any more."""
        self._is_closed = True
        self._session = None
        self.model = replace(self.model, content=ModelBytes(memoryview(b"")), path=None)

    def require_open(self) -> None:
        """Refuse to use a graph that was closed."""
        if self._is_closed:
            raise StateError(
                f"{self.name} was closed with its session, and cannot run or be exported any more: "
                "make a new session. The state can still be read and saved"
            )

    @property
    def session(self) -> Any:
        """The session, rebuilt if a constant or the fixed size of a batch has changed."""
        self.require_open()
        if not self.is_current:
            self._session = None  # free the memory of the old one first
            self._session = self._make_session(self._wanted_batch)
            self._version, self._batch = self._frozen.version, self._wanted_batch
        return self._session

    def _make_session(self, batch: int | None) -> Any:
        if self.records:
            try:
                return self._new_session(batch)
            except ModelError:  # parts of it run on the CPU
                self._cannot_record = True
        try:
            return self._new_session(batch)
        except ModelError as error:
            if self.settings.shares_options or not self.kernels:
                raise
            self._runs_plain = True
            session = self._new_session(batch)  # what is wrong with the graph itself is raised
            warnings.warn(
                f"{self.name} runs without native kernels: {error}", TrainingWarning, stacklevel=2
            )
            return session

    def _tune(self, options: Any) -> None:
        """Set what our own options have for some graphs only."""
        content = self.model.content
        is_quantized = content.is_kept and _NBITS.search(content.data()) is not None
        many = _MANY_BESIDE_QUANTIZED if is_quantized else _MANY_NODES
        if self.model.node_count > many and (is_quantized or self.kernels):
            # Each pass of the optimiser walks all nodes, and kernels stand where it would fuse:
            # 6,600 nodes of a language model load in 0.8 s instead of 3.9, and steps take the same.
            # Where weights are quantized, it finds nothing to fuse without kernels either: 12,000
            # nodes load in 1.3 s instead of 6, and an evaluation takes 13 MB less.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if self.model.metadata.memory is not None and has_lean_arena():
            options.add_session_config_entry("session.use_env_allocators", "1")
        inputs = {value.name for value in self.model.inputs}
        if any(f"{name}{GRADIENT}" in inputs for name in inputs):
            # The training and the optimizer graph take turns. Threads of the optimizer that spin,
            # in case more work comes, keep those of the other from theirs: a step took twice as
            # long. Those of the training graph spin on, as it has the first work of the next step.
            options.add_session_config_entry("session.force_spinning_stop", "1")

    def _new_session(self, batch: int | None) -> Any:
        options, own = self.settings.new_options()
        if self.settings.options is None:
            self._tune(options)
        if batch is not None:
            options.add_free_dimension_override_by_name(batch_symbol(self.model.inputs), batch)
        frozen, model = self._frozen.values, self.model
        in_base = model.in_base
        stored = [name for name in model.external if name not in in_base]
        absent = [name for name in stored if name not in frozen]
        if absent:
            raise ModelError(
                f"{self.name} takes the frozen parameter {absent[0]!r} from the checkpoint, which "
                "does not have it: they do not belong together"
            )
        external = {name: frozen[name] for name in stored}
        # The small constants that are in the file itself, with a value that no longer holds.
        inside = stored_data(model, frozen.keys() & set(model.initializer_names))
        inline = {n: frozen[n] for n, data in inside.items() if not _same(frozen[n], data)}
        if self._is_checked:
            inline[GRADIENTS_CHECKED] = np.array([True])
        if in_base and FINDS_FILES:
            options.add_session_config_entry(FOLDER_OF_DATA, str(folder_of_base(model)))
        elif in_base:
            self._base = read_base(model)
            external |= self._base
        if external and own:
            names = list(external)
            options.add_external_initializers(names, [_ortvalue(external[n], n) for n in names])
        elif external:
            # The user's options serve several graphs, and each would have to have all of these.
            size = sum(len(tensor_bytes(tensor)) for tensor in external.values())
            if size > _LARGEST:
                raise ArgumentError(
                    f"the frozen parameters have {size:,} bytes, which one SessionOptions for all "
                    "graphs cannot pass on: give session_options as a function that makes new ones"
                )
            inline.update(external)
        given = list(self.settings.providers)
        try:
            source = self._source(inline)
            with self._with_kernels(options):
                return ort.InferenceSession(
                    source,
                    options,
                    providers=given if self.records else without_recording(given),
                    disabled_optimizers=needless_optimizers(source),
                )
        except OnnxTrainError:
            raise
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            raise ModelError(f"onnxruntime does not load {self.name}: {error}") from None

    def _with_kernels(self, options: Any) -> AbstractContextManager[None]:
        """Register native kernels in the options of the session that is made in this context."""
        library, functions = self.settings.library, self.model.metadata.kernels
        if library is None or not functions or self._runs_plain:
            return nullcontext()
        return library.registered(options, functions, is_shared=self.settings.shares_options)

    def _source(self, changes: Mapping[str, Tensor]) -> str | bytes:
        model = self.model
        source = with_initializers(model, changes) if changes else model.content.loadable()
        if isinstance(source, str):
            return source
        # onnxruntime would check the bodies that it does not run, a third of the time it loads.
        source = without_functions(source, self.kernels, self.name)
        types = {value.name: value for value in model.inputs}
        buffers = [types[f"{name.removesuffix(GRADIENT)}{BUFFER}"] for name in self.gradients]
        gradients = (replace(v, name=n) for n, v in zip(self.gradients, buffers, strict=True))
        return with_outputs(source, gradients)


def batch_symbol(inputs: Sequence[ValueType]) -> str | None:
    """Return the symbolic dimension that the inputs begin with, if it is one and has a name."""
    first = {v.dims[0] for v in inputs if v.dims}
    symbols = {dim for dim in first if isinstance(dim, str)}
    return symbols.pop() if len(symbols) == 1 else None


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


def _same(tensor: Tensor, data: memoryview) -> bool:
    held = np.frombuffer(tensor_bytes(tensor), np.uint8)
    return np.array_equal(held, np.frombuffer(data, np.uint8))


# What onnxruntime calls the types of tensors.
ORT_TYPES = {code: f"tensor({element.name.lower()})" for code, element in ELEMENT_TYPES.items()}
_CODES = {name: code for code, name in ORT_TYPES.items()}


def value_type(value: Any) -> ValueType:
    """Return the type of an input or output as onnxruntime gives it."""
    return ValueType(value.name, _CODES.get(value.type, 0), tuple(value.shape))
