"""What the channels of layers would gain: the squares of their gradients, over a few batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.format.names import RANDOM_SEED
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.loss_gradients import LossGradients, differentiate_loss
from onnxtrain.offline.loss_model import values_by_name
from onnxtrain.offline.passes.sparse.layers import Array, SparseLayer
from onnxtrain.offline.writer.open_model import open_model

Batch = Mapping[str, Array]


def as_batches(data: Iterable[Any], names: Sequence[str], most: int) -> list[Batch]:
    """Return the first batches by the names of the inputs of the model with its loss."""
    found: list[Batch] = []
    for batch in islice(data, most):
        given = batch if isinstance(batch, Mapping) else _by_position(batch, names)
        missing = [name for name in names if name not in given]
        if missing:
            raise ArgumentError(
                f"a batch in the data of sparse has no {missing[0]!r}: it needs {', '.join(names)}"
            )
        found.append({name: np.asarray(given[name]) for name in names})
    if not found:
        raise ArgumentError("the data of sparse has no batch: leave it out, or give a few")
    return found


def _by_position(batch: Any, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != len(names):
        raise ArgumentError(
            f"a batch in the data of sparse is a tuple of {', '.join(names)}, or a dictionary"
        )
    return dict(zip(names, batch, strict=True))


def channel_gains(
    canonical: ir.Model, loss: str, layers: Sequence[SparseLayer], batches: Sequence[Batch]
) -> dict[str, Array]:
    """Return the gain of each channel, by the name of the weight of its layer."""
    source = differentiate_loss(canonical, [loss], [layer.weight for layer in layers], bn="frozen")
    run = _session(source, layers)
    feeds = {name: tensor.numpy() for name, tensor in source.tensors.items()}
    feeds[RANDOM_SEED] = np.zeros(2, np.uint32)
    gains = [np.zeros(layer.channels) for layer in layers]
    for batch in batches:
        wanted = {i.name: _typed({**feeds, **batch}[i.name], i.type) for i in run.get_inputs()}
        try:
            squares = run.run(None, wanted)
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            raise ArgumentError(
                f"a batch in the data of sparse does not fit the model: {error}"
            ) from None
        for gain, more in zip(gains, squares, strict=True):
            gain += more
    return {layer.weight: gain for layer, gain in zip(layers, gains, strict=True)}


def _session(source: LossGradients, layers: Sequence[SparseLayer]) -> Any:
    """Return a graph that computes the sum of squares of the gradient of each channel."""
    model = source.model
    graph = model.graph
    values, op = values_by_name(graph), Ops(graph, model.opset_imports[""])
    graph.outputs.clear()
    for layer in layers:
        gradient = values[source.gradients[layer.weight]]
        axes = [axis for axis in range(len(layer.dims)) if axis != layer.axis]
        squares = op.ReduceSumSquare(gradient, axes, keepdims=0)
        squares.dtype, squares.shape = ir.DataType.FLOAT, ir.Shape([layer.channels])
        graph.outputs.append(squares)
    return open_model(model)


_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(double)": np.float64}


def _typed(array: Array, kind: str) -> Array:
    dtype = _TYPES.get(kind)
    return array if dtype is None else array.astype(dtype, copy=False)
