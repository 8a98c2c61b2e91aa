"""Writer: what blocks and losses write with.

`op.Sub(x, 1.0)` adds a node to the model of the context and returns the name of its output. Any
operator name works; Python numbers become constants of the element type that the writer was made
for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from onnxtrain.errors import BlockError
from onnxtrain.offline.blocks.accessor import ModelAccessor, current

Operand = str | float | int | Sequence[int] | np.ndarray[Any, Any] | None
_AXES_AS_INPUT_SINCE = 13  # of ReduceSum and Unsqueeze; other reductions are not asked for axes


class Writer:
    """A writer of nodes into the model of the context."""

    def __init__(self, elem_type: int = TensorProto.FLOAT) -> None:
        self._accessor: ModelAccessor = current()
        self.elem_type = elem_type

    @property
    def model(self) -> onnx.ModelProto:
        """The model that is written into."""
        return self._accessor.model

    @property
    def opset(self) -> int:
        """The version of the default operators."""
        for opset in self.model.opset_import:
            if opset.domain in ("", "ai.onnx"):
                return int(opset.version)
        raise BlockError("the model states no opset for the ai.onnx operators")

    def __getattr__(self, op_type: str) -> Callable[..., str]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def write(*inputs: Operand, **attributes: Any) -> str:
            return self.call(op_type, inputs, **attributes)[0]

        return write

    def call(
        self,
        op_type: str,
        inputs: Sequence[Operand],
        tokens: Sequence[str] = (),
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node with one output for each token; the names of the outputs contain them."""
        tokens = tokens or [f"{op_type.lower()}_output"]
        outputs = [self._accessor.fresh_name(token) for token in tokens]
        names = [self._operand(value) for value in inputs]
        given = {k: v for k, v in attributes.items() if v is not None}
        node = helper.make_node(op_type, names, outputs, outputs[0], domain=domain, **given)
        self.model.graph.node.append(node)
        return outputs

    def _operand(self, value: Operand) -> str:
        if isinstance(value, str):
            return value
        if value is None:
            return ""
        if isinstance(value, (bool, int, float)):
            return self.constant(value)
        return self.constant(value, TensorProto.INT64)

    def constant(self, value: Any, elem_type: int | None = None, token: str = "constant") -> str:
        """Add an initializer, of the element type of the writer by default."""
        dtype = ir.DataType(elem_type or self.elem_type)
        name = self._accessor.fresh_name(token)
        tensor = ir.tensor(np.asarray(value).astype(dtype.numpy()), dtype=dtype, name=name)
        self.model.graph.initializer.append(ir.to_proto(tensor))
        return name

    def input(self, name: str, type_: onnx.TypeProto) -> str:
        """Add an input behind those that the model has."""
        self.model.graph.input.append(onnx.ValueInfoProto(name=name, type=type_))
        return name

    def cast(self, x: str, elem_type: int, to: int | None = None) -> str:
        """Cast from one element type to another (that of the writer by default), if they differ."""
        wanted = to or self.elem_type
        return x if wanted == elem_type else self.Cast(x, to=wanted)

    def sum_over(self, x: str, axis: int) -> str:
        """Sum along one axis, which goes."""
        if self.opset < _AXES_AS_INPUT_SINCE:
            return self.ReduceSum(x, axes=[axis], keepdims=0)
        return self.ReduceSum(x, [axis], keepdims=0)


_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, *_HALVES)


def is_float(elem_type: int) -> bool:
    """Tell whether an element type is one that training works with."""
    return elem_type in _FLOATS


def accumulation_type(elem_type: int) -> int:
    """Return the type to compute a loss in: sums are too long for the half types."""
    return TensorProto.FLOAT if elem_type in _HALVES else elem_type


def check_reduction(reduction: str, *more: str) -> str:
    """Return the reduction if it is one that a loss knows."""
    known = ("mean", "sum", "none", *more)
    if reduction not in known:
        raise BlockError(f"reduction is one of {', '.join(known)}, not {reduction!r}")
    return reduction
