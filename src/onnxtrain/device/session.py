"""TrainingSession: module, optimizer and scheduler in one, as in upstream's other languages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime as ort

from onnxtrain.device.artifact_files import Graphs, files_of
from onnxtrain.device.module import Batch, Model, Module
from onnxtrain.device.optimizer import Optimizer
from onnxtrain.device.run.executors import StepExecutor, TrainExecutor, names_of
from onnxtrain.device.schedulers import LinearLRScheduler
from onnxtrain.device.state import CheckpointState
from onnxtrain.errors import ArgumentError, StateError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.checkpoint.file import Source
from onnxtrain.format.model.file import ModelFile, ValueType
from onnxtrain.format.model_metadata import ModelMetadata
from onnxtrain.format.names import RANGE_MOMENTUM

if TYPE_CHECKING:
    from onnxtrain.device.predict import Predictor
    from onnxtrain.format.adapter.adapter import Adapter


class TrainingSession:
    """All of training: steps, evaluation, learning rate, checkpoints, export.

    Args:
        checkpoint: the folder of artifacts; or, with the graphs that follow, a `CheckpointState`,
            or the file or bytes of a checkpoint.
        train_model: the training graph: a path, or its bytes.
        eval_model: the evaluation graph, for evaluation and export.
        optimizer_model: the optimizer graph, for updates.
        step_model: the graph of a whole step, which makes `step` faster.
        device: as for `Module`.
        session_options: as for `Module`.
        batch_size: as for `Module`.
        native: as for `Module`.
        base: as for `Module`.

    Examples:
        >>> session = TrainingSession("artifacts")
        >>> for x, labels in batches:
        ...     loss = session.step(x, labels)
        >>> session.save_checkpoint("checkpoint")

    """

    def __init__(
        self,
        checkpoint: CheckpointState | Source,
        train_model: Model | None = None,
        eval_model: Model | None = None,
        optimizer_model: Model | None = None,
        step_model: Model | None = None,
        *,
        device: str | Sequence[Any] = "cpu",
        session_options: Any = None,
        batch_size: Batch = None,
        native: bool = True,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        options = {
            "device": device,
            "session_options": session_options,
            "batch_size": batch_size,
            "native": native,
            "base": base,
        }
        if train_model is not None:
            graphs = train_model, eval_model, optimizer_model, step_model
            self._open(checkpoint, graphs, options)
        elif isinstance(checkpoint, str | os.PathLike):
            with files_of(checkpoint, "", None) as (found, graphs):
                self._open(found, graphs, options)
        else:
            raise ArgumentError("train_model is missing: pass the training graph, or a folder")

    def _open(
        self, checkpoint: CheckpointState | Source, graphs: Graphs, options: Mapping[str, Any]
    ) -> None:
        train_model, eval_model, optimizer_model, step_model = graphs
        if not isinstance(checkpoint, CheckpointState):
            checkpoint = CheckpointState.load_checkpoint(checkpoint)
        self.state = checkpoint
        self.module = Module(train_model, self.state, eval_model, **options)
        updates = optimizer_model if optimizer_model is not None else step_model
        self.optimizer = None if updates is None else Optimizer(updates, self.module)
        self._can_update_alone = optimizer_model is not None
        self._fused = None if step_model is None else self._step_executor(step_model)
        self._predictors: dict[tuple[str, ...] | None, Predictor] = {}

    @classmethod
    def from_folder(
        cls,
        directory: str | os.PathLike[str],
        prefix: str = "",
        *,
        checkpoint: CheckpointState | Source | None = None,
        **options: Any,
    ) -> TrainingSession:
        """Make a session from a folder, as the constructor does, with more to choose.

        Args:
            directory: the folder.
            prefix: what the names of the files begin with.
            checkpoint: a checkpoint to continue from, instead of the folder's.
            options: `device`, `session_options`, `batch_size`, `native`.

        """
        with files_of(directory, prefix, checkpoint) as (found, graphs):
            return cls(found, *graphs, **options)

    def close(self) -> None:
        """Free the graphs and their memory now; a session that is not used any more does so itself.

        Steps, predictions and exports are errors then. The state can still be read and saved. A
        session is a context manager that closes itself.
        """
        with self.module.training_state.lock:
            self.module.close()
            for part in (self.optimizer, self._fused, *self._predictors.values()):
                if part is not None:
                    part.close()

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _step_executor(self, step_model: Model) -> StepExecutor:
        graph = self.module.graph(step_model)
        return StepExecutor(graph, self.module.training_state, self._optimizer)

    @property
    def native(self) -> tuple[str, ...]:
        """The native kernels that run in place of functions of the graphs; empty without them."""
        return self.module.native

    # ---- steps ---------------------------------------------------------------------------------

    def train_step(self, *inputs: Any, **named: Any) -> Any:
        """Return the loss (and further outputs), and add the gradients to the accumulated ones.

        Inputs go by position or by name. `lazy_reset_grad` lets the gradients start from zero.
        """
        with self.module.training_state.lock:
            return self.module.run(self.module.training_executor, inputs, named)

    def eval_step(self, *inputs: Any, **named: Any) -> Any:
        """Return the loss (and further outputs) of the model in inference mode."""
        with self.module.training_state.lock:
            chosen = self.module.evaluation_executor
            if chosen is None:
                raise StateError("there is no evaluation graph: pass eval_model")
            return self.module.run(chosen, inputs, named)

    def predict(
        self,
        *inputs: Any,
        outputs: Sequence[str] | None = None,
        batch_size: int = 32,
        **named: Any,
    ) -> Any:
        """Return what the model computes for samples, with the parameters as they are now.

        It takes the inputs of the model, without labels: arrays of all samples, by position or by
        name. `outputs` are any values of the evaluation graph; those beside the loss by default.
        The result is an array with a row for each sample, or a tuple of them.
        """
        from onnxtrain.device.predict import Predictor

        with self.module.training_state.lock:
            key = None if outputs is None else tuple(outputs)
            if key not in self._predictors:
                self._predictors[key] = Predictor(self.module, outputs)
            return self._predictors[key](inputs, named, batch_size)

    def optimizer_step(self) -> None:
        """Update the parameters from the accumulated gradients."""
        self._optimizer_graph().step()

    def _optimizer_graph(self) -> Optimizer:
        if not self._can_update_alone:
            raise StateError("there is no optimizer graph: pass optimizer_model, or call step")
        return self._optimizer

    def lazy_reset_grad(self) -> None:
        """Let the next training step start the gradients from zero."""
        self.module.lazy_reset_grad()

    def step(self, *inputs: Any, **named: Any) -> Any:
        """Return the loss (and further outputs) and update the parameters, in one run.

        Does what `train_step`, `optimizer_step` and `lazy_reset_grad` do for one batch. Gradients
        that training steps have accumulated are neither used nor lost. If the loss or a gradient is
        not finite, nothing changes, and `skipped_steps` counts the step.
        """
        with self.module.training_state.lock:
            if self._fused is not None:
                return self.module.run(self._fused, inputs, named)
            optimizer = self._optimizer_graph()
            with self.module.training_executor.aside():
                result = self.train_step(*inputs, **named)
                optimizer.step()
            return result

    @property
    def skipped_steps(self) -> int:
        """How many steps changed nothing, because their loss or gradients were not finite."""
        return self._optimizer.skipped_steps

    @property
    def skipped_batches(self) -> int:
        """How many batches were left out, because their loss or gradients were not finite."""
        return self.module.skipped_batches

    @property
    def checks_finite(self) -> bool:
        """Whether steps that are not finite change nothing; not in graphs of earlier versions."""
        executors = (self.module.training_executor, self._fused)
        return all(executor.signature.check for executor in executors if executor is not None)

    @property
    def fused_model(self) -> ModelFile | None:
        """The graph of a whole step, if there is one."""
        return None if self._fused is None else self._fused.graph.model

    @contextmanager
    def replaced_graphs(self, train_model: bytes, step_model: bytes | None) -> Iterator[None]:
        """Take steps with other graphs, on the same parameters, within the context."""
        module, state = self.module, self.module.training_state
        train, fused = module.training_executor, self._fused
        with state.lock:
            if step_model is not None:
                self._fused = self._step_executor(step_model)
            module.training_executor = TrainExecutor(module.graph(train_model), state)
            module.training_executor.reset = train.reset
        try:
            yield
        finally:
            with state.lock:
                train.reset = module.training_executor.reset
                module.training_executor, self._fused = train, fused

    # ---- learning rate -------------------------------------------------------------------------

    @property
    def _optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise StateError("there is no optimizer: pass optimizer_model or step_model")
        return self.optimizer

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the steps to come."""
        self._optimizer.set_learning_rate(learning_rate)

    def get_learning_rate(self) -> float:
        """Return the learning rate."""
        return self._optimizer.get_learning_rate()

    def register_linear_lr_scheduler(
        self, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        """Let the learning rate rise during the warm-up and then fall to zero."""
        LinearLRScheduler(self._optimizer, warmup_step_count, total_step_count, initial_lr)

    def scheduler_step(self, *metrics: float) -> None:
        """Let the scheduler set the learning rate of the next step."""
        scheduler = self._optimizer.scheduler
        if scheduler is None:
            raise StateError(
                "there is no scheduler: call register_linear_lr_scheduler, or make one of "
                "onnxtrain.api with session.optimizer"
            )
        scheduler.step(*metrics)

    def set_proximal(self, mu: float, reference: Mapping[str, Array] | None = None) -> None:
        """Pull the parameters back to a reference in the steps to come; see `Optimizer`."""
        self._optimizer.set_proximal(mu, reference)

    # ---- parameters ----------------------------------------------------------------------------

    def freeze_ranges(self) -> None:
        """Let the ranges of a model that trains for integers stay as they are from now on.

        The last part of training then sees the integers that the exported model will have. `fit`
        does the same by itself for the last quarter of its steps, and for these alone.
        """
        if RANGE_MOMENTUM not in self.state.parameters:
            raise StateError(
                "there are no ranges that follow training: prepare with quantize='int8' and "
                "scales='average'"
            )
        self.update_parameter(RANGE_MOMENTUM, np.zeros(1, np.float32))

    def get_parameter(self, name: str) -> Array:
        """Return a copy of a parameter."""
        with self.module.training_state.lock:
            return np.array(self.state.parameters[name].data)

    def update_parameter(self, name: str, value: Array | Any) -> None:
        """Set a parameter."""
        array = value.numpy() if isinstance(value, ort.OrtValue) else value
        self.state.parameters[name] = array

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """Set parameters by name: some of them, or all of those of a nominal checkpoint."""
        self.module.load_parameters(values)

    def get_parameter_type_and_shape(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the element type and the shape of a parameter."""
        parameter = self.state.parameters[name]
        return parameter.data.dtype, parameter.data.shape

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the number of elements of the parameters."""
        return self.module.get_parameters_size(trainable_only)

    def to_buffer(self, trainable_only: bool = True) -> Any:
        """Return all parameters, concatenated, as an OrtValue."""
        return self.module.get_contiguous_parameters(trainable_only)

    def from_buffer(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set all parameters from one buffer."""
        self.module.copy_buffer_to_parameters(buffer, trainable_only)

    def add_property(self, name: str, value: int | float | str) -> None:
        """Keep a value in the checkpoint."""
        self.state.properties[name] = value

    def get_property(self, name: str) -> int | float | str:
        """Return a value that is kept in the checkpoint."""
        return self.state.properties[name]

    @property
    def metadata(self) -> ModelMetadata:
        """What is known of the use of the model: class names, the scaling of its input."""
        return self.module.metadata

    def set_metadata(self, **given: Any) -> None:
        """Keep in the checkpoint what exported models are to say about themselves.

        Args:
            given: fields of `ModelMetadata`: `classes=["cat", "dog"]`, and for images `mean`,
                `std` and `size`. `onnxtrain predict` uses them.

        """
        before = self.metadata
        try:
            metadata = replace(before, **given)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"set_metadata: {error}") from None
        for key, value in metadata.properties().items():
            if before.properties().get(key) != value:
                self.state.properties[key] = value

    def input_names(self, training: bool = True) -> list[str]:
        """The names of what a step takes: the inputs of the model, then labels."""
        chosen = self.module.training_executor if training else self.module.evaluation_executor
        return names_of(chosen, "inputs")

    def input_types(self, training: bool = True) -> tuple[ValueType, ...]:
        """Names, element types and dimensions of what a step takes."""
        chosen = self.module.training_executor if training else self.module.evaluation_executor
        return () if chosen is None else chosen.signature.inputs

    def output_names(self, training: bool = True) -> list[str]:
        """The names of what a step returns; the first is the loss."""
        chosen = self.module.training_executor if training else self.module.evaluation_executor
        return names_of(chosen, "outputs")

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        include_optimizer_state: bool = True,
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        """Write the state to a file, which is replaced as a whole or not at all.

        Infinite numbers and NaN are refused, unless `allow_nonfinite` is set.
        """
        CheckpointState.save_checkpoint(
            self.state, path, include_optimizer_state, allow_nonfinite=allow_nonfinite
        )

    def export_model_for_inferencing(
        self,
        inference_model_uri: str | os.PathLike[str] | None,
        graph_output_names: Sequence[str],
        *,
        optimize: bool = False,
        format: Literal["onnx", "ort"] = "onnx",
        allow_nonfinite: bool = False,
    ) -> bytes | None:
        """Write a model for inference, with the parameters as they are now; see `Module`."""
        return self.module.export_model_for_inferencing(
            inference_model_uri,
            graph_output_names,
            optimize=optimize,
            format=format,
            allow_nonfinite=allow_nonfinite,
        )

    def export_adapter(
        self,
        path: str | os.PathLike[str],
        format: Literal["onnx", "peft"] | None = None,
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        """Write the low-rank factors as they are now to an adapter file; see `Adapter.save`."""
        self.adapter(allow_nonfinite=allow_nonfinite).save(path, format)

    def adapter(self, *, allow_nonfinite: bool = False) -> Adapter:
        """Return the low-rank factors as they are now, with the scale in B."""
        from onnxtrain.device.adapters import adapter_of

        return adapter_of(self, allow_nonfinite=allow_nonfinite)

    def load_adapter(self, adapter: Adapter | str | os.PathLike[str]) -> None:
        """Continue from an adapter of the same base, layers and rank; moments start from zero."""
        from onnxtrain.device.adapters import load_adapter

        load_adapter(self, adapter)
