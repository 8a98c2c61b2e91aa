"""Predictions: samples of any number through a model, in batches, without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxtrain.device.checks import at_least
from onnxtrain.device.export.prune import quiet_options
from onnxtrain.device.module import Model, Module
from onnxtrain.device.run.binding import providers_of
from onnxtrain.device.run.executors import EvalExecutor, names_of
from onnxtrain.device.run.graph import value_type
from onnxtrain.device.run.inputs import arranged, converted, is_ortvalue, prepared
from onnxtrain.errors import ArgumentError, InputError, ModelError, RunError, StateError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.element_types import STRING
from onnxtrain.format.model.file import ModelFile, ValueType

Run = Callable[[Sequence[Any]], Sequence[Array]]


def predict(
    model: Model | ort.InferenceSession,
    *inputs: Any,
    outputs: Sequence[str] | None = None,
    batch_size: int = 32,
    device: str | Sequence[Any] = "cpu",
    **named: Any,
) -> Any:
    """Return what a model computes for samples.

    Args:
        model: the path or the bytes of a model; or an `onnxruntime.InferenceSession`, which
            spares loading the model again for the next samples.
        inputs: arrays of all samples, in the order of the model's inputs. One dictionary is
            arrays by name.
        outputs: the names of the outputs to return; all by default.
        batch_size: how many samples run at a time. A model of a fixed batch runs its own.
        device: as for `TrainingSession`.
        named: inputs by name.

    Returns:
        An array with a row for each sample; a tuple of them if there are several outputs.

    Examples:
        >>> scores = onnxtrain.predict("mobilenet.onnx", images)
        >>> scores.argmax(axis=1)

    """
    session = model if isinstance(model, ort.InferenceSession) else open_model(model, device)
    names = [value.name for value in session.get_outputs()]
    wanted = list(names if outputs is None else outputs)
    unknown = [name for name in wanted if name not in names]
    if unknown or not wanted:
        raise ArgumentError(
            f"outputs has {unknown or 'no name'}; the outputs of the model are {', '.join(names)}"
        )
    declared = [value_type(value) for value in session.get_inputs()]

    def run(samples: Sequence[Any]) -> Sequence[Array]:
        values = prepared(declared, samples)
        feeds = {v.name: held.numpy() for v, held in zip(declared, values, strict=True)}
        try:
            found: list[Array] = session.run(wanted, feeds)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise RunError(f"the model does not run on these samples: {error}") from None
        return found

    return _in_batches(run, declared, arranged(declared, inputs, named), wanted, batch_size)


def open_model(model: Model, device: str | Sequence[Any] = "cpu") -> ort.InferenceSession:
    """Load a model for inference."""
    source = ModelFile.read(model)
    given = bytes(source.data) if source.path is None else str(source.path)
    options = quiet_options(ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    try:
        return ort.InferenceSession(given, options, providers=providers_of(device)[0])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise ModelError(f"onnxruntime does not load {source.source_name}: {error}") from None


class Predictor:
    """The part of an evaluation graph that some outputs need, on the parameters of a module."""

    def __init__(self, module: Module, outputs: Sequence[str] | None) -> None:
        from onnxtrain.device.export.inference_model import cut_model

        evaluation = module.evaluation_executor
        if evaluation is None:
            raise StateError("there is no evaluation graph to predict with: pass eval_model")
        beside = names_of(evaluation, "outputs")[1:]
        self.outputs = list(beside if outputs is None else outputs)
        if not self.outputs:
            raise ArgumentError(
                "the artifacts return the loss alone: name the values to predict in outputs=[...]"
            )
        self._module = module
        evaluation.graph.require_open()
        graph = module.graph(cut_model(evaluation.graph.model, self.outputs))
        self._executor = EvalExecutor(graph, module.training_state)

    def close(self) -> None:
        """Free the graph and its memory."""
        self._executor.close()

    def input_names(self) -> list[str]:
        """The names of what the outputs are computed from."""
        return names_of(self._executor, "inputs")

    def __call__(self, inputs: Sequence[Any], named: Mapping[str, Any], batch_size: int) -> Any:
        """Return the outputs for some samples."""
        module, executor = self._module, self._executor

        def run(samples: Sequence[Any]) -> Sequence[Array]:
            found = module.run(executor, samples, {})
            return found if len(self.outputs) > 1 else (found,)

        declared = executor.signature.inputs
        given = arranged(declared, inputs, named)
        fixed = None if module.settings.automatic else module.settings.batch
        return _in_batches(run, declared, given, self.outputs, batch_size, fixed)


def _in_batches(
    run: Run,
    declared: Sequence[ValueType],
    given: Sequence[Any],
    outputs: Sequence[str],
    batch_size: int,
    fixed: int | None = None,
) -> Any:
    """Run on one batch after another, and join the results. `fixed` is the only size that runs."""
    arrays = [_array(value, data) for value, data in zip(declared, given, strict=True)]
    first = declared[0].dims[0] if declared and declared[0].dims else None
    fixed = first if isinstance(first, int) else fixed
    size = at_least(1, "batch_size", batch_size) if fixed is None else fixed
    count = _length(arrays[0]) if arrays else 0
    if count == fixed or (fixed is None and count <= size):
        found = list(run(arrays))
        return found[0] if len(found) == 1 else tuple(found)
    is_sample = [
        v.dims[0] == first if v.dims and first is not None else _length(array) == count
        for v, array in zip(declared, arrays, strict=True)
    ]
    _check_lengths(declared, arrays, is_sample)
    parts = []
    for start in range(0, count, size):
        # A fixed batch is filled up with copies of the last sample.
        stop = min(start + size, count)
        rows = slice(start, stop) if stop == start + size or fixed is None else np.minimum(
            np.arange(start, start + size), count - 1
        )  # fmt: skip
        batch = [a[rows] if of else a for a, of in zip(arrays, is_sample, strict=True)]
        ran = size if fixed is not None else stop - start
        parts.append([a[: stop - start] for a in _one_row_each(run(batch), outputs, ran)])
    joined = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
    return joined[0] if len(joined) == 1 else tuple(joined)


def _array(value: ValueType, data: Any) -> Array:
    if is_ortvalue(data):
        return np.asarray(data.numpy())
    if isinstance(data, np.ndarray) or value.element_type == STRING:
        return np.asarray(data)
    return converted(value, data)


def _length(array: Array) -> int:
    return array.shape[0] if array.ndim else -1


def _check_lengths(
    declared: Sequence[ValueType], arrays: Sequence[Array], is_sample: Sequence[bool]
) -> None:
    count = _length(arrays[0])
    for value, array, of in zip(declared, arrays, is_sample, strict=True):
        if of and _length(array) != count:
            raise InputError(
                f"the input {value.name!r} has {_length(array)} samples, and "
                f"{declared[0].name!r} has {count}"
            )
    if count < 1:
        raise InputError(f"the input {declared[0].name!r} has no samples")


def _one_row_each(found: Sequence[Array], outputs: Sequence[str], count: int) -> Sequence[Array]:
    """Return results, each of which has a row for each sample, so that batches can be joined."""
    for name, array in zip(outputs, found, strict=True):
        if np.ndim(array) == 0 or len(array) != count:
            raise InputError(
                f"the output {name!r} has the shape {list(np.shape(array))} for a batch of "
                f"{count}, and not one row for each sample: give a batch_size that all samples "
                "fit in, or choose other outputs"
            )
    return found
