"""Executors: the graphs of training, with the parameters of a state bound to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime as ort

from onnxtrain.device.run.binding import Binding, Variable, as_array
from onnxtrain.device.run.graph import Graph
from onnxtrain.device.run.graph_signature import (
    check_belongs,
    check_trains,
    check_updates,
    signature_of,
)
from onnxtrain.device.state import TrainingState
from onnxtrain.errors import StateError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.names import (
    ACCUMULATED,
    BUFFER,
    GRADIENT,
    LAZY_RESET,
    RANDOM_SEED,
    UPDATED,
)

if TYPE_CHECKING:
    from onnxtrain.device.optimizer import Optimizer


class Executor:
    """A graph with the parameters bound to it; a call runs it on the user's inputs."""

    def __init__(self, graph: Graph, state: TrainingState, *, fused: bool = False) -> None:
        self.graph = graph
        self.state = state
        self.signature = signature_of(graph.model, state, fused=fused)
        self._check()
        graph.note_constants()
        self._seed = Variable(np.zeros(2, np.uint32))
        self._binding: Binding | None = None

    def _check(self) -> None:
        """Refuse a graph that does not belong to the state, or is not of the executor's kind."""
        check_belongs(self.graph.model, self.state, self.signature)

    def _bind(self) -> Binding:
        """Bind everything that stays the same from run to run."""
        signature = self.signature
        return Binding(self.graph, self._parameters(), {}, signature.inputs, signature.outputs)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Run the graph; return its outputs for the user."""
        self.graph.require_open()
        if self._binding is None:
            self._binding = self._bind()
        with self.state.random.drawn(self._seed.array if self.signature.has_seed else None):
            made = self._binding.run(values)
        if not self._binding.passed:
            self.state.skipped_batches += 1
            self.state.not_finite = self._not_finite()
            self.state.random.draws -= self.signature.has_seed
        return made

    def _not_finite(self) -> tuple[str, ...]:
        """The parameters whose gradients were not finite in the last run."""
        sums = None if self._binding is None else self._binding.sums
        signature = self.signature
        updated = (n for n in signature.updated if self.state.is_trainable(n))
        names = signature.trained or tuple(updated)
        # With a memory budget, one sum stands for all gradients.
        found = () if sums is None or sums.size <= len(names) else np.isfinite(sums).tolist()
        return tuple(n for n, is_finite in zip(names, found, strict=False) if not is_finite)

    @property
    def passed(self) -> bool:
        """Whether the last run was finite; a step that was not has changed nothing."""
        return self._binding is None or self._binding.passed

    def close(self) -> None:
        """Free the graph and what is bound to it."""
        self._binding = None
        self.graph.close()

    def _parameters(self) -> dict[str, Variable]:
        """The parameters, and the seed of random numbers where the graph has one."""
        seeds = {RANDOM_SEED: self._seed} if self.signature.has_seed else {}
        return {v.name: self.state.variable(v.name) for v in self.signature.parameters} | seeds


class EvalExecutor(Executor):
    """The evaluation graph."""


class TrainExecutor(Executor):
    """The training graph, which adds gradients to buffers.

    A run that starts from zero writes gradients straight into their buffers, where it can: the
    memory of a gradient is bound to what the graph computes, and to what it was added to.
    """

    def __init__(self, graph: Graph, state: TrainingState) -> None:
        super().__init__(graph, state)
        self.reset = True
        self.input_gradients: dict[str, Array] = {}
        self._flag = Variable(np.array([True]))
        inputs = {value.name for value in self.signature.inputs}
        self._differentiated_inputs = [n for n in self.signature.trained if n in inputs]
        self._trained = [n for n in self.signature.trained if n not in inputs]
        gradients = frozenset(graph.gradients)
        self._direct = [n for n in self._trained if f"{n}{GRADIENT}" in gradients]
        self._bindings: dict[bool, Binding] = {}  # by whether gradients start from zero

    def close(self) -> None:
        """Free the graph and what is bound to it."""
        self._bindings.clear()
        super().close()

    def _check(self) -> None:
        super()._check()
        check_trains(self.graph.model, self.state, self.signature)

    def allocate(self) -> None:
        """Make the memory of parameters and gradients."""
        for value in self.signature.parameters:
            self.state.variable(value.name)
        self.state.make_gradients(self._trained)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Run forward and backward; gradients start from zero where `reset` is set."""
        self._flag.array[0] = self.reset
        if self.reset not in self._bindings:
            self._bindings[self.reset] = self._bind()
        self._binding = self._bindings[self.reset]
        extra = [self._input_buffer(name, values) for name in self._differentiated_inputs]
        self.state.checked_by = ""
        made = super().__call__([*values, *extra])
        count = len(self.signature.outputs)
        if not self.passed:
            # No step may use what is there: gradients of before the reset, or none.
            self.state.has_stale_gradients |= self.reset
            if self.reset:
                self._clear(self._direct)
            return made[:count]
        if self.reset and self.signature.check:
            self.state.checked_by = self.graph.model.metadata.generation
        self.reset = self.state.has_stale_gradients = False
        for name, value in zip(self._differentiated_inputs, made[count:], strict=True):
            self.input_gradients[name] = as_array(value)
        return made[:count]

    def _clear(self, names: Sequence[str]) -> None:
        """Set gradients to zero, where a run that was not finite has written."""
        for gradient in self.state.make_gradients(names).values():
            gradient.assign(np.zeros(gradient.shape, gradient.dtype))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let gradients start from zero within, and restore the accumulated ones afterwards."""
        kept = None
        if not self.reset:
            gradients = self.state.make_gradients(self._trained)
            kept = {name: gradient.array.copy() for name, gradient in gradients.items()}
        of_inputs, self.input_gradients = self.input_gradients, {}
        were_stale = self.state.has_stale_gradients
        self.reset = True
        try:
            yield
        finally:
            self.input_gradients = of_inputs
            self.reset = kept is None
            for name, array in (kept or {}).items():
                self.state.set_gradient(name, array)
            self.state.has_stale_gradients = were_stale

    def _bind(self) -> Binding:
        signature = self.signature
        gradients = self.state.make_gradients(self._trained)
        parameters = self._parameters()
        state = {**parameters, **{f"{n}{BUFFER}": g for n, g in gradients.items()}}
        state[LAZY_RESET] = self._flag
        results = {f"{n}{ACCUMULATED}": g for n, g in gradients.items()}
        results.update((f"{n}{UPDATED}", parameters[n]) for n in signature.updated)
        if self.reset:
            results.update((f"{n}{GRADIENT}", gradients[n]) for n in self._direct)
        asked = {v.name: v for v in (*self.graph.model.inputs, *self.graph.model.outputs)}
        of_inputs = self._differentiated_inputs
        return Binding(
            self.graph,
            state,
            results,
            (*signature.inputs, *(asked[f"{n}{BUFFER}"] for n in of_inputs)),
            (*signature.outputs, *(asked[f"{n}{ACCUMULATED}"] for n in of_inputs)),
            signature.check,
        )

    def _input_buffer(self, name: str, values: Sequence[Any]) -> Any:
        """Return what the gradient of an input is added to, in the shape that the input has."""
        index = next(i for i, v in enumerate(self.signature.inputs) if v.name == name)
        shape = tuple(values[index].shape())
        earlier = self.input_gradients.get(name)
        if earlier is None or earlier.shape != shape:
            dtype = ELEMENT_TYPES[self.signature.inputs[index].element_type].dtype
            earlier = np.zeros(shape, dtype)
        return ort.OrtValue.ortvalue_from_numpy(earlier)


class StepExecutor(Executor):
    """The graph that computes the loss and what the optimizer makes of the parameters."""

    def __init__(self, graph: Graph, state: TrainingState, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        super().__init__(graph, state, fused=True)

    def _check(self) -> None:
        super()._check()
        check_updates(self.graph.model, self.state)
        self._optimizer.require_same_states(self.graph.model)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Take a step."""
        numbers = self._optimizer.numbers
        numbers.begin()
        made = super().__call__(values)
        numbers.finish(taken=self.passed)
        return made

    def _bind(self) -> Binding:
        state, results = self._optimizer.bound()
        state |= self._parameters()
        results |= {f"{name}{UPDATED}": state[name] for name in self.signature.updated}
        signature = self.signature
        return Binding(
            self.graph, state, results, signature.inputs, signature.outputs, signature.check
        )


def names_of(chosen: Executor | None, what: Literal["inputs", "outputs"]) -> list[str]:
    """The names of the user's inputs or outputs of an executor; none where there is none."""
    return [] if chosen is None else [value.name for value in getattr(chosen.signature, what)]


def require_values(state: TrainingState) -> None:
    """Refuse a nominal state."""
    if state.nominal:
        raise StateError(
            "Please load the model parameters first. The checkpoint is nominal, it has names and "
            "no values: copy_buffer_to_parameters(buffer, trainable_only=False) gives it some"
        )
