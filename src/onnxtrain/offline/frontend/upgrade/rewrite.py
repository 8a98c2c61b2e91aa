"""How adapters rewrite a node: in place, so that its outputs stay the values they are.

`@adapter(version, op, ...)` marks the function that takes a node from the version before to
`version`. A node takes all the steps between its opset and the floor, one after the other; one that
becomes another operator goes on with the steps of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.names import Names, label_of
from onnxtrain.offline.graph.shapes import dims_of


class Rewriter:
    """Changes single nodes of a model that has a given opset."""

    def __init__(self, names: Names, opset: int) -> None:
        self._names = names
        self._opset = opset

    def name(self, wish: str) -> str:
        """Return a name that is not taken."""
        return self._names.fresh(wish)

    def constant(self, node: ir.Node, hint: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """Return a new initializer, in the graph of the node that needs it.

        Shape inference of a body sees the constants of that body, not those of the graphs around.
        """
        tensor = ir.tensor(array)
        value = ir.Value(name=self._names.fresh(f"{label_of(node)}/{hint}"), const_value=tensor)
        value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
        assert node.graph is not None
        node.graph.register_initializer(value)
        return value

    def insert(
        self, node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any
    ) -> ir.Value:
        """Write a new node just before another one, and return its output."""
        return self.insert_many(node, op_type, inputs, 1, **attributes)[0]

    def insert_many(
        self,
        node: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        **attributes: Any,
    ) -> list[ir.Value]:
        """Write a new node with several outputs, and return them."""
        made = ir.node(
            op_type, inputs, attributes, num_outputs=outputs,
            name=self._names.fresh(f"{label_of(node)}/{op_type}"),
        )  # fmt: skip
        for output in made.outputs:
            output.name = self._names.fresh(f"{made.name}_out")
        assert node.graph is not None
        node.graph.insert_before(node, made)
        return list(made.outputs)

    def become(
        self, node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any
    ) -> None:
        """Turn a node into another operator that makes the same first output."""
        node.op_type = op_type
        set_inputs(node, inputs)
        node.attributes.clear()
        set_attributes(node, **attributes)

    def move_to_input(self, node: ir.Node, attribute: str, index: int) -> None:
        """Replace an attribute by a constant at an input; absent stays absent.

        Integers become a vector even where there is one, floats keep their rank.
        """
        found = node.attributes.pop(attribute, None)
        if found is None:
            return
        is_int = found.type in (ir.AttributeType.INT, ir.AttributeType.INTS)
        array = np.array(found.value, np.int64 if is_int else np.float32, ndmin=int(is_int))
        if array.size:
            set_input(node, index, self.constant(node, attribute, array))

    def convert_output(self, node: ir.Node, index: int, dtype: ir.DataType) -> None:
        """Give what reads an output of a node a copy of another type, under the old name."""
        assert node.graph is not None
        old = node.outputs[index]
        cast = ir.node("Cast", [old], {"to": dtype}, name=self._names.fresh(f"{old.name}/Cast"))
        new = cast.outputs[0]
        new.type, new.shape = old.type, old.shape
        old.type, new.name = None, old.name
        old.name = self._names.fresh(f"{old.name}/unconverted")
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        cast.replace_input_with(0, old)
        node.graph.insert_after(node, cast)

    def dtype_of(self, node: ir.Node, value: ir.Value | None) -> ir.DataType:
        """Return the element type of an input; an unknown one is an error that names it."""
        if value is None or value.dtype is None:
            self.refuse(
                node,
                f"the element type of its input {value.name if value else None!r} is not known",
                "give the value a type in the model (value_info)",
            )
        return value.dtype

    def rank_of(self, node: ir.Node, value: ir.Value | None) -> int:
        """Return the rank of an input; an unknown one is an error that names it."""
        dims = None if value is None else dims_of(value)
        if dims is None:
            self.refuse(
                node,
                f"the rank of its input {value.name if value else None!r} is not known",
                "declare the shape of the value in the model (value_info)",
            )
        return len(dims)

    def refuse(self, node: ir.Node, reason: str, remedy: str) -> NoReturn:
        """Raise the error that says which node cannot be upgraded, why, and what to do."""
        raise ModelError(
            f"node {label_of(node)!r} ({node.op_type} of opset {self._opset}) cannot be upgraded: "
            f"{reason}; {remedy}"
        )


Adapter = Callable[[Rewriter, ir.Node], None]
ADAPTERS: dict[tuple[str, int], Adapter] = {}


def adapter(version: int, *op_types: str) -> Callable[[Adapter], Adapter]:
    """Register how operators are brought to the version of an opset."""

    def register(function: Adapter) -> Adapter:
        for op_type in op_types:
            ADAPTERS[op_type, version] = function
        return function

    return register


def is_used(value: ir.Value) -> bool:
    """Tell whether anything reads a value."""
    return bool(value.uses()) or value.is_graph_output()


def set_attributes(node: ir.Node, **attributes: Any) -> None:
    """Set attributes of a node from plain Python values."""
    for name, value in attributes.items():
        node.attributes.add(ir.convenience.convert_attribute(name, value))


def set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    """Set one input, with missing ones before it if the node has fewer."""
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def set_inputs(node: ir.Node, values: Sequence[ir.Value | None]) -> None:
    """Set all inputs; missing ones at the end are left out."""
    kept = list(values)
    while kept and kept[-1] is None:
        kept.pop()
    node.resize_inputs(len(kept))
    for index, value in enumerate(kept):
        node.replace_input_with(index, value)
