"""Module: forward and backward passes on the parameters of a state."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from onnxtrain.device.checks import at_least
from onnxtrain.device.parameter_buffers import ParameterBuffers
from onnxtrain.device.run.binding import as_array, as_ortvalue, providers_of
from onnxtrain.device.run.executors import (
    EvalExecutor,
    Executor,
    TrainExecutor,
    names_of,
    require_values,
)
from onnxtrain.device.run.graph import Graph, batch_symbol
from onnxtrain.device.run.graph_signature import check_base, check_generation
from onnxtrain.device.run.inputs import arranged, is_ortvalue, prepared
from onnxtrain.device.run.session_settings import Settings
from onnxtrain.device.state import CheckpointState
from onnxtrain.errors import ArgumentError, ArgumentTypeError, InputError, ModelError, StateError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.model.file import ModelFile, ValueType
from onnxtrain.format.model_metadata import PREFIX, ModelMetadata

Model = str | os.PathLike[str] | bytes | bytearray | memoryview
Batch = int | Literal["auto"] | None


class Module(ParameterBuffers):
    """A model that can be trained and evaluated.

    A call runs the graph of the present mode. In training mode it returns the loss (and further
    outputs) and adds the gradients to `Parameter.grad`, until `lazy_reset_grad`.

    Args:
        train_model_uri: the training graph: a path, or its bytes.
        state: the parameters; they are changed in place.
        eval_model_uri: the evaluation graph, for `eval` and for export.
        device: "cpu", "cuda", "cuda:1", or a list of onnxruntime's providers.
        session_options: onnxruntime's options for all sessions, or a function that makes them for
            each; without them, settings that are good for training.
        batch_size: fix the dimension that all inputs begin with: onnxruntime then knows all
            shapes beforehand. A batch of another size is an error, or, with "auto", rebuilds
            the sessions.
        native: use the kernels of the package onnxtrain-native, if it is installed. They run on
            the CPU only.
        base: the file `base.data`, for graphs of a folder with low-rank factors that are given as
            bytes; graphs that are given by their paths find it beside them.

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
        native: bool = True,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise ArgumentTypeError(f"state is a CheckpointState, not {type(state).__name__}")
        providers, where = providers_of(device)
        self.training = True
        self.state = state
        self.training_state = state._training  # what graphs are bound to
        self._generation = ""
        self._base = None if base is None else Path(base)
        self._graphs = weakref.WeakSet[Graph]()
        automatic = batch_size == "auto"
        fixed = None if automatic or batch_size is None else at_least(1, "batch_size", batch_size)
        self.settings = Settings(providers, session_options, fixed, automatic, bool(native))
        held = self.training_state
        with held.lock:
            held.move_to(where)
            train = TrainExecutor(self.graph(train_model_uri), held)
            self.evaluation_executor: EvalExecutor | None = None
            if eval_model_uri is not None:
                self.evaluation_executor = EvalExecutor(self.graph(eval_model_uri), held)
            if batch_size is not None and batch_symbol(train.signature.inputs) is None:
                raise ArgumentError(
                    "batch_size needs inputs that begin with one symbolic dimension, which has a "
                    f"name; {train.graph.name} has none"
                )
            super().__init__(train)

    def graph(self, source: Model) -> Graph:
        """Open a graph file that belongs to this module."""
        model = ModelFile.read(source)
        # A part of a graph, which is made in memory, has the same base as the graph.
        self._base = model.base = model.base or self._base
        graph = Graph(model, self.settings, self.training_state.frozen)
        self._generation = check_generation(graph.model, self.training_state, self._generation)
        check_base(graph.model, self.training_state)
        self._graphs.add(graph)
        return graph

    def __call__(self, *user_inputs: Any, **named: Any) -> Any:
        """Run the training or evaluation graph, whichever the mode is.

        Inputs are arrays, in the order of `input_names` or by name; the result is an array, or a
        tuple of arrays where the graph has several outputs. Where all inputs are `OrtValue`s, so
        are the results.
        """
        with self.training_state.lock:
            if self._present is None:
                raise StateError(
                    "there is no evaluation graph: pass eval_model_uri to Module, or call train()"
                )
            return self.run(self._present, user_inputs, named)

    def run(self, executor: Executor, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run an executor on the given inputs; the caller holds the lock of the state."""
        require_values(self.training_state)
        inputs = arranged(executor.signature.inputs, given, named)
        values = prepared(executor.signature.inputs, inputs)
        self._adapt_batch(executor.signature.inputs, values)
        made = executor(values)
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
                "With batch_size='auto' the sessions are rebuilt for another size"
            )

    @property
    def native(self) -> tuple[str, ...]:
        """The native kernels that run in place of functions of the graphs; empty without them."""
        functions = {name for graph in self._graphs for name in graph.kernels}
        return tuple(sorted({name.partition("_")[0] for name in functions}))

    @property
    def skipped_batches(self) -> int:
        """How many batches were left out, because their loss or gradients were not finite."""
        return self.training_state.skipped_batches

    def close(self) -> None:
        """Free the graphs and their memory now; a module that is not used any more does so itself.

        A call is an error then. The state can still be read and saved.
        """
        with self.training_state.lock:
            self.training_executor.close()
            if self.evaluation_executor is not None:
                self.evaluation_executor.close()

    def __enter__(self) -> Module:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def lazy_reset_grad(self) -> None:
        """Let the next training call start the gradients from zero."""
        self.training_executor.reset = True

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
    def _present(self) -> Executor | None:
        return self.training_executor if self.training else self.evaluation_executor

    @property
    def input_gradients(self) -> dict[str, Array]:
        """The gradients of inputs that `requires_grad` named, of the last training call."""
        return dict(self.training_executor.input_gradients)

    def export_model_for_inferencing(
        self,
        inference_model_uri: str | os.PathLike[str] | None,
        graph_output_names: Sequence[str],
        *,
        optimize: bool = False,
        format: Literal["onnx", "ort"] = "onnx",
        allow_nonfinite: bool = False,
    ) -> bytes | None:
        """Write a model for inference, with the parameters as they are now.

        Without a path its bytes are returned. Any values of the evaluation graph can be outputs.
        `optimize` saves what onnxruntime's optimisations make of it, also in its format "ort". The
        model keeps the metadata of the one it was prepared from; string properties of the state
        whose names begin with "onnxtrain." are added to it. Parameters that training has made
        infinite or NaN are refused, unless `allow_nonfinite` is set.
        """
        # Only those who export pay for it.
        from onnxtrain.device.export.inference_model import export_model

        with self.training_state.lock:
            if self.evaluation_executor is None:
                raise StateError("there is no evaluation graph to export: pass eval_model_uri")
            self.evaluation_executor.graph.require_open()
            require_values(self.training_state)
            if not allow_nonfinite:
                self.training_state.require_finite("nothing was exported")
            return export_model(
                self.evaluation_executor.graph.model,
                graph_output_names,
                {name: self.training_state.held(name) for name in self.training_state.names()},
                inference_model_uri,
                optimize=optimize,
                format=format,
                properties=self._described(),
            )

    @property
    def metadata(self) -> ModelMetadata:
        """What is known of the use of the model: class names, the scaling of its input."""
        evaluation = self.evaluation_executor
        about = {} if evaluation is None else evaluation.graph.model.properties
        try:
            return ModelMetadata.of(about | self._described())
        except ValueError as error:
            raise ModelError(f"the metadata of the model cannot be read: {error}") from None

    def _described(self) -> dict[str, str]:
        """The properties of the state that go with an exported model."""
        held = self.state.properties
        return {k: v for k, v in held if k.startswith(PREFIX) and isinstance(v, str)}
