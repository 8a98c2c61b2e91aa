"""The building blocks: one operator each, as a rule.

A block is made once, with its settings, and called with names of values: `Add()("a", "b")` adds a
node and returns the name of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxtrain.errors import BlockError, UnknownNameError
from onnxtrain.offline.blocks.accessor import fresh_name
from onnxtrain.offline.blocks.block import Block
from onnxtrain.offline.blocks.values import is_defined, type_of
from onnxtrain.offline.blocks.writer import Writer

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
        written = Writer().call(self._op_type, input_names, domain=self._domain, **self._attributes)
        return written[0]


# ---- of two values -----------------------------------------------------------------------------


class _BinaryOp(Block):
    """An operator of two values."""

    def __init__(self, op_name: str) -> None:
        super().__init__()
        self._op_name = op_name

    def build(self, input_name1: str, input_name2: str) -> str:
        """Add the node."""
        return Writer().call(self._op_name, [input_name1, input_name2])[0]


class Add(_BinaryOp):
    """a + b."""

    def __init__(self) -> None:
        super().__init__("Add")


class Sub(_BinaryOp):
    """a - b."""

    def __init__(self) -> None:
        super().__init__("Sub")


class Mul(_BinaryOp):
    """a · b."""

    def __init__(self) -> None:
        super().__init__("Mul")


class Div(_BinaryOp):
    """a / b."""

    def __init__(self) -> None:
        super().__init__("Div")


# ---- of one value ------------------------------------------------------------------------------


class _UnaryOp(Block):
    """An operator of one value."""

    def __init__(self, op_name: str, **attributes: Any) -> None:
        super().__init__()
        self._op_name, self._attributes = op_name, attributes

    def build(self, input_name: str) -> str:
        """Add the node."""
        return Writer().call(self._op_name, [input_name], **self._attributes)[0]


class ReduceMean(_UnaryOp):
    """The mean over all axes; they stay, of size 1, unless `keepdims` is False."""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__("ReduceMean", keepdims=int(keepdims))


class ReduceSum(_UnaryOp):
    """The sum over all axes; they stay, of size 1, unless `keepdims` is False."""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__("ReduceSum", keepdims=int(keepdims))


class Sigmoid(_UnaryOp):
    """1 / (1 + exp(-x))."""

    def __init__(self) -> None:
        super().__init__("Sigmoid")


class Log(_UnaryOp):
    """The natural logarithm."""

    def __init__(self) -> None:
        super().__init__("Log")


class Neg(_UnaryOp):
    """-x."""

    def __init__(self) -> None:
        super().__init__("Neg")


class Abs(_UnaryOp):
    """|x|."""

    def __init__(self) -> None:
        super().__init__("Abs")


class Cast(_UnaryOp):
    """x as another element type, one of onnx.TensorProto."""

    def __init__(self, to: int) -> None:
        super().__init__("Cast", to=to)


class Pow(Block):
    """x to the power of a number."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """Add the node; the exponent is of shape [1]."""
        op = Writer(_elem_type(pow_input_name))
        exponent = op.constant([self._exponent], token="pow_exponent")
        return op.Pow(pow_input_name, exponent)


class Clip(Block):
    """x, at least `clip_min` and at most `clip_max`."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._min, self._max = clip_min, clip_max

    def build(self, clip_input_name: str) -> str:
        """Add the node; the bounds have the type of the input."""
        op = Writer(_elem_type(clip_input_name))
        bounds = [
            None if bound is None else op.constant(bound, token=f"clip_{which}")
            for which, bound in (("min", self._min), ("max", self._max))
        ]
        while bounds and bounds[-1] is None:
            bounds.pop()
        return op.Clip(clip_input_name, *bounds)


class Linear(Block):
    """alpha · x w + beta · b, with new parameters w (in, out) and b (out), of normal numbers.

    They are initializers of the model; `np.random.seed` makes them reproducible.
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
        op = Writer()
        inputs = [linear_input_name]
        inputs.append(op.constant(np.random.randn(*self._shape), token="linear.weight"))
        if self._bias:
            inputs.append(op.constant(np.random.randn(self._shape[1]), token="linear.bias"))
        return op.call(
            "Gemm", inputs, ["linear_output"], alpha=float(self._alpha), beta=float(self._beta)
        )[0]


class LabelEncoder(Block):
    """A map from keys to values, of which one kind each is given (ai.onnx.ml.LabelEncoder)."""

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
        op = Writer()
        if all(opset.domain != _ML_DOMAIN for opset in op.model.opset_import):
            op.model.opset_import.append(helper.make_opsetid(_ML_DOMAIN, _ML_OPSET))
        return op.call(
            "LabelEncoder", [label_encoder_input_name], domain=_ML_DOMAIN, **self._attributes
        )[0]


# ---- of no value, or of several ----------------------------------------------------------------


class Constant(Block):
    """A number, as a tensor of shape [1]."""

    def __init__(self, value_float: float, elem_type: int = TensorProto.FLOAT) -> None:
        super().__init__()
        self._value, self._elem_type = value_float, elem_type

    def build(self) -> str:
        """Add an initializer."""
        return Writer(self._elem_type).constant([self._value], token="constant")


class SequenceConstruct(Block):
    """The sequence of the given tensors."""

    def build(self, *sequence_input_names: str) -> str:
        """Add the node."""
        return Writer().SequenceConstruct(*sequence_input_names)


class ReduceAllL2(Block):
    """The L2 norm of all elements of all the given tensors, of shape [1] and type float."""

    def build(self, *reduce_input_names: str) -> str:
        """Add a sum of squares for each tensor, and what makes one norm of them."""
        op = Writer()
        squares = [
            op.Cast(op.ReduceSumSquare(name, keepdims=0), to=TensorProto.FLOAT)
            for name in reduce_input_names
        ]
        norm = op.Sqrt(op.Sum(*squares))
        return op.call("Reshape", [norm, [1]], ["reduce_all_l2_output"])[0]


class PassThrough(Block):
    """The given names: for a model whose first output is the loss already."""

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
        op = Writer()
        name = input_name or fresh_name("input")
        if is_defined(op.model, name):
            raise BlockError(f"the model has a value {name!r} already: it cannot become an input")
        return op.input(name, type_of(op.model, self._like))


def _elem_type(name: str) -> int:
    """Return the element type of a value; float where it is not known."""
    model: onnx.ModelProto = Writer().model
    try:
        return type_of(model, name).tensor_type.elem_type or TensorProto.FLOAT
    except UnknownNameError:  # it may be added later: blocks that call blocks are checked as one
        return TensorProto.FLOAT
