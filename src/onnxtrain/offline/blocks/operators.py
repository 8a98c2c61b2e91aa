"""Elementary blocks, mostly of one operator each.

A block is made with its settings and called with names of values: `Add()("a", "b")` adds a node and
returns the name of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper

from onnxtrain.errors import BlockError, UnknownNameError
from onnxtrain.offline.blocks.accessor import current
from onnxtrain.offline.blocks.append_graph import append_graph, append_node
from onnxtrain.offline.blocks.block import Block
from onnxtrain.offline.graph.ops import Ops

_ML_DOMAIN, _ML_OPSET = "ai.onnx.ml", 3

__all__ = [
    "Abs",
    "Add",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "Operator",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]


class Operator(Block):
    """Any operator: `Operator("Gemm", transB=1)("x", "w")`."""

    def __init__(self, op_type: str, domain: str = "", **attributes: Any) -> None:
        super().__init__()
        self._op_type, self._domain, self._attributes = op_type, domain, attributes

    def build(self, *input_names: str) -> str:
        """Add the node."""
        return append_node(self._op_type, input_names, domain=self._domain, **self._attributes)


class _Named(Block):
    """A block of one operator, which a direct subclass has its name from."""

    op_type: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__name__.startswith("_") and not hasattr(cls, "op_type"):
            cls.op_type = cls.__name__


# ---- of two values -----------------------------------------------------------------------------


class _BinaryOp(_Named):
    def build(self, input_name1: str, input_name2: str) -> str:
        """Add the node."""
        return append_node(self.op_type, [input_name1, input_name2])


class Add(_BinaryOp):
    """a + b."""


class Sub(_BinaryOp):
    """a - b."""


class Mul(_BinaryOp):
    """a · b."""


class Div(_BinaryOp):
    """a / b."""


# ---- of one value ------------------------------------------------------------------------------


class _UnaryOp(_Named):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self._attributes = attributes

    def build(self, input_name: str) -> str:
        """Add the node."""
        return append_node(self.op_type, [input_name], **self._attributes)


class _Reduction(_UnaryOp):
    def __init__(self, keepdims: bool = True) -> None:
        super().__init__(keepdims=int(keepdims))


class ReduceMean(_Reduction):
    """The mean over all axes; they stay, of size 1, unless `keepdims` is False."""


class ReduceSum(_Reduction):
    """The sum over all axes; they stay, of size 1, unless `keepdims` is False."""


class Sigmoid(_UnaryOp):
    """1 / (1 + exp(-x))."""


class Log(_UnaryOp):
    """The natural logarithm."""


class Neg(_UnaryOp):
    """-x."""


class Abs(_UnaryOp):
    """|x|."""


class Cast(_UnaryOp):
    """x as another element type, one of onnx.TensorProto."""

    def __init__(self, to: int) -> None:
        super().__init__(to=to)


class Pow(Block):
    """x to the power of a number."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """Add the node; the exponent is of shape [1]."""
        exponent = _tensor([self._exponent], _elem_type(pow_input_name))
        return append_graph(
            [pow_input_name], lambda op, x: [op.Pow(x, exponent)], "pow_output", typed=False
        )[0]


class Clip(Block):
    """x, at least `clip_min` and at most `clip_max`."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._min, self._max = clip_min, clip_max

    def build(self, clip_input_name: str) -> str:
        """Add the node; the bounds have the type of the input."""
        elem_type = _elem_type(clip_input_name)
        bounds = [None if b is None else _tensor(b, elem_type) for b in (self._min, self._max)]
        while bounds and bounds[-1] is None:
            bounds.pop()
        return append_graph(
            [clip_input_name], lambda op, x: [op.Clip(x, *bounds)], "clip_output", typed=False
        )[0]


class Linear(Block):
    """alpha · x w + beta · b, with new parameters w (in, out) and b (out).

    The parameters are initializers with normally distributed numbers; `np.random.seed` makes them
    reproducible.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__()
        self._shape, self._bias = (in_features, out_features), bias
        self._alpha, self._beta = alpha, beta

    def build(self, linear_input_name: str) -> str:
        """Add the parameters and the node."""
        inputs = [linear_input_name, _initializer(np.random.randn(*self._shape), "linear.weight")]
        if self._bias:
            inputs.append(_initializer(np.random.randn(self._shape[1]), "linear.bias"))
        return append_node(
            "Gemm", inputs, token="linear_output", alpha=float(self._alpha), beta=float(self._beta)
        )


class LabelEncoder(Block):
    """A map from keys to values (ai.onnx.ml.LabelEncoder); give one kind of keys and of values."""

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._attributes: dict[str, Any] = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }

    def build(self, label_encoder_input_name: str) -> str:
        """Add the node, and import its operators if the model does not."""
        model = current().model
        if all(opset.domain != _ML_DOMAIN for opset in model.opset_import):
            model.opset_import.append(helper.make_opsetid(_ML_DOMAIN, _ML_OPSET))
        return append_node(
            "LabelEncoder", [label_encoder_input_name], domain=_ML_DOMAIN, **self._attributes
        )


# ---- of no value, or of several ----------------------------------------------------------------


class Constant(Block):
    """A number, as a tensor of shape [1]."""

    def __init__(self, value_float: float, elem_type: int = TensorProto.FLOAT) -> None:
        super().__init__()
        self._value, self._elem_type = value_float, elem_type

    def build(self) -> str:
        """Add an initializer."""
        return _initializer([self._value], "constant", self._elem_type)


class SequenceConstruct(Block):
    """The sequence of the given tensors."""

    def build(self, *sequence_input_names: str) -> str:
        """Add the node."""
        return append_node("SequenceConstruct", sequence_input_names)


class ReduceAllL2(Block):
    """The L2 norm of all elements of all the given tensors, of shape [1] and type float."""

    def build(self, *reduce_input_names: str) -> str:
        """Add a sum of squares for each tensor, and the root of their sum."""

        def norm(op: Ops, *tensors: ir.Value) -> list[ir.Value]:
            squares = [
                op.Cast(op.ReduceSumSquare(tensor, keepdims=0), to=ir.DataType.FLOAT)
                for tensor in tensors
            ]
            return [op.Reshape(op.Sqrt(op.Sum(*squares)), [1])]

        return append_graph(reduce_input_names, norm, "reduce_all_l2_output", typed=False)[0]


class PassThrough(Block):
    """The given names, unchanged: for a model whose first output is the loss."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        """Return the names."""
        return input_names


class InputLike(Block):
    """A new input of the model, of the type and shape of the value `like`."""

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Add the input behind the others."""
        accessor = current()
        name = input_name or accessor.fresh_name("input")
        if accessor.has(name):
            raise BlockError(f"the model has a value {name!r} already: choose another input name")
        return accessor.add_input(name, accessor.type_of(self._like))


def _elem_type(name: str) -> int:
    """Return the element type of a value; float where it is not known."""
    try:
        return current().type_of(name).tensor_type.elem_type or TensorProto.FLOAT
    except UnknownNameError:  # the block that calls this one may add it later
        return TensorProto.FLOAT


def _tensor(numbers: Any, elem_type: int = TensorProto.FLOAT) -> np.ndarray[Any, Any]:
    return np.asarray(numbers).astype(ir.DataType(elem_type).numpy())


def _initializer(numbers: Any, token: str, elem_type: int = TensorProto.FLOAT) -> str:
    tensor = _tensor(numbers, elem_type)
    return append_graph([], lambda op: [op.const(tensor)], token)[0]
