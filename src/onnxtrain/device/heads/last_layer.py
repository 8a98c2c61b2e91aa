"""The last layer of a model: a matrix product with what trains, whose result is the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.device.export.model_parts import (
    ModelParts,
    Node,
    NodeField,
    find_needed,
    take_apart,
)
from onnxtrain.errors import ArgumentError, StateError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.model.wire import Reader

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

# What may stand between the scores and an output: none of it changes which class is the first.
_AFTER = frozenset("Cast Flatten Identity LogSoftmax Reshape Sigmoid Softmax Squeeze".split())
# How the evaluation graph of a model that trains for integers rounds weights and biases.
_ROUNDING = frozenset("Cast Clip DequantizeLinear Div QuantizeLinear Round".split())
_PREPARE = "prepare the model with classes=..., which gives it such a layer"


@dataclass(frozen=True)
class LastLayer:
    """A linear layer: `scores = features @ weight + bias`, or with the weight transposed."""

    features: str
    scores: str
    weight: str
    bias: str | None
    is_transposed: bool  # whether the weight has a row for each score

    def assign(self, session: TrainingSession, weight: Array, bias: Array) -> None:
        """Set the parameters; `weight` has a column for each score."""
        oriented = weight.T if self.is_transposed else weight
        parameters = session.state.parameters
        values = {self.weight: oriented}
        if self.bias is not None:
            values[self.bias] = bias.reshape(parameters[self.bias].data.shape)
        for name, value in values.items():
            held = parameters[name].data
            parameters[name] = np.ascontiguousarray(value, held.dtype)


def find_last_layer(session: TrainingSession, weight: str | None = None) -> LastLayer:
    """Return the layer that makes the scores; `weight` names its matrix where there are several."""
    executor = session.module.evaluation_executor
    if executor is None:
        raise StateError("there is no evaluation graph to compute features with: pass eval_model")
    if executor.graph.model.is_ort:
        raise ArgumentError(
            "fit_head takes graphs apart, and these are in the ORT format: load the .onnx files of "
            "the folder"
        )
    found = _Search(session, take_apart(executor.graph.model)).layers()
    if weight is not None:
        found = [layer for layer in found if layer.weight == weight]
    if not found:
        wanted = "" if weight is None else f" with the weight {weight!r}"
        raise ArgumentError(
            f"no linear layer{wanted} that trains makes the scores: the last layer has to be a "
            f"Gemm or MatMul whose weight and bias train. Either train it, or {_PREPARE}"
        )
    if len(found) > 1:
        names = ", ".join(repr(layer.weight) for layer in found)
        raise ArgumentError(f"several layers make outputs: say which one is meant, layer={names}")
    return found[0]


class _Search:
    """Looks through an evaluation graph for layers whose result is an output."""

    def __init__(self, session: TrainingSession, parts: ModelParts) -> None:
        self._parts = parts
        self._reader = Reader(parts.source_name)
        self._outputs = frozenset(session.output_names(training=False)[1:])
        state = session.module.training_state
        self._trained = {name: state.type_of(name)[0] for name in state.trainable_names()}
        self._made_by = {name: node for node in parts.nodes for name in node.outputs}

    def layers(self) -> list[LastLayer]:
        """Return the layers that make outputs."""
        found = (self._layer(node) for node in self._parts.nodes)
        last = [layer for layer in found if layer is not None and self._is_output(layer.scores)]
        for layer in last:
            self._require_moving_scale(layer)
        return last

    def _layer(self, node: Node) -> LastLayer | None:
        kind = _kind(node)
        if kind not in ("Gemm", "MatMul") or len(node.inputs) < 2:
            return None
        weight, is_transposed = self._matrix(node.inputs[1])
        if weight is None:
            return None
        if kind == "MatMul":
            scores, bias = self._added(node.outputs[0])
            return LastLayer(node.inputs[0], scores, weight, bias, is_transposed)
        attributes = self._attributes(node)
        plain = {"transA": 0, "alpha": 1.0, "beta": 1.0}
        if any(attributes.get(name, value) != value for name, value in plain.items()):
            return None
        bias = self._before_rounding(node.inputs[2]) if len(node.inputs) > 2 else None
        bias = bias or None  # an empty name is no bias
        if bias is not None and bias not in self._trained:
            return None
        is_transposed ^= bool(attributes.get("transB", 0))
        return LastLayer(node.inputs[0], node.outputs[0], weight, bias, is_transposed)

    def _matrix(self, name: str) -> tuple[str | None, bool]:
        """Return the parameter that a value is, and whether it is transposed."""
        name = self._before_rounding(name)
        if len(self._trained.get(name, ())) == 2:
            return name, False
        node = self._made_by.get(name)
        if node is None or _kind(node) != "Transpose":
            return None, False
        source = node.inputs[0]
        return (source, True) if len(self._trained.get(source, ())) == 2 else (None, False)

    def _before_rounding(self, name: str) -> str:
        """Return the parameter that a value was rounded from; the value itself if it was not."""
        found = name
        while found not in self._trained:
            node = self._made_by.get(found)
            if node is None or _kind(node) not in _ROUNDING:
                return name
            found = node.inputs[0]
        return found

    def _require_moving_scale(self, layer: LastLayer) -> None:
        """Refuse a layer whose new weights would be clipped to the range of the old ones."""
        readers = self._readers(layer.weight)
        quantizer = next((node for node in readers if _kind(node) == "QuantizeLinear"), None)
        if quantizer is None:
            return
        if layer.weight not in find_needed(self._parts, quantizer.inputs[1:2]).values:
            raise ArgumentError(
                f"the integers of {layer.weight!r} have a scale of their own, which fit_head does "
                "not change: prepare with quantize='int8:scales=average', or leave the last layer "
                "in floats (last=False)"
            )

    def _added(self, product: str) -> tuple[str, str | None]:
        """Return the value behind the addition of a bias, and the bias, if one is added."""
        readers = self._readers(product)
        if len(readers) == 1 and _kind(readers[0]) == "Add":
            (other,) = [n for n in readers[0].inputs if n != product] or [""]
            shape = self._trained.get(other)
            if shape and max(shape) == math.prod(shape):  # a vector, with whatever axes of 1
                return readers[0].outputs[0], other
        return product, None

    def _is_output(self, value: str) -> bool:
        """Whether a value is an output, but for what keeps the order of scores."""
        if value in self._outputs:
            return True
        return any(
            _kind(node) in _AFTER and node.inputs[0] == value and self._is_output(node.outputs[0])
            for node in self._readers(value)
        )

    def _readers(self, value: str) -> Sequence[Node]:
        return [node for node in self._parts.nodes if value in node.reads]

    def _attributes(self, node: Node) -> Mapping[str, Any]:
        """Return the attributes of a node that are single numbers."""
        reader, found = self._reader, {}
        for part in reader.fields(node.data, "node"):
            if part.number == NodeField.ATTRIBUTE:
                message = reader.message(part, "attribute")
                name, value = "", 0.0
                for field in reader.fields(message, "attribute"):
                    if field.number == 1:
                        name = reader.text(field, "attribute.name")
                    elif field.number == 2:  # a float, whose bits are read
                        value = float(np.array(field.value, np.uint32).view(np.float32))
                    elif field.number == 3:
                        value = reader.int64(field, "attribute.i")
                found[name] = value
        return found


def _kind(node: Node) -> str:
    """Return the standard operator of a node; "" for others and those with bodies."""
    (call,) = node.calls if len(node.calls) == 1 else (None,)
    return call.name if call is not None and call.domain == "" else ""
