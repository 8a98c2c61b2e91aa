"""Where a model is quantized: the places for which onnxruntime has kernels of integers.

A *product* (Conv, Gemm, MatMul) runs on integers if its inputs are quantized; that of Conv needs an
integer result as well, while Gemm and MatMul may return floats to what computes with floats, such
as Softmax, Gelu and norms. Around products, sums, averages and concatenations follow where all that
they read is made of integers, or where their result is to be, and what only moves elements
(MaxPool, Reshape, Transpose) passes integers on, with the same range. The rest computes in floats.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArgumentError
from onnxtrain.offline.frontend.torch_notes import folded_from, module_of
from onnxtrain.offline.graph.op_facts import (
    CONTROL,
    COSTLY,
    INTEGER_ARITHMETIC,
    INTEGER_PRODUCTS,
    JOINED_TO_GEMM,
)
from onnxtrain.offline.graph.shapes import constant_array, dims_of, is_half, static_dims
from onnxtrain.offline.graph.subgraphs import ancestors, subgraphs_of
from onnxtrain.offline.passes.quantize.bounds import bounds_of, keeps_range
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
    # Numbers that these read, by position: constants that are quantized too.
    constants: list[tuple[ir.Node, int]] = field(default_factory=list)
    floats: dict[ir.Node, str] = field(default_factory=dict)  # products that stay, and the reason
    # Activations that exist as floats too, with the nodes that read them as integers.
    integer_readers: dict[ir.Value, set[ir.Node]] = field(default_factory=dict)


def find_places(
    model: ir.Model, outputs: Collection[str], settings: Quantize, trains: Collection[str] = ()
) -> Places:
    """Find what to quantize in the part of a canonical model that makes `outputs`."""
    return _Search(model, outputs, settings, trains).places


class _Search:
    def __init__(
        self,
        model: ir.Model,
        outputs: Collection[str],
        settings: Quantize,
        trains: Collection[str],
    ) -> None:
        self._settings, self._trains = settings, trains
        made = {v.name: n for n in model.graph for v in n.outputs}
        inside = ancestors([made[name] for name in outputs if name in made])
        self._nodes = [n for n in model.graph if n in inside]
        self._outputs = set(outputs)
        self.places = Places()
        self._unused = dict.fromkeys(settings.excluded)
        self._names: dict[str, None] = {}
        self._on_integers: set[ir.Node] = set()
        for node in self._nodes:
            if node.domain == "" and node.op_type in COSTLY:
                self._product(node)
        if settings.has_integer_activations:
            for layer in self.places.layers:
                self._around(layer)
            self._spread()
            self._find_readers()
        self._require_use_of_patterns()

    # ---- products --------------------------------------------------------------------------------

    def _product(self, node: ir.Node) -> None:
        if node.op_type in CONTROL and not _has_products(node):
            return
        reason = self._why_float(node)
        if reason:
            self.places.floats[node] = reason
            return
        weight, is_data = node.inputs[1], not _is_parameter(node.inputs[1])
        if not is_data and weight is not None:
            self.places.layers.append(QuantizedLayer(node, weight, _output_axis(node)))
            self._on_integers.add(node)
        elif self._settings.has_integer_activations:
            self.places.layers.append(QuantizedLayer(node, None))
            self._on_integers.add(node)

    def _why_float(self, node: ir.Node) -> str:
        """Say why a product stays in floats, or nothing."""
        if node.op_type in CONTROL:
            return "layers in its bodies stay as they are"
        if node.op_type not in INTEGER_PRODUCTS:
            return "onnxruntime has no kernel for it on 8-bit integers"
        if self._is_excluded(node):
            return "excluded"
        x, weight = node.inputs[0], node.inputs[1]
        if x is None or weight is None or x.dtype != ir.DataType.FLOAT:
            return _why_float_type(x)
        if not self._settings.first and self._reads_input(x):
            return "it reads an input of the model (first=False)"
        if not self._settings.last and self._makes_output(node):
            return "it makes an output of the model (last=False)"
        if not _is_parameter(x) and not _is_parameter(weight):
            if node.op_type == "MatMul" and self._settings.has_integer_activations:
                return ""
            return "its weight is computed"
        if _is_parameter(x):
            return "its first input is a parameter"
        if node.op_type == "Gemm":
            is_int4 = self._settings.weights == "int4"
            return _why_float_gemm(node) or (_why_not_turned(node) if is_int4 else "")
        if node.op_type == "MatMul" and len(static_dims(weight) or ()) != 2:
            return "its weight is no matrix"
        if node.op_type == "Conv" and len(node.inputs) > 2 and not _is_parameter(node.inputs[2]):
            return "its bias is computed"
        return ""

    def _is_excluded(self, node: ir.Node) -> bool:
        names = _names_of(node)
        self._names.update(dict.fromkeys(names))
        found = [
            pattern
            for pattern in self._settings.excluded
            if any(fnmatch.fnmatchcase(name, pattern) for name in names)
        ]
        for pattern in found:
            self._unused.pop(pattern, None)
        return bool(found)

    def _require_use_of_patterns(self) -> None:
        if not self._unused:
            return
        near = [get_close_matches(p.rstrip("*?."), self._names, 3, 0.5) for p in self._unused]
        wrong = [
            f"{pattern!r}" + (f" (did you mean {' or '.join(map(repr, some))}?)" if some else "")
            for pattern, some in zip(self._unused, near, strict=True)
        ]
        shown = list(self._names)[:4]
        raise ArgumentError(
            f"quantize: exclude has {', '.join(wrong)}, which no layer is called. Layers are "
            f"called {', '.join(map(repr, shown))}{' …' if len(self._names) > 4 else ''}"
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
        """Quantize what a product reads and, if its kernel makes nothing else, its result."""
        for value in layer.data:
            self._quantize(before_dropout(value))
        result = layer.node.outputs[0]
        if layer.node.op_type == "Conv" or self._is_joined(layer.node):
            self._quantize(self._behind_bounds(result))

    def _is_joined(self, node: ir.Node) -> bool:
        """Whether onnxruntime would make one operator, of floats, of Gemm and what is behind it."""
        users = [user for user, _ in node.outputs[0].uses()]
        is_read_once = len(users) == 1 and node.outputs[0].name not in self._outputs
        return is_read_once and not users[0].domain and users[0].op_type in JOINED_TO_GEMM

    def _behind_bounds(self, value: ir.Value) -> ir.Value:
        """Return what Relu or Clip make of a value that nothing else reads."""
        while value.name not in self._outputs:
            users = [user for user, _ in value.uses()]
            if len(users) != 1 or bounds_of(users[0]) is None:
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
        if keeps_range(node) and x in known and x is not None and _moves_floats(node):
            for output in node.outputs:
                if output in known:
                    self._join(output, x)
                elif output.name not in self._outputs and self._is_computed(x):
                    self._quantize(output, x)
        elif op_type in INTEGER_ARITHMETIC and self._takes_integers(node):
            self.places.others.append(node)
            self._on_integers.add(node)
            self._quantize(self._behind_bounds(node.outputs[0]))

    def _takes_integers(self, node: ir.Node) -> bool:
        """Tell whether all that a node reads can be integers, and let it be."""
        known, made = self.places.activations, self._behind_bounds(node.outputs[0])
        given = [v for v in node.inputs if v is not None]
        numbers = [v for v in given if v not in known and self._is_number(v)]
        missing = [v for v in given if v not in known and v not in numbers]
        if made.name in self._outputs or len(numbers) == len(given) or self._is_excluded(node):
            return False
        if made in known:
            if not all(self._is_computed(v) or _is_worth_it(v, node) for v in missing):
                return False
            if not any(v in known or self._is_computed(v) for v in given):
                return False
        # A result that is for floats is worth it only if floats would have to be made first.
        elif numbers or not self._are_integers(given):
            return False
        for value in missing:
            self._quantize(value)
        self.places.constants += [(node, i) for i, v in enumerate(node.inputs) if v in numbers]
        return True

    def _are_integers(self, values: Sequence[ir.Value]) -> bool:
        """Whether values are quantized, or may be, and one of them exists as integers alone."""
        known = self.places.activations
        if not all(v in known or self._is_computed(v) for v in values):
            return False
        return any(v in known and self._is_computed(v) for v in values)

    def _is_computed(self, value: ir.Value) -> bool:
        """Whether kernels of integers make a value, whatever moves or bounds it behind them."""
        node = value.producer()
        while node is not None and not node.domain:
            if not keeps_range(node) and bounds_of(node) is None:
                break
            node = None if node.inputs[0] is None else node.inputs[0].producer()
        return node in self._on_integers

    def _find_readers(self) -> None:
        """Note who reads integers of an activation that exists as floats too."""
        known = self.places.activations
        for value, root in known.items():
            if not self._is_computed(value):
                users = [user for user, _ in value.uses()]
                self.places.integer_readers[value] = {
                    user
                    for user in users
                    if user in self._on_integers
                    or user.op_type == "Dropout"
                    or any(known.get(output) is root for output in user.outputs)
                }

    def _is_number(self, value: ir.Value | None) -> bool:
        """Whether a value is one number that no training changes."""
        array = constant_array(value)
        if value is None or array is None or value.name in self._trains:
            return False
        return array.size == 1 and bool(np.isfinite(array).all())

    def _pass_back(self, node: ir.Node) -> None:
        """Quantize what is only moved before it is quantized, so that integers are moved."""
        x = node.inputs[0] if node.inputs else None
        if not keeps_range(node) or x is None or _is_parameter(x):
            return
        known = self.places.activations
        if node.outputs[0] in known and x not in known and _moves_floats(node):
            known[x] = x
            self._join(node.outputs[0], x)


def _has_products(node: ir.Node) -> bool:
    """Whether there are layers in the bodies of a node."""
    bodies = subgraphs_of(node)
    inner = [n for body in bodies for graph in (body, *body.subgraphs()) for n in graph]
    return any(n.op_type in COSTLY - CONTROL for n in inner)


def _moves_floats(node: ir.Node) -> bool:
    return len(node.outputs) == 1 or node.op_type == "Split" or not node.outputs[1].uses()


def _names_of(node: ir.Node) -> list[str]:
    """Return what a layer is called: its node, its module, and its weight, with and without."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    names = [node.name or "", module_of(node)]
    if weight is not None and weight.is_initializer():
        names += [weight.name or "", *folded_from(weight)]
    names += [name.removesuffix(".weight") for name in names]
    return list(dict.fromkeys(name for name in names if name))


