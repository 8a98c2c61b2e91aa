"""Module: forward and backward passes on the parameters of a state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from onnxtrain.api.binding import Binding, as_array, as_ortvalue
from onnxtrain.api.buffers import Buffers
from onnxtrain.api.checkpoint import CheckpointState
from onnxtrain.api.checkpoint_content import ELEMENT_TYPES, Array
from onnxtrain.api.checks import at_least
from onnxtrain.api.graph import Graph, Settings, batch_symbol
from onnxtrain.api.inputs import arranged, is_ortvalue, prepared
from onnxtrain.api.model_file import ModelFile, ValueType
from onnxtrain.api.roles import (
    ACCUMULATED,
    BUFFER,
    LAZY_RESET,
    RANDOM_SEED,
    UPDATED,
    Roles,
    check_belongs,
    check_trains,
    roles_of,
)
from onnxtrain.api.variables import Variable, providers_of
from onnxtrain.errors import ArgumentError, InputError, StateError

Model = str | os.PathLike[str] | bytes | bytearray | memoryview
Batch = int | Literal["auto"] | None


class Module:
    """A model that can be trained and evaluated.

    A call runs the graph of the present mode. In training mode it returns the loss (and the outputs
    beside it) and adds the gradients to `Parameter.grad`, until `lazy_reset_grad`.

    Args:
        train_model_uri: the training graph: a path, or its bytes.
        state: the parameters; they are changed in place.
        eval_model_uri: the evaluation graph, for `eval` and for export.
        device: "cpu", "cuda", "cuda:1", or a list of onnxruntime's providers.
        session_options: onnxruntime's options for all sessions, or a function that makes them for
            each; without them, settings that are good for training.
        batch_size: fix the dimension that all inputs begin with: onnxruntime then knows all
            shapes beforehand. A batch of another size is an error, or, with "auto", makes the
            sessions anew.

    """

    def __init__(
        self,
        train_model_uri: Model,
        state: CheckpointState,
        eval_model_uri: Model | None = None,
        device: str | Sequence[Any] = "cpu",
        session_options: Any = None,
        *,
        batch_size: Batch = None,
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state is a CheckpointState, not {type(state).__name__}")
        providers, place = providers_of(device)
        self.training = True
        self.state = state
        automatic = batch_size == "auto"
        fixed = None if automatic or batch_size is None else at_least(1, "batch_size", batch_size)
        self.settings = Settings(providers, place, session_options, fixed, automatic)
        with state.lock:
            state.move_to(place)
            train = self.graph(train_model_uri)
            self._train = _TrainPass(train, state)
            evaluation = None if eval_model_uri is None else self.graph(eval_model_uri)
            self._eval = None if evaluation is None else _EvalPass(evaluation, state)
            self._check_batch()
            self._buffers = Buffers(state, self._train.graph.model, self._train.roles)
            if not state.nominal:
                self._train.allocate()

    def graph(self, source: Model) -> Graph:
        """Open a graph file that belongs to this module."""
        return Graph(ModelFile.read(source), self.settings, self.state.frozen)

    def _check_batch(self) -> None:
        if self.settings.batch is None and not self.settings.automatic:
            return
        if batch_symbol(self._train.roles.inputs) is None:
            raise ArgumentError(
                "batch_size needs inputs that begin with one symbolic dimension, which has a name; "
                f"{self._train.graph.name} has none"
            )

    # ---- running -------------------------------------------------------------------------------

    def __call__(self, *user_inputs: Any, **named: Any) -> Any:
        """Run the training or evaluation graph, whichever the mode is.

        Inputs are arrays, in the order of `input_names` or by name; the result is an array, or a
        tuple of arrays where the graph has several outputs. Where all inputs are `OrtValue`s, so
        are the results.
        """
        with self.state.lock:
            chosen: _Pass | None = self._train if self.training else self._eval
            if chosen is None:
                raise StateError(
                    "there is no evaluation graph: give eval_model_uri to Module, or call train()"
                )
            return self.run(chosen, user_inputs, named)

    def run(self, chosen: _Pass, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run a pass on what was given; the lock of the state is held."""
        require_values(self.state)
        inputs = arranged(chosen.roles.inputs, given, named)
        values = prepared(chosen.roles.inputs, inputs)
        self._adapt_batch(chosen.roles.inputs, values)
        made = chosen(values)
        convert = as_ortvalue if inputs and all(map(is_ortvalue, inputs)) else as_array
        return convert(made[0]) if len(made) == 1 else tuple(convert(v) for v in made)

    def _adapt_batch(self, inputs: Sequence[ValueType], values: Sequence[Any]) -> None:
        if self.settings.batch is None and not self.settings.automatic:
            return
        symbol = batch_symbol(inputs)
        size = next(
            int(value.shape()[0])
            for declared, value in zip(inputs, values, strict=True)
            if declared.dims and declared.dims[0] == symbol
        )
        if self.settings.automatic:
            self.settings.batch = size
        elif size != self.settings.batch:
            raise InputError(
                f"the batch has {size} samples, and batch_size={self.settings.batch} fixed it. "
                "With batch_size='auto' the sessions are made anew for another size"
            )

    def lazy_reset_grad(self) -> None:
        """Let the next training call start the gradients from zero."""
        self._train.reset = True

    def replace_training_graph(self, train_model: bytes) -> Callable[[], None]:
        """Train with another graph on the same parameters; return what undoes it."""
        before = self._train
        self._train = _TrainPass(self.graph(train_model), self.state)
        self._train.reset = before.reset

        def undo() -> None:
            before.reset = self._train.reset
            self._train = before

        return undo

    # ---- mode ----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Module:
        """Enter training mode, or (False) evaluation mode."""
        self.training = bool(mode)
        return self

    def eval(self) -> Module:
        """Enter evaluation mode."""
        return self.train(False)

    def input_names(self) -> list[str]:
        """The names of what a call takes, in the present mode."""
        return names_of(self._present, "inputs")

    def output_names(self) -> list[str]:
        """The names of what a call returns, in the present mode."""
        return names_of(self._present, "outputs")

    @property
    def _present(self) -> _Pass | None:
        return self._train if self.training else self._eval

    @property
    def training_pass(self) -> _TrainPass:
        """Forward and backward."""
        return self._train

    @property
    def evaluation_pass(self) -> _EvalPass | None:
        """Forward alone, in inference mode."""
        return self._eval

    @property
    def input_gradients(self) -> dict[str, Array]:
        """The gradients of inputs that `requires_grad` named, of the last training call."""
        return dict(self._train.input_gradients)

    # ---- parameters ----------------------------------------------------------------------------

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return how many numbers the parameters have."""
        return self._buffers.size(trainable_only)

    def get_contiguous_parameters(self, trainable_only: bool = False) -> Any:
        """Return a copy of all parameters, one behind the other, as an OrtValue."""
        with self.state.lock:
            require_values(self.state)
            return self._buffers.read(trainable_only)

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set all parameters from a buffer as `get_contiguous_parameters` returns.

        An array, an `OrtValue` or onnxruntime's inner value will do. A nominal state is complete
        after it was given all parameters.
        """
        with self.state.lock:
            was_nominal = self.state.nominal
            self._buffers.write(buffer, trainable_only)
            if was_nominal:
                self._train.allocate()

    def export_model_for_inferencing(
        self,
        inference_model_uri: str | os.PathLike[str] | None,
        graph_output_names: Sequence[str],
        *,
        optimize: bool = False,
        format: Literal["onnx", "ort"] = "onnx",
    ) -> bytes | None:
        """Write a model for inference, with the parameters as they are now.

        Args:
            inference_model_uri: where to; None to get the bytes instead.
            graph_output_names: any values of the evaluation graph.
            optimize: save what onnxruntime's optimisations make of it.
            format: "onnx", or onnxruntime's own "ort".

        """
        from onnxtrain.api.export import export_model  # only those who export pay for it

        with self.state.lock:
            if self._eval is None:
                raise StateError("there is no evaluation graph to export: give eval_model_uri")
            require_values(self.state)
            return export_model(
                self._eval.graph.model,
                graph_output_names,
                {name: self.state.held(name) for name in self.state.names()},
                inference_model_uri,
                optimize=optimize,
                format=format,
            )


