"""What an initializer does in a graph: it is the weight of a layer, a bound, a scale, ...

Only the use tells a weight from a constant: sizes and names do not. An initializer is followed
through views and arithmetic with other initializers (a transposed weight, a weight norm) up to the
nodes where it meets data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.autodiff.engine import operator_name
from onnxtrain.offline.autodiff.registry import lookup
from onnxtrain.offline.graph.initializers import FIXED_TABLE
from onnxtrain.offline.graph.layers import DataFlow, Layer
from onnxtrain.offline.graph.op_facts import (
    ACTIVATIONS,
    ARITHMETIC,
    CONTROL,
    NORMS,
    PARAMETER_INPUTS,
    POOLS,
    PRODUCTS,
    RECURRENT,
    REORDERS,
    SETTING_INPUTS,
    TAKES_PARTS,
)
from onnxtrain.offline.graph.quantized_operators import FORMS, MICROSOFT
from onnxtrain.offline.graph.shapes import dims_of, is_float, static_dims
from onnxtrain.offline.graph.subgraphs import subgraphs_of

# What torch calls the parameters of its layers.
_TORCH = {"scale": "weight", "slope": "weight"}
_TORCH_RECURRENT = {
    "input weight": ("weight_ih",), "recurrent weight": ("weight_hh",),
    "bias": ("bias_ih", "bias_hh"),
}  # fmt: skip
TRAIN_IT = "name it in train= to train it"
_FOLLOWING = PRODUCTS | NORMS | RECURRENT | ACTIVATIONS | POOLS


@dataclass(frozen=True)
class Use:
    """One way in which a node uses an initializer."""

    text: str  # "weight of Conv", "quantization scale of QuantizeLinear"
    node: ir.Node
    is_weight: bool = False
    is_guess: bool = False  # something learned may do this too
    leaves: tuple[str, ...] = ("weight",)  # what torch calls such a parameter
    matrix: ir.Value | None = field(default=None, compare=False)  # whose bias it is

    @property
    def advice(self) -> str:
        """Say how to train it all the same, where that may be wanted."""
        return TRAIN_IT if self.is_guess else ""


class TensorUses:
    """Finds the uses of initializers in a canonical model."""

    def __init__(self, model: ir.Model) -> None:
        self.flow = DataFlow(model.graph)
        self._opset = model.opset_imports[""]
        # The torchscript exporter writes names as /encoder/layer.0/MatMul, and what Python code
        # computes as Constant nodes: its initializers are parameters, buffers, or "onnx::Mul_12".
        self._from_torch = any((n.name or "").startswith("/") for n in model.graph)
        self.has_layers = any(self._is_layer(n) for n in model.graph.all_nodes())

    def _is_layer(self, node: ir.Node) -> bool:
        is_known = node.domain == "" and node.op_type in PRODUCTS | NORMS | RECURRENT
        return is_known or self.flow.is_own_layer(node)

    def of(self, value: ir.Value) -> list[Use]:
        """Return what nodes do with an initializer, weights first."""
        found = list(dict.fromkeys(self._uses(value, value, set())))
        if any(use.is_weight for use in found) and (origin := _origin_of_table(value)):
            return [Use(f"fixed table, {origin}", use.node, is_guess=True) for use in found[:1]]
        return sorted(found, key=lambda use: not use.is_weight)

    def _uses(
        self, value: ir.Value, source: ir.Value, seen: set[tuple[ir.Node, int]]
    ) -> Iterator[Use]:
        for node, index in value.uses():
            if (node, index) not in seen:
                seen.add((node, index))
                found = self._use(node, index, value, source)
                if isinstance(found, Use):
                    yield found
                else:
                    for output in found:
                        yield from self._uses(output, source, seen)
        owner = self.flow.bodies.get(value.graph) if value.is_graph_output() else None
        if owner is not None and value.graph is not None:
            inside = value.graph.outputs[int(owner.op_type == "Loop") :]
            for outer, inner in zip(owner.outputs, inside, strict=False):
                if inner is value:
                    yield from self._uses(outer, source, seen)

    def _use(
        self, node: ir.Node, index: int, value: ir.Value, source: ir.Value
    ) -> Use | Sequence[ir.Value]:
        """Return what a node does with a value, or the values that take it further."""
        op = node.op_type if node.domain == "" else ""
        label = PARAMETER_INPUTS.get(op, {}).get(index)
        setting = SETTING_INPUTS.get(op, {}).get(index)
        indices = node.inputs[1] if op == "Gather" and index == 0 else None
        if label is not None:
            return self._parameter(node, label, value)
        if setting is not None:
            return Use(f"{setting} of {op}", node, is_guess="state" in setting)
        form = FORMS.get(node.op_type) if node.domain == MICROSOFT else None
        if form is not None and index == form.bias:
            return Use(f"bias of {operator_name(node)}", node, True, leaves=("bias",))
        if form is not None and index in form.scales:
            return Use(f"quantization scale of {operator_name(node)}", node)
        if self._stops(node, index):
            return Use(f"setting of {op}", node)
        if op in CONTROL:
            return self._into_body(node, index)
        if indices is not None and static_dims(indices) != ():
            return Use("embedding table of Gather", node, True)
        if not any(self.flow.varies(v) for v in node.outputs):
            return self._without_data(node, index, value)
        if op in PRODUCTS:
            return Use(f"weight of {op}", node, True)
        if op in ARITHMETIC:
            return self._with_data(node, index, value, source)
        if op == "Concat":
            return self._joined(node, value)
        if node.domain and any(v is not None and is_quantized(v) for v in node.inputs):
            return Use(f"quantization scale of {operator_name(node)}", node)
        if node.domain:
            return Use(f"input of {operator_name(node)}", node, index > 0 and _size(value) != 1)
        return Use(f"input of {op}", node, is_guess=True)

    def _stops(self, node: ir.Node, index: int) -> bool:
        rule = lookup(node.op_type, node.domain, self._opset)
        return rule is not None and index in rule.stops

    def _parameter(self, node: ir.Node, label: str, value: ir.Value) -> Use:
        op = node.op_type
        if op == "InstanceNormalization" and self._is_part_of_group_norm(node, value):
            return Use(f"fixed {label} of {op}", node)
        if op in PRODUCTS and label == "weight" and self._is_frequency(node, value):
            return Use(f"frequencies of Sin and Cos behind {op}", node, is_guess=True)
        leaves = _recurrent_names(node, label) if op in RECURRENT else (_TORCH.get(label, label),)
        matrix = node.inputs[1] if label == "bias" and op in PRODUCTS | RECURRENT else None
        return Use(f"{label} of {op}", node, True, leaves=leaves, matrix=matrix)

    def _into_body(self, node: ir.Node, index: int) -> Use | Sequence[ir.Value]:
        """Follow what Scan slices into its body; what Loop and Scan carry is no weight."""
        inner = [b.inputs[index] for b in subgraphs_of(node) if index < len(b.inputs)]
        if any(self.flow.varies(v) for v in inner):
            return Use(f"initial state of {node.op_type}", node, is_guess=True)
        return inner

    def _without_data(self, node: ir.Node, index: int, value: ir.Value) -> Use | Sequence[ir.Value]:
        """Follow an initializer through arithmetic with others."""
        if node.op_type == "Div" and index == 1:
            return Use("divisor in Div", node)
        others = [v for i, v in enumerate(node.inputs) if i != index]
        if node.op_type in ARITHMETIC and any(map(_is_from_integers, others)):
            return Use(f"quantization scale in {node.op_type}", node)
        if node.op_type in ("Sin", "Cos"):
            return Use(f"frequencies of {node.op_type}", node, is_guess=True)
        if node.op_type in ARITHMETIC and static_dims(value) == ():
            return Use(f"number in {node.op_type}", node)
        return node.outputs

    def _with_data(self, node: ir.Node, index: int, value: ir.Value, source: ir.Value) -> Use:
        """Return the use as a bias or scale, with an element for each channel of a layer."""
        op, other = node.op_type, node.inputs[1 - index]
        size = _size(value) or _size(source)
        what, does = ("bias", "added to") if op in ("Add", "Sub") else ("scale", "factor of")
        layer = None if other is None else self.flow.layer_behind(other)
        if op == "Div" and index == 0:
            return Use(
                "number in Div" if size == 1 else "numerator of Div", node, is_guess=size != 1
            )
        if layer is None and size == 1 and self.has_layers:
            return Use(f"number in {op}", node, is_guess=self._is_state(source))
        if layer is None:
            is_weight = not self.has_layers and static_dims(value) != ()
            text = f"{does} data{'' if is_weight else ' that no layer made'}, in {op}"
            return Use(text, node, is_weight, is_guess=not is_weight)
        if op == "Mul" and other is not None and size not in layer.widths:
            size = _elements_on_axes_of(value, other) or size
        if self._belongs(layer, what, size, node, source):
            is_written_out = layer.is_norm and layer.node.op_type not in NORMS
            name = "normalization" if is_written_out else operator_name(layer.node)
            matrix = None
            if what == "bias" and layer.direct and layer.node.op_type in PRODUCTS:
                matrix = self.flow.weight_of(layer.node)
            leaves = (_TORCH.get(what, what),)
            return Use(f"{what} of {name}", node, True, leaves=leaves, matrix=matrix)
        if size == 1:
            return Use(f"number in {op}", node, is_guess=self._is_state(source))
        if size in layer.widths:
            return Use(f"{does} the output of the model, in {op}", node, is_guess=True)
        return Use(f"{does} data, with more than a number a channel, in {op}", node, is_guess=True)

    def _belongs(
        self, layer: Layer, what: str, size: int | None, node: ir.Node, source: ir.Value
    ) -> bool:
        # What comes behind a product of integers makes floats of them.
        is_direct = layer.direct or layer.node.op_type in ("ConvInteger", "MatMulInteger")
        is_first_bias = what == "bias" and is_direct
        if size == 1 and not (is_first_bias and 1 in layer.widths):
            return self._is_state(source) and self._is_followed(node)
        if size not in layer.widths:
            return False
        return is_first_bias or layer.is_norm or self._is_followed(node)

    def _is_state(self, source: ir.Value) -> bool:
        """Whether a number comes from the state of a torch module, and not from its code."""
        return self._from_torch and not (source.name or "").startswith(("/", "onnx::"))

    def _is_followed(self, node: ir.Node) -> bool:
        """Whether a layer or an activation follows: what scales the output is no part of one."""
        waiting, seen = [node], {node}
        while waiting:
            for value in waiting.pop().outputs:
                for user, _ in value.uses():
                    op = user.op_type if user.domain == "" else ""
                    residual = op == "Add" and all(self.flow.varies(v) for v in user.inputs)
                    if op in _FOLLOWING or residual:
                        return True
                    if user not in seen:
                        seen.add(user)
                        waiting.append(user)
        return False

    def _joined(self, node: ir.Node, value: ir.Value) -> Use:
        """Return the use as a token before a sequence that a layer made, if it has that form."""
        layers = [self.flow.layer_behind(v) for v in node.inputs if v and self.flow.varies(v)]
        axis, rank = node.attributes.get_int("axis", 0), len(dims_of(value) or ())
        if rank == 3 and axis in (1, -2) and any(layer is not None for layer in layers):
            return Use("token joined to a sequence by Concat", node, True)
        return Use("joined to data by Concat", node, is_guess=True)

    # ---- constants in the places of weights ------------------------------------------------------

    def _is_part_of_group_norm(self, node: ir.Node, value: ir.Value) -> bool:
        """Exporters write GroupNormalization as InstanceNormalization by 1 and 0, then a scale."""
        if value.const_value is not None and np.ptp(value.const_value.numpy()):
            return False
        users = self._users_behind_views(node.outputs[0])
        return any(
            user.op_type == "Mul" and not all(self.flow.varies(v) for v in user.inputs)
            for user in users
        )

    def _is_frequency(self, node: ir.Node, value: ir.Value) -> bool:
        """Rotary encodings multiply positions by a vector of frequencies, for Sin and Cos."""
        dims = static_dims(value)
        if dims is None or sum(d > 1 for d in dims) > 1:
            return False
        users = [u for u in self._users_behind_views(node.outputs[0]) if u.op_type != "Shape"]
        return bool(users) and all(user.op_type in ("Sin", "Cos") for user in users)

    def _users_behind_views(self, value: ir.Value) -> list[ir.Node]:
        users = []
        for user, _ in value.uses():
            if user.op_type in REORDERS or user.op_type == "Concat":
                users += self._users_behind_views(user.outputs[0])
            else:
                users.append(user)
        return users


def _is_from_integers(value: ir.Value | None) -> bool:
    """Whether a value is made of integers, as weights are that a graph dequantizes itself."""
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return False
    x = node.inputs[0] if node.inputs else None
    if node.op_type == "Cast" and x is not None and not is_float(x):
        return True
    if node.op_type in ARITHMETIC:
        return any(map(_is_from_integers, node.inputs))
    return node.op_type in REORDERS | TAKES_PARTS and _is_from_integers(x)


def is_quantized(value: ir.Value) -> bool:
    """Whether a tensor has elements of a byte or less, as quantized weights do."""
    if value.const_value is None or value.dtype in (None, ir.DataType.BOOL, ir.DataType.STRING):
        return False
    return value.dtype.bitwidth <= 8 and value.const_value.size > 1


def _recurrent_names(node: ir.Node, label: str) -> tuple[str, ...]:
    """Return the names in torch of what ONNX has in one tensor: rnn.weight_ih_l0_reverse."""
    number = re.search(r"_(\d+)$", node.name or "")
    both = node.attributes.get_string("direction", "") == "bidirectional"
    return tuple(
        f"{name}_l{number[1] if number else 0}{suffix}"
        for name in _TORCH_RECURRENT.get(label, (label,))
        for suffix in (("", "_reverse") if both else ("",))
    )


def _size(value: ir.Value) -> int | None:
    dims = static_dims(value)
    return None if dims is None else math.prod(dims)


def _elements_on_axes_of(value: ir.Value, data: ir.Value) -> int | None:
    """Return the number of elements of a factor along the axes of data, where all is known.

    An axis on which data has size one is made by the product, as in an outer product.
    """
    mine, other = static_dims(value), dims_of(data)
    if mine is None or other is None:
        return None
    axes = zip(reversed(mine), (*reversed(other), *[1] * len(mine)), strict=False)
    return math.prod(size for size, at_data in axes if at_data != 1)


def _origin_of_table(value: ir.Value) -> str:
    """Say what a tensor is that has the place of a weight and was computed; else nothing."""
    if FIXED_TABLE in value.meta:
        return str(value.meta[FIXED_TABLE])
    if value.const_value is None or value.const_value.size < 3:
        return ""
    array = np.squeeze(value.const_value.numpy())
    if array.ndim == 1:
        return "0, 1, 2, ..." if np.array_equal(array, np.arange(array.size)) else ""
    rows = array.reshape(-1, *array.shape[-2:])[0] if array.ndim > 1 else array
    return "a sinusoid" if rows.ndim == 2 and _is_sinusoidal(rows) else ""


def _is_sinusoidal(table: np.ndarray) -> bool:
    """Whether each column is a sinusoid in the row: x[n-1] + x[n+1] = 2 cos(f) x[n].

    Told from a few rows: the table may be larger than memory.
    """
    count = len(table)
    if count < 8:
        return False
    few = [np.asarray(table[n : n + 4], np.float64) for n in (1, count // 2, count - 4)]
    largest = max(float(np.abs(rows).max()) for rows in few)
    tolerance = (1e-2 if table.dtype.itemsize == 2 else 1e-4) * largest**2
    for rows in few:
        a, b, c, d = rows
        if np.abs((a + c) * c - (b + d) * b).max() > tolerance:
            return False
        if np.abs(rows).max() < largest / 2:  # zeros are no sinusoid
            return False
    return bool(np.abs(few[0][0] - few[0][1]).max() > 0.1 * largest)
