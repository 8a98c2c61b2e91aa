"""Where a model is quantized: the places for which onnxruntime has kernels of integers.

A *product* (Conv, Gemm, MatMul) runs on integers if its inputs and its result are quantized. Around
products, sums, averages and concatenations follow where all that they read is quantized already,
and what only moves elements (MaxPool, Reshape, Transpose) passes integers on, with the same range.
The rest computes in floats.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.offline.frontend.torch_notes import module_of
from onnxtrain.offline.graph.op_facts import (
    COSTLY,
    INTEGER_ARITHMETIC,
    INTEGER_PRODUCTS,
    KEEPS_RANGE,
    RANGE_BOUNDS,
)
from onnxtrain.offline.graph.shapes import static_dims
from onnxtrain.offline.graph.subgraphs import ancestors
from onnxtrain.offline.quantize import Quantize


@dataclass(frozen=True, eq=False)
class QuantizedLayer:
    """A product that runs on integers, or on floats by integer weights."""

    node: ir.Node
    weight: ir.Value | None  # None where both inputs are data
    axis: int = 0  # of the weight, along which outputs lie

    @property
    def data(self) -> list[ir.Value]:
        """The inputs that are no weights."""
        given = [v for v in self.node.inputs[:2] if v is not None]
        return [v for v in given if v is not self.weight]


@dataclass
class Places:
    """What of a model is quantized, and why the rest is not."""

    layers: list[QuantizedLayer] = field(default_factory=list)
    # Each activation that is quantized, with the one whose range it shares, maybe itself.
    activations: dict[ir.Value, ir.Value] = field(default_factory=dict)
    others: list[ir.Node] = field(default_factory=list)  # sums and such that follow
    floats: dict[ir.Node, str] = field(default_factory=dict)  # products that stay, and the reason


def find_places(model: ir.Model, outputs: Collection[str], settings: Quantize) -> Places:
    """Find what to quantize in the part of a canonical model that makes `outputs`."""
    return _Search(model, outputs, settings).places


class _Search:
    def __init__(self, model: ir.Model, outputs: Collection[str], settings: Quantize) -> None:
        self._graph, self._settings = model.graph, settings
        made = {v.name: n for n in model.graph for v in n.outputs}
        inside = ancestors([made[name] for name in outputs if name in made])
        self._nodes = [n for n in model.graph if n in inside]
        self._outputs = set(outputs)
        self.places = Places()
        for node in self._nodes:
            if node.domain == "" and node.op_type in COSTLY:
                self._product(node)
        if settings.has_integer_activations:
            for layer in self.places.layers:
                self._around(layer)
            self._spread()

    # ---- products --------------------------------------------------------------------------------

    def _product(self, node: ir.Node) -> None:
        reason = self._why_float(node)
        if reason:
            self.places.floats[node] = reason
            return
        weight, is_data = node.inputs[1], not _is_parameter(node.inputs[1])
        if not is_data and weight is not None:
            self.places.layers.append(QuantizedLayer(node, weight, _output_axis(node)))
        elif self._settings.has_integer_activations:
            self.places.layers.append(QuantizedLayer(node, None))

    def _why_float(self, node: ir.Node) -> str:
        """Say why a product stays in floats, or nothing."""
        if node.op_type not in INTEGER_PRODUCTS:
            return "onnxruntime has no kernel for it on 8-bit integers"
        x, weight = node.inputs[0], node.inputs[1]
        if x is None or weight is None or x.dtype != ir.DataType.FLOAT:
            return f"its input is {x.dtype if x is not None else 'missing'}, not float32"
        if self._is_excluded(node):
            return "excluded"
        if not self._settings.first and self._reads_input(x):
            return "it reads an input of the model (first=False)"
        if not self._settings.last and self._makes_output(node):
            return "it makes an output of the model (last=False)"
        if not _is_parameter(x) and not _is_parameter(weight):
            if node.op_type == "MatMul":
                return ""
            return "its weight is computed"
        if _is_parameter(x):
            return "its first input is a parameter"
        if node.op_type == "Gemm":
            return _why_float_gemm(node)
        if node.op_type == "MatMul" and len(static_dims(weight) or ()) != 2:
            return "its weight is no matrix"
        if node.op_type == "Conv" and len(node.inputs) > 2 and not _is_parameter(node.inputs[2]):
            return "its bias is computed"
        return ""

    def _is_excluded(self, node: ir.Node) -> bool:
        weight = node.inputs[1]
        names = [node.name or "", module_of(node) or "", (weight.name or "") if weight else ""]
        names += [name.removesuffix(".weight") for name in names]
        return any(
            fnmatch.fnmatchcase(name, pattern)
            for pattern in self._settings.excluded
            for name in names
            if name
        )

    def _reads_input(self, value: ir.Value) -> bool:
        return not any(n.op_type in COSTLY for n in ancestors(_makers([value])))

    def _makes_output(self, node: ir.Node) -> bool:
        waiting, seen = [node], {node}
        while waiting:
            for value in waiting.pop().outputs:
                if value.name in self._outputs:
                    return True
                for user, _ in value.uses():
                    if user not in seen and user.op_type not in COSTLY:
                        seen.add(user)
                        waiting.append(user)
        return False

    # ---- activations -----------------------------------------------------------------------------

    def _around(self, layer: QuantizedLayer) -> None:
        """Quantize what a product reads and what it makes."""
        for value in layer.data:
            self._quantize(value)
        made = self._behind_bounds(layer.node.outputs[0])
        if not self._stays_float(layer.node, made):
            self._quantize(made)

    def _stays_float(self, node: ir.Node, made: ir.Value) -> bool:
        """Outputs of the model stay floats where the integer kernel can make floats."""
        return made.name in self._outputs and node.op_type in ("Gemm", "MatMul")

    def _behind_bounds(self, value: ir.Value) -> ir.Value:
        """Return what Relu or Clip make of a value that nothing else reads."""
        while value.name not in self._outputs:
            users = [user for user, _ in value.uses()]
            if len(users) != 1 or users[0].domain or users[0].op_type not in RANGE_BOUNDS:
                break
            value = users[0].outputs[0]
        return value

    def _quantize(self, value: ir.Value, range_of: ir.Value | None = None) -> None:
        places = self.places.activations
        if value not in places and value.dtype == ir.DataType.FLOAT and not _is_parameter(value):
            source = value if range_of is None else range_of
            places[value] = places.get(source, source)

    def _join(self, value: ir.Value, source: ir.Value) -> None:
        """Let a value, and all that shares its range, have that of another."""
        known = self.places.activations
        old, new = known[value], known[source]
        for other, root in list(known.items()):
            if root is old:
                known[other] = new

    def _spread(self) -> None:
        """Let what is between products follow, until nothing changes."""
        while True:
            before = len(self.places.activations) + len(self.places.others)
            for node in self._nodes:
                self._follow(node)
            for node in reversed(self._nodes):
                self._pass_back(node)
            if len(self.places.activations) + len(self.places.others) == before:
                return

    def _follow(self, node: ir.Node) -> None:
        known, op_type = self.places.activations, node.op_type
        if node.domain or not node.inputs or node in self.places.others:
            return
        x = node.inputs[0]
        if op_type in KEEPS_RANGE and x in known and x is not None and _moves_floats(node):
            for output in node.outputs:
                if output in known:
                    self._join(output, x)
                elif output.name not in self._outputs:
                    self._quantize(output, x)
        elif op_type in INTEGER_ARITHMETIC:
            data = [v for v in node.inputs if v is not None and not _is_parameter(v)]
            is_whole = len(data) == sum(v is not None for v in node.inputs)
            if is_whole and all(v in known for v in data) and not self._is_excluded_plain(node):
                self.places.others.append(node)
                self._quantize(self._behind_bounds(node.outputs[0]))

    def _is_excluded_plain(self, node: ir.Node) -> bool:
        names = [node.name or "", module_of(node) or ""]
        return any(fnmatch.fnmatchcase(n, p) for p in self._settings.excluded for n in names if n)

    def _pass_back(self, node: ir.Node) -> None:
        """Quantize what is only moved before it is quantized, so that integers are moved."""
        x = node.inputs[0] if node.inputs else None
        if node.domain or node.op_type not in KEEPS_RANGE or x is None or _is_parameter(x):
            return
        known = self.places.activations
        if node.outputs[0] in known and x not in known and _moves_floats(node):
            known[x] = x
            self._join(node.outputs[0], x)


def _moves_floats(node: ir.Node) -> bool:
    return len(node.outputs) == 1 or node.op_type == "Split" or not node.outputs[1].uses()


def _why_float_gemm(node: ir.Node) -> str:
    read = node.attributes
    if read.get_float("alpha", 1.0) != 1.0 or read.get_float("beta", 1.0) != 1.0:
        return "it has factors alpha or beta"
    if read.get_int("transA", 0):
        return "its first input is transposed"
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and (not _is_parameter(bias) or len(static_dims(bias) or ()) != 1):
        return "its bias is no vector"
    return ""


def _is_parameter(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer()


def _output_axis(node: ir.Node) -> int:
    if node.op_type == "Conv":
        return 0
    return 0 if node.attributes.get_int("transB", 0) else 1


def _makers(values: Sequence[ir.Value]) -> Iterator[ir.Node]:
    for value in values:
        producer = value.producer()
        if producer is not None:
            yield producer


def unused_patterns(places: Places, settings: Quantize) -> list[str]:
    """Return the patterns of `exclude` that no layer has."""
    if any(reason == "excluded" for reason in places.floats.values()):
        return []
    return list(settings.excluded)


def bias_of(node: ir.Node) -> ir.Value | None:
    """Return the bias of a product."""
    has_bias = node.op_type in ("Conv", "Gemm") and len(node.inputs) > 2
    return node.inputs[2] if has_bias else None