class _Pass:
    """A graph with the parameters bound to it."""

    def __init__(self, graph: Graph, state: CheckpointState) -> None:
        self.graph = graph
        self.state = state
        self.roles: Roles = roles_of(graph.model, state)
        check_belongs(graph.model, state, self.roles)
        graph.note_constants()

    def _parameters(self) -> dict[str, Variable]:
        return {value.name: self.state.variable(value.name) for value in self.roles.parameters}

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        raise NotImplementedError


class _EvalPass(_Pass):
    """The evaluation graph."""

    _binding: Binding | None = None

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        if self._binding is None:
            roles = self.roles
            self._binding = Binding(self.graph, self._parameters(), {}, roles.inputs, roles.outputs)
        return self._binding.run(values)


class _TrainPass(_Pass):
    """The training graph, which adds gradients to buffers."""

    def __init__(self, graph: Graph, state: CheckpointState) -> None:
        super().__init__(graph, state)
        check_trains(graph.model, state, self.roles)
        self.reset = True
        self.input_gradients: dict[str, Array] = {}
        self._flag = Variable(np.array([True]))
        self._seed = Variable(np.zeros(2, np.uint32))
        self._binding: Binding | None = None
        inputs = {value.name for value in self.roles.inputs}
        self._differentiated_inputs = [n for n in self.roles.trained if n in inputs]
        self._trained = [n for n in self.roles.trained if n not in inputs]

    def allocate(self) -> None:
        """Make the memory of parameters and gradients."""
        for value in self.roles.parameters:
            self.state.variable(value.name)
        self.state.make_gradients(self._trained)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        if self._binding is None:
            self._binding = self._bind()
        self._flag.array[0] = self.reset
        extra = [self._input_buffer(name, values) for name in self._differentiated_inputs]
        with self.state.random.drawn(self._seed.array if self.roles.has_seed else None):
            made = self._binding.run([*values, *extra])
        self.reset = False
        count = len(self.roles.outputs)
        for name, value in zip(self._differentiated_inputs, made[count:], strict=True):
            self.input_gradients[name] = as_array(value)
        return made[:count]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let gradients begin anew within, and go on with the accumulated ones afterwards."""
        kept = None
        if not self.reset:
            gradients = self.state.make_gradients(self._trained)
            kept = {name: gradient.array.copy() for name, gradient in gradients.items()}
        of_inputs, self.input_gradients = self.input_gradients, {}
        self.reset = True
        try:
            yield
        finally:
            self.input_gradients = of_inputs
            self.reset = kept is None
            for name, array in (kept or {}).items():
                self.state.set_gradient(name, array)

    def _bind(self) -> Binding:
        roles = self.roles
        gradients = self.state.make_gradients(self._trained)
        parameters = self._parameters()
        state = {**parameters, **{f"{n}{BUFFER}": g for n, g in gradients.items()}}
        state[LAZY_RESET] = self._flag
        if roles.has_seed:
            state[RANDOM_SEED] = self._seed
        results = {f"{n}{ACCUMULATED}": g for n, g in gradients.items()}
        results.update((f"{n}{UPDATED}", parameters[n]) for n in roles.updated)
        asked = {v.name: v for v in (*self.graph.model.inputs, *self.graph.model.outputs)}
        of_inputs = self._differentiated_inputs
        return Binding(
            self.graph,
            state,
            results,
            (*roles.inputs, *(asked[f"{n}{BUFFER}"] for n in of_inputs)),
            (*roles.outputs, *(asked[f"{n}{ACCUMULATED}"] for n in of_inputs)),
        )

    def _input_buffer(self, name: str, values: Sequence[Any]) -> Any:
        """Return what the gradient of an input is added to, in the shape that the input has."""
        index = next(i for i, v in enumerate(self.roles.inputs) if v.name == name)
        shape = tuple(values[index].shape())
        earlier = self.input_gradients.get(name)
        if earlier is None or earlier.shape != shape:
            dtype = ELEMENT_TYPES[self.roles.inputs[index].element_type].dtype
            earlier = np.zeros(shape, dtype)
        return as_ortvalue(earlier)


def names_of(chosen: _Pass | None, what: Literal["inputs", "outputs"]) -> list[str]:
    """The names of the user's inputs or outputs of a pass; none where there is no pass."""
    return [] if chosen is None else [value.name for value in getattr(chosen.roles, what)]


def require_values(state: CheckpointState) -> None:
    """Refuse to go on with a nominal state."""
    if state.nominal:
        raise StateError(
            "Please load the model parameters first. The checkpoint is nominal, it has names and "
            "no values: copy_buffer_to_parameters(buffer, trainable_only=False) gives it some"
        )