def before_dropout(value: ir.Value) -> ir.Value:
    """Return what Dropout reads: it is not there when the model is deployed."""
    node = value.producer()
    while node is not None and (node.domain, node.op_type) == ("", "Dropout"):
        x = node.inputs[0]
        if x is None:
            break
        value, node = x, x.producer()
    return value


def _is_worth_it(value: ir.Value, node: ir.Node) -> bool:
    """Whether to quantize a value made of floats, so that a node behind it runs on integers.

    In a sum, it takes the place of quantizing the result; one that is broadcast costs little.
    """
    if _is_parameter(value) or node.op_type in ("Add", "Concat"):
        return not _is_parameter(value)
    own, whole = (dims_of(v) for v in (value, node.outputs[0]))
    if own is None or whole is None or len(own) != len(whole):
        return False
    return any(o == 1 and w != 1 for o, w in zip(own, whole, strict=True))


def _why_float_type(x: ir.Value | None) -> str:
    if x is not None and is_half(x):
        return f"it computes in {str(x.dtype).lower()}: take the model in float32"
    return f"its input is {x.dtype if x is not None else 'missing'}, not float32"


def _why_float_gemm(node: ir.Node) -> str:
    read = node.attributes
    if read.get_float("alpha", 1.0) != 1.0 or read.get_float("beta", 1.0) != 1.0:
        return "it has factors alpha or beta"
    if read.get_int("transA", 0):
        return "its first input is transposed"
    bias, weight = node.inputs[2] if len(node.inputs) > 2 else None, node.inputs[1]
    outputs = (static_dims(weight) or (0, 0))[_output_axis(node)] if weight is not None else 0
    if bias is not None and (not _is_parameter(bias) or static_dims(bias) != (outputs,)):
        return "its bias is no vector"
    return ""


def _why_not_turned(node: ir.Node) -> str:
    """Say why the weight of Gemm cannot be stored as [inputs, outputs], as int4 needs it."""
    weight = node.inputs[1]
    if weight is None or not node.attributes.get_int("transB", 0):
        return ""
    for user, index in weight.uses():
        turned = (user.op_type, index) == ("Gemm", 1) and user.attributes.get_int("transB", 0) == 1
        if user.domain or not turned:
            return f"{user.op_type} reads its weight too, in another order"
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


def bias_of(node: ir.Node) -> ir.Value | None:
    """Return the bias of a product."""
    has_bias = node.op_type in ("Conv", "Gemm") and len(node.inputs) > 2
    return node.inputs[2] if has_bias else None
