"""Runs that CUDA has recorded: one launch for all nodes of a graph.

onnxruntime records the first run of a session (`enable_cuda_graph`), and later runs repeat it on
the same addresses. So everything that a run reads or writes stays where it is, on the GPU: what
comes from the CPU is copied into its place before each run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from onnxtrain.errors import RunError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import ValueType

if TYPE_CHECKING:
    from onnxtrain.device.run.binding import Variable

_recordings = itertools.count(1)
CUDA, SETTING = "CUDAExecutionProvider", "enable_cuda_graph"


def without_recording(providers: Sequence[Any]) -> list[Any]:
    """Return providers that do not record runs."""
    return [
        given
        if isinstance(given, str)
        else (given[0], {k: v for k, v in given[1].items() if k != SETTING})
        for given in providers
    ]


def asks_to_record(providers: Sequence[Any]) -> bool:
    """Tell whether the first of some providers is to record runs."""
    first = providers[0] if providers else ""
    return not isinstance(first, str) and first[0] == CUDA and str(first[1].get(SETTING, 0)) == "1"


def are_fixed(values: Iterable[ValueType]) -> bool:
    """Tell whether all sizes of some values are numbers."""
    return all(v.dims is not None and all(isinstance(d, int) for d in v.dims) for v in values)


class RecordedRun:
    """A graph whose memory is on the GPU and stays where it is."""

    def __init__(
        self,
        session: Any,
        state: Mapping[str, Variable],
        results: Mapping[str, tuple[Variable, tuple[int, ...]]],
        inputs: Sequence[ValueType],
        outputs: Sequence[ValueType],
    ) -> None:
        device = next(v.device for v in state.values() if not v.device.is_cpu)
        self._session, self._binding = session, session.io_binding()
        self._changed = [variable for variable, _ in results.values()]
        self._is_recorded = False
        # Several may be recorded in one session, such as with other memory for the gradients.
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", str(next(_recordings)))
        on_cpu = {name: v for name, v in state.items() if v.device.is_cpu}
        self._fed = {v: ort.OrtValue.ortvalue_from_numpy(v.array, *device) for v in on_cpu.values()}
        for name, variable in state.items():
            value = self._fed[variable] if name in on_cpu else variable.value
            self._binding.bind_ortvalue_input(name, value)
        for name, (variable, shape) in results.items():
            variable.bind_as_output(self._binding, name, shape)
        self._inputs = {v.name: _room(v, device) for v in inputs}
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        self._outputs = {v.name: _room(v, device) for v in outputs}
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self, values: Sequence[Any]) -> list[Array]:
        """Run the graph on some inputs; return its outputs."""
        for variable, copy in self._fed.items():
            copy.update_inplace(variable.array)
        for (name, place), value in zip(self._inputs.items(), values, strict=True):
            if list(value.shape()) != list(place.shape()):
                raise RunError(
                    f"{name!r} has the shape {tuple(value.shape())}, and the graph was made for "
                    f"{tuple(place.shape())}: give batches of that size, or open the session with "
                    "another batch_size"
                )
            place.update_inplace(value.numpy())
        if not self._is_recorded:
            self._record()
        self._session.run_with_iobinding(self._binding, self._options)
        return [value.numpy() for value in self._outputs.values()]

    def _record(self) -> None:
        """Let onnxruntime record a run. It runs the graph twice for that: undo both."""
        before = [variable.array.copy() for variable in self._changed]
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        finally:
            for variable, array in zip(self._changed, before, strict=True):
                variable.assign(array)
        self._is_recorded = True


def _room(value: ValueType, device: tuple[str, int]) -> Any:
    dtype = ELEMENT_TYPES[value.element_type].dtype
    return ort.OrtValue.ortvalue_from_shape_and_type(list(value.dims or ()), dtype, *device)
