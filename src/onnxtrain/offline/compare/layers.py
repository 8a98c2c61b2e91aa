"""Where two models differ: the error of every value that both compute.

Values are matched by their names. A model of integers has a value twice, before and after rounding:
the rounded one counts, as the layers behind it read that. Layers run one by one, without the
fusions of onnxruntime, which would leave most values out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from onnxtrain.offline.compare.difference import Difference
from onnxtrain.offline.compare.models import Feeds, OpenModel, open_session, options, run
from onnxtrain.offline.compare.report import Errors, LayerErrors
from onnxtrain.offline.compare.samples import Samples
from onnxtrain.offline.frontend.external_data import read_external_data
from onnxtrain.offline.graph.integer_operators import INTEGER_FORMS
from onnxtrain.offline.graph.op_facts import CONVERSIONS, LINEAR, RANGE_BOUNDS

Array = np.ndarray[Any, Any]
MOST_BYTES = 2**31 - 2**20  # of a protobuf message
SAMPLES = 128  # that layers are compared on
_AT_ONCE = 2**27  # bytes of values that are held for each model
_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)")
_INTEGERS = ("tensor(uint8)", "tensor(int8)", "tensor(uint16)", "tensor(int16)")


def compare_layers(
    first: OpenModel, second: OpenModel, samples: Samples, threads: int
) -> list[LayerErrors]:
    """Return the errors of values inside, the worst first."""
    tables = [_values(model) for model in (first, second)]
    shared = [name for name in tables[0] if name in tables[1] and _is_layer(name, tables)]
    readers = [
        _Reader(model, {name: table[name] for name in shared}, threads)
        for model, table in zip((first, second), tables, strict=True)
    ]
    names = [name for name in shared if all(name in reader.names for reader in readers)]
    differences = {name: Difference() for name in names}
    compared = set(names)
    for feeds in _batches(samples, readers, names):
        pairs = zip(*(reader.read(names, feeds) for reader in readers), strict=True)
        for name, (one, other) in zip(names, pairs, strict=True):
            if one.shape == other.shape:
                differences[name].add(one, other)
            else:
                compared.discard(name)
    errors = {n: d.errors() for n, d in differences.items() if n in compared}
    found = [_layer(name, errors, tables) for name in errors]
    return sorted(found, key=lambda layer: layer.errors.snr)


def _batches(samples: Samples, readers: Sequence[_Reader], names: Sequence[str]) -> Iterator[Feeds]:
    """Yield batches that are so small that all values of one fit into memory."""
    if not names:
        return
    probe = next(samples.some(1, 1))
    size = max(sum(a.nbytes for a in r.read(names, probe.feeds)) for r in readers)
    batch = max(1, min(32, _AT_ONCE * probe.samples // max(1, size)))
    for part in samples.some(SAMPLES, batch):
        yield part.feeds


def _layer(
    name: str, errors: Mapping[str, Errors], tables: Sequence[Mapping[str, _Value]]
) -> LayerErrors:
    values = [table[name] for table in tables]
    operator = next((v.operator for v in values if not v.is_conversion), values[0].operator)
    weight = next((v.weight for v in values if v.weight), None)
    table = tables[0] if not values[0].is_conversion else tables[1]
    return LayerErrors(name, operator, weight, errors[name], _snr_before(name, errors, table))


def _snr_before(name: str, errors: Mapping[str, Errors], table: Mapping[str, _Value]) -> float:
    """Return the least ratio among the values that a layer reads, as far as they are compared."""
    least, seen, waiting = math.inf, {name}, list(table[name].reads)
    while waiting:
        read = waiting.pop()
        if read in errors:
            least = min(least, errors[read].snr)
        elif read not in seen and read in table:
            waiting += table[read].reads
        seen.add(read)
    return least


# ---- the values of a model -----------------------------------------------------------------------


class _Value(NamedTuple):
    """A value that is computed from the inputs: what makes it, and how its floats are read."""

    operator: str
    weight: str | None
    fetched: str  # the value after it was rounded, if that follows
    reads: tuple[str, ...]
    scale: tuple[str, str] | None = None  # and zero point, of integers

    @property
    def is_conversion(self) -> bool:
        return self.operator in CONVERSIONS


def _is_layer(name: str, tables: Sequence[Mapping[str, _Value]]) -> bool:
    return not all(table[name].is_conversion for table in tables)


def _values(model: OpenModel) -> dict[str, _Value]:
    """Return the values of the main graph by the names that they have in a model of floats."""
    graph = model.proto.graph
    stored = {tensor.name for tensor in graph.initializer}
    rounded = _rounded(graph)
    changing = {value.name for value in graph.input if value.name not in stored}
    found: dict[str, _Value] = {}
    for node in graph.node:
        has_body = any(a.HasField("g") or a.graphs for a in node.attribute)
        if not has_body and not changing.intersection(node.input):
            continue
        changing.update(node.output)
        form = INTEGER_FORMS.get((node.domain, node.op_type))
        if form is not None:
            operands = _scale_of(node, form.result)
            if operands is not None:
                name = node.output[0].removesuffix("_quantized")
                found[name] = _Value(form.float_op, None, node.output[0], (), operands)
            continue
        if node.op_type == "QuantizeLinear":
            continue
        weight = _weight_of(node, stored, found)
        for name in filter(None, node.output):
            found[name] = _Value(node.op_type, weight, rounded.get(name, name), tuple(node.input))
    return found


def _rounded(graph: onnx.GraphProto) -> dict[str, str]:
    """Return what values become when they are quantized, and turned back to floats, at once."""
    integers = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    floats = {n.input[0]: n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    return {value: floats[q] for q, value in integers.items() if q in floats}


def _scale_of(node: onnx.NodeProto, places: tuple[int, int]) -> tuple[str, str] | None:
    scale, zero_point = (node.input[i] if i < len(node.input) else "" for i in places)
    return (scale, zero_point) if scale else None


def _weight_of(node: onnx.NodeProto, stored: set[str], before: Mapping[str, _Value]) -> str | None:
    """Return the weight of a layer, also for what follows the layer and is fused to it."""
    if node.domain not in ("", "ai.onnx") or not node.input:
        return None
    is_bias = node.op_type == "Add" and any(name in stored for name in node.input)
    if is_bias or node.op_type in RANGE_BOUNDS or node.op_type == "BatchNormalization":
        return next((before[name].weight for name in node.input if name in before), None)
    is_layer = node.op_type in LINEAR and len(node.input) > 1
    return node.input[1] if is_layer and node.input[1] in stored else None


# ---- reading them --------------------------------------------------------------------------------


class _Reader:
    """A model that returns the values inside it."""

    def __init__(self, model: OpenModel, values: Mapping[str, _Value], threads: int) -> None:
        proto = onnx.ModelProto()
        proto.CopyFrom(model.proto)
        if model.path is not None:
            read_external_data(proto, model.path)
        outputs = {value.name for value in proto.graph.output}
        fetched = dict.fromkeys(value.fetched for value in values.values())
        proto.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in fetched if name not in outputs
        )
        settings = options(threads, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
        self._session = open_session(proto, model.name, settings)
        self._model = model.name
        types = {value.name: value.type for value in self._session.get_outputs()}
        self._values = {
            name: value
            for name, value in values.items()
            if types[value.fetched] in (_INTEGERS if value.scale else _FLOATS)
        }
        stored = {tensor.name: tensor for tensor in proto.graph.initializer}
        wanted = {n for value in self._values.values() for n in value.scale or () if n in stored}
        self._stored = {name: numpy_helper.to_array(stored[name]) for name in wanted}

    @property
    def names(self) -> set[str]:
        """The values that can be read."""
        return {n for n, v in self._values.items() if not v.scale or v.scale[0] in self._stored}

    def read(self, names: Sequence[str], feeds: Feeds) -> list[Array]:
        """Return values for a batch."""
        fetched = list(dict.fromkeys(self._values[name].fetched for name in names))
        found = run(self._session, fetched, feeds, self._model)
        arrays = dict(zip(fetched, found, strict=True))
        return [self._floats(self._values[name], arrays) for name in names]

    def _floats(self, value: _Value, arrays: Mapping[str, Array]) -> Array:
        array = arrays[value.fetched]
        if value.scale is None:
            return array
        scale, zero_point = value.scale
        zero = self._stored.get(zero_point, np.zeros((), array.dtype))
        return np.asarray((array.astype(np.float32) - zero) * self._stored[scale])
