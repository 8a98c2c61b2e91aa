"""Native kernels of recurrent layers: which layers they cover, and what they are given.

The forward kernel saves its gates, which the plain operator does not give away; the backward kernel
reads them instead of computing them again. In plain form an empty tensor stands for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.offline.autodiff.engine import current_path
from onnxtrain.offline.autodiff.registry import Cotangents
from onnxtrain.offline.autodiff.rules.rnn_activations import Activation
from onnxtrain.offline.graph.kernels import Attribute, mark_kernel
from onnxtrain.offline.graph.ops import Ops

_DIRECTIONS = ("forward", "reverse", "bidirectional")
_LENGTHS = 4  # the input sequence_lens
# Numbers by which the kernels know what they are given, behind the inputs of the operator.
_Y, _SAVED, _FIRST_COTANGENT = 8, 9, 10
_SAVED_OUTPUT = 3
# W, R and their biases are nearly always trained, and X is often the input of the model: a kernel
# does not compute the last of its outputs if nobody reads it.
_ORDER = (2, 1, 3, 7, 5, 6, 0)


@dataclass(frozen=True)
class LayerKernel:
    """The kernels of one layer."""

    op: Ops
    node: ir.Node
    attributes: dict[str, Attribute]

    def differentiate(
        self, dys: Sequence[ir.Value | None], write: Callable[[], Sequence[ir.Value | None]]
    ) -> Cotangents:
        """Mark the layer's node and what `write` writes, which returns the cotangents."""
        op, node = self.op, self.node
        saved = self._saved()
        inputs = {i: v for i, v in enumerate(node.inputs) if v is not None}
        outputs = {i: v for i, v in enumerate(node.outputs) if v.name}
        nodes = [node]
        if saved is not None:
            outputs[_SAVED_OUTPUT] = saved
            nodes.append(_producer(saved))
        kept = [] if saved is None else [saved]
        mark_kernel(
            nodes, node.op_type, list(inputs.values()), list(outputs.values()), saved=kept,
            input_roles=list(inputs), output_roles=list(outputs), **self.attributes,
        )  # fmt: skip
        given = inputs | {_Y: node.outputs[0]} | ({} if saved is None else {_SAVED: saved})
        given |= {_FIRST_COTANGENT + i: dy for i, dy in enumerate(dys) if dy is not None}
        wanted = self._wanted()
        found: list[ir.Value | None] = []

        def write_wanted() -> list[ir.Value | None]:
            found.extend(write())
            return [found[i] for i in wanted]

        op.kernel(
            f"{node.op_type}Grad", list(given.values()), write_wanted, saved=kept,
            input_roles=list(given), output_roles=wanted, **self.attributes,
        )  # fmt: skip
        return tuple(found)

    def _wanted(self) -> list[int]:
        """Return the inputs to which a gradient goes, in the order of the kernel's outputs."""
        depends, inputs = current_path().depends, self.node.inputs
        return [i for i in _ORDER if i < len(inputs) and inputs[i] in depends]

    def _saved(self) -> ir.Value | None:
        """Write what stands for the gates, behind the layer; RNN needs no more than its output."""
        if self.node.op_type == "RNN":
            return None
        saved: ir.Value = self.op.Slice(self.node.outputs[0], [0], [0], [0])
        written, graph = _producer(saved), self.op.target
        graph.remove(written)
        graph.insert_after(self.node, written)
        return saved


def kernel_of(op: Ops, node: ir.Node, activations: Sequence[Activation]) -> LayerKernel | None:
    """Return the kernels of a layer, or None where they do not cover it."""
    attributes = node.attributes
    names = {a.name for a in activations}
    relu = node.op_type == "RNN" and names == {"Relu"}
    usual = [a.name for a in activations] == _usual_activations(node.op_type, len(activations))
    direction = attributes.get_string("direction", "forward")
    lengths = node.inputs[_LENGTHS] if len(node.inputs) > _LENGTHS else None
    covered = (
        (relu or usual)
        and direction in _DIRECTIONS
        and attributes.get_float("clip", None) is None
        and not attributes.get_int("input_forget", 0)
        and not attributes.get_int("layout", 0)
        and (lengths is None or lengths.dtype == ir.DataType.INT32)
        and node.graph is op.target
    )
    if not covered:
        return None
    numbers: dict[str, Attribute] = {"direction": _DIRECTIONS.index(str(direction))}
    if node.op_type == "GRU":
        numbers["linear_before_reset"] = int(attributes.get_int("linear_before_reset", 0) != 0)
    if node.op_type == "RNN":
        numbers["relu"] = int(relu)
    return LayerKernel(op, node, numbers)


def _usual_activations(op_type: str, count: int) -> list[str]:
    each = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
    usual = each[op_type]
    return usual * (count // len(usual))


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node
