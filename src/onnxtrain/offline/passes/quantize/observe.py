"""Calibration: run a model of floats over some data, and see in which range each activation is.

The graph itself computes the least and largest element of each activation. Where histograms are
needed, the data run a second time, and activations are returned a few at a time, so that those of
one batch never exist together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.runs import in_runs
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.loss_model import values_by_name
from onnxtrain.offline.passes.quantize.batches import Batch, Batches, CalibrationInput
from onnxtrain.offline.passes.quantize.histograms import BINS, METHODS, count
from onnxtrain.offline.quantize import Quantize
from onnxtrain.offline.writer.open_model import open_model

Array = np.ndarray[Any, Any]
Range = tuple[float, float]
_AT_ONCE = 1 << 26  # elements of activations that are returned together


def observe(
    model: ir.Model, values: Sequence[ir.Value], data: Any, settings: Quantize
) -> dict[ir.Value, Range]:
    """Return the range of each value, over batches of the inputs of the model."""
    if not values:
        return {}
    method = METHODS.get(settings.method)
    seen = Calibration(model, values, data, is_run_again=method is not None)
    ranges = seen.ranges
    if method is not None:
        counts = [np.zeros(BINS) for _ in values]
        for place, array in seen.activations():
            counts[place] += count(array, *ranges[place])
        ranges = [
            _widened(*method(found, *bounds, settings))
            for found, bounds in zip(counts, ranges, strict=True)
        ]
    return dict(zip(values, ranges, strict=True))


class Calibration:
    """A model that has run over data: the range of some values, and then the values themselves."""

    def __init__(
        self, model: ir.Model, values: Sequence[ir.Value], data: Any, *, is_run_again: bool
    ) -> None:
        self._model, self._names = model, [str(v.name) for v in values]
        run = _session(model, self._names, extremes=True)
        inputs = [CalibrationInput(i.name, i.type, i.shape) for i in run.get_inputs()]
        batches = Batches(data, inputs)
        self.batches: Iterable[Batch] = list(batches) if is_run_again else batches
        least, largest, self._sizes = _extremes(run, self.batches, self._names)
        batches.require_variety()
        self.ranges = [_widened(low, high) for low, high in zip(least, largest, strict=True)]

    def activations(self) -> Iterator[tuple[int, Array]]:
        """Yield the values that each batch makes, with their place in the list of values."""
        run = _session(self._model, self._names, extremes=False)
        places = range(len(self._names))
        for number, batch in enumerate(self.batches):
            for group in in_runs(places, lambda place: int(self._sizes[place]), _AT_ONCE):
                found = _run(run, [self._names[i] for i in group], batch, number)
                yield from zip(group, found, strict=True)


def _extremes(
    run: ort.InferenceSession, batches: Iterable[Batch], names: Sequence[str]
) -> tuple[Array, Array, Array]:
    """Return the least and largest element of each activation, and its size in a batch."""
    least, largest = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    sizes = np.zeros(len(names), np.int64)
    for number, batch in enumerate(batches):
        found = np.array(_run(run, None, batch, number), np.float64).reshape(len(names), 4)
        low, high, is_finite, size = found.T
        if not (np.isfinite(low) & np.isfinite(high) & (is_finite == 0)).all():
            first = int(np.argmin(np.isfinite(low) & np.isfinite(high) & (is_finite == 0)))
            raise ArgumentError(
                f"with batch {number} of the calibration data, {names[first]!r} has elements that "
                "are not finite: the model overflows on these data, or they are not what it takes"
            )
        least, largest = np.minimum(least, low), np.maximum(largest, high)
        sizes = np.maximum(sizes, size.astype(np.int64))
    return least, largest, sizes


def _widened(low: float, high: float) -> Range:
    """Return a range that has 0 in it, and is not empty."""
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    return (low, high) if high > low else (0.0, 1.0)


def _session(model: ir.Model, names: Sequence[str], *, extremes: bool) -> ort.InferenceSession:
    """Return the part of a model that computes some values, or what there is to know of them."""
    part = model.clone()
    graph, values = part.graph, values_by_name(part.graph)
    wanted = [values[name] for name in names]
    if extremes:
        op = Ops(graph, part.opset_imports[""])
        op.scope = "calibration"
        wanted = [found for value in wanted for found in _known_of(op, value)]
    graph.outputs.clear()
    graph.outputs.extend(wanted)
    sweep(graph)
    used = {v for node in graph.all_nodes() for v in node.inputs} | set(graph.outputs)
    for value in [v for v in graph.inputs if v not in used]:
        graph.inputs.remove(value)  # what the loss alone reads
    ir.external_data.load_to_model(part)
    return open_model(part)


def _known_of(op: Ops, value: ir.Value) -> list[ir.Value]:
    """Return the least and largest element, 0 if all are finite, and how many there are."""
    found = [
        op.ReduceMin(value, keepdims=0),
        op.ReduceMax(value, keepdims=0),
        op.ReduceSum(op.Mul(value, 0.0), keepdims=0),
        op.Cast(op.Size(value), to=ir.DataType.FLOAT),
    ]
    for scalar in found:
        scalar.dtype, scalar.shape = ir.DataType.FLOAT, ir.Shape([])
    return found


def _run(
    run: ort.InferenceSession, names: Sequence[str] | None, batch: Batch, number: int
) -> list[Array]:
    try:
        found: list[Array] = run.run(names, batch)
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise ArgumentError(
            f"batch {number} of the calibration data does not fit the model: {error}"
        ) from None
    return found
