"""Calibration: run a model of floats over some data, and see in which range each activation is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.loss_model import choose_outputs
from onnxtrain.offline.passes.quantize.histograms import BINS, METHODS
from onnxtrain.offline.quantize import Quantize
from onnxtrain.offline.writer.functions import write_functions
from onnxtrain.offline.writer.opset_stamp import stamp

Array = np.ndarray[Any, Any]
Range = tuple[float, float]
MOST_BATCHES = 512


def observe(
    model: ir.Model, values: Sequence[ir.Value], data: Iterable[Any], settings: Quantize
) -> dict[ir.Value, Range]:
    """Return the range of each value, over batches of the inputs of the model."""
    if not values:
        return {}
    run = _session(model, [str(v.name) for v in values])
    wanted = {entry.name: entry for entry in run.get_inputs()}
    batches = list(as_batches(data, list(wanted)))
    _require_variety(batches)
    names = [str(v.name) for v in values]
    lows, highs = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    for number, found in enumerate(_results(run, batches)):
        for i, array in enumerate(found):
            if not np.isfinite(array).all():
                raise ArgumentError(
                    f"with batch {number} of the calibration data, {names[i]!r} has elements that "
                    "are not finite: the model overflows on these data, or they are not what it "
                    "takes"
                )
            if array.size:
                lows[i], highs[i] = min(lows[i], array.min()), max(highs[i], array.max())
    method = METHODS.get(settings.method)
    if method is None:
        ranges = [_widened(low, high) for low, high in zip(lows, highs, strict=True)]
        return dict(zip(values, ranges, strict=True))
    counts = [np.zeros(BINS) for _ in names]
    for found in _results(run, batches):
        for i, array in enumerate(found):
            counts[i] += np.histogram(array, BINS, _widened(lows[i], highs[i]))[0]
    return {
        value: _widened(*method(count, *_widened(low, high), settings))
        for value, count, low, high in zip(values, counts, lows, highs, strict=True)
    }


def _widened(low: float, high: float) -> Range:
    """Return a range that has 0 in it, and is not empty."""
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    return (low, high) if high > low else (0.0, 1.0)


def _session(model: ir.Model, names: Sequence[str]) -> ort.InferenceSession:
    part = model.clone()
    choose_outputs(part.graph, names)
    sweep(part.graph)
    used = {v for node in part.graph.all_nodes() for v in node.inputs} | set(part.graph.outputs)
    for value in [v for v in part.graph.inputs if v not in used]:
        part.graph.inputs.remove(value)  # what the loss alone reads
    write_functions(part, native=False)
    stamp(part)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    proto = ir.to_proto(part)
    return ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _results(
    run: ort.InferenceSession, batches: Sequence[Mapping[str, Array]]
) -> Iterator[list[Array]]:
    types = {entry.name: entry.type for entry in run.get_inputs()}
    for number, batch in enumerate(batches):
        feeds = {name: _typed(array, types[name]) for name, array in batch.items()}
        try:
            yield run.run(None, feeds)
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            raise ArgumentError(
                f"batch {number} of the calibration data does not fit the model: {error}"
            ) from None


def _typed(array: Array, kind: str) -> Array:
    element = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
    return np.ascontiguousarray(array, element.get(kind, array.dtype))


def as_batches(data: Iterable[Any], names: Sequence[str]) -> Iterator[dict[str, Array]]:
    """Yield batches by the names of inputs; what comes behind them, such as labels, is left out."""
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise ArgumentError(
            "calibration is a list of batches, or what makes one: each an array, a tuple of the "
            f"inputs {', '.join(names)}, or a dictionary; not {type(data).__name__}"
        )
    number = -1
    for number, batch in enumerate(islice(data, MOST_BATCHES)):
        given = batch if isinstance(batch, Mapping) else _by_position(batch, names)
        missing = [name for name in names if name not in given]
        if missing:
            raise ArgumentError(
                f"batch {number} of the calibration data has no {missing[0]!r}: it needs "
                f"{', '.join(names)}"
            )
        found = {name: np.asarray(given[name]) for name in names}
        for name, array in found.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ArgumentError(
                    f"batch {number} of the calibration data has elements of {name!r} that are "
                    "not finite (NaN or infinite): leave such samples out"
                )
        yield found
    if number < 0:
        raise ArgumentError(
            "the calibration data have no batch: give some that are like those of training, a "
            "hundred samples in all will do"
        )


def _by_position(batch: Any, names: Sequence[str]) -> dict[str, Any]:
    given = batch if isinstance(batch, tuple | list) else [batch]
    return dict(zip(names, given, strict=False))


def _require_variety(batches: Sequence[Mapping[str, Array]]) -> None:
    """Refuse data in which an input never changes, from which nothing can be learned."""
    for name in batches[0]:
        arrays = [b[name] for b in batches if b[name].size]
        if not arrays:
            raise ArgumentError(f"the calibration data have no elements of {name!r}")
        first = arrays[0].flat[0]
        if arrays[0].dtype.kind == "f" and all((a == first).all() for a in arrays):
            raise ArgumentError(
                f"all elements of {name!r} in the calibration data are {first}: give samples like "
                "those of training"
            )
