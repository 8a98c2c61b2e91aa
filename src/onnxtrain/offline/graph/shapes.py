"""Types and shapes of the values that rules write.

Gradient graphs are not sent through ONNX shape inference: a cotangent has the type of its value.
What lies between is typed here, by a small table for the operators that rules use. An operator
that is not in the table gets no shape, which is always allowed; a wrong one would make
onnxruntime refuse the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import (
    DTYPE_INPUT,
    KEEPS_SHAPE,
    REDUCTIONS,
    RETURNS_BOOL,
    RETURNS_INT64,
)

Dim = int | ir.SymbolicDim
Dims = tuple[Dim, ...]
Inputs = Sequence[ir.Value | None]
Attributes = Mapping[str, Any]
UNKNOWN = ir.SymbolicDim(None)

FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
)


def is_float(value: ir.Value) -> bool:
    """Tell whether a value can carry a gradient."""
    return value.dtype in FLOATS


def is_half(value: ir.Value) -> bool:
    """Tell whether a value is of a type of 16 bits.

    Never compare such a value for equality with one computed from it: onnxruntime computes some
    operators on half types in float32 and skips the rounding in between, so two readers of a value
    may see different numbers. Recompute in the working type what is compared.
    """
    return value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def working_type(*values: ir.Value) -> ir.DataType:
    """Return the type to compute in: float64 where any value is, else float32.

    Half types lack the precision for long sums and positions, and some kernels.
    """
    double = any(v.dtype == ir.DataType.DOUBLE for v in values)
    return ir.DataType.DOUBLE if double else ir.DataType.FLOAT


def dims_of(value: ir.Value) -> Dims | None:
    """Return the dimensions of a value, or None where even the rank is unknown."""
    return None if value.shape is None else tuple(value.shape.dims)


def is_known(dim: Dim) -> bool:
    """Tell whether a dimension has a size or a name."""
    return isinstance(dim, int) or dim.value is not None


def same_dim(a: Dim, b: Dim) -> bool:
    """Tell whether two dimensions are certainly equal: same number, or same known symbol."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.value is not None and a.value == b.value


def same_dims(a: Dims | None, b: Dims | None) -> bool:
    """Tell whether two shapes are certainly equal."""
    if a is None or b is None or len(a) != len(b):
        return False
    return all(same_dim(x, y) for x, y in zip(a, b, strict=True))


def may_be_same(a: Dims | None, b: Dims | None) -> bool:
    """Tell whether two shapes can be equal, as far as they are known."""
    if a is None or b is None:
        return True
    if len(a) != len(b):
        return False
    return all(
        x == y for x, y in zip(a, b, strict=True) if isinstance(x, int) and isinstance(y, int)
    )


def integers(dims: Sequence[object] | None) -> tuple[int, ...] | None:
    """Return dimensions as integers, or None where any of them is known at run time only."""
    known = [d for d in dims or () if isinstance(d, int)]
    return None if dims is None or len(known) < len(dims) else tuple(known)


def static_dims(value: ir.Value) -> tuple[int, ...] | None:
    """Return the shape as integers, or None where any of it is symbolic."""
    return integers(dims_of(value))


def dims_read(node: ir.Node) -> Dims | None:
    """Return the dimensions that a Shape or a Size tells, or None where the rank is unknown."""
    dims = None if node.inputs[0] is None else dims_of(node.inputs[0])
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", 2**62)
    return None if dims is None else dims[start:end]


def constant_array(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Return the constant that a value holds, or None."""
    if value is None:
        return None
    if value.const_value is not None:
        # A graph input with a default may be overridden by the caller: that is no constant.
        return None if value.is_graph_input() else value.const_value.numpy()
    producer = value.producer()
    if producer is not None and producer.op_type == "Constant" and producer.domain == "":
        tensor = producer.attributes.get_tensor("value")
        if tensor is None:
            tensor = ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()
    return None


def broadcast_dims(shapes: Sequence[Dims | None]) -> Dims | None:
    """Return the shape that operands broadcast to, with UNKNOWN where it is open."""
    known = [s for s in shapes if s is not None]
    if len(known) != len(shapes):
        return None
    wide = [s for s in known if s]
    if wide and all(s == wide[0] for s in wide):
        return wide[0]
    rank = max((len(s) for s in known), default=0)
    return tuple(
        _broadcast_dim([s[len(s) - rank + i] for s in known if len(s) - rank + i >= 0])
        for i in range(rank)
    )


def _broadcast_dim(dims: Sequence[Dim]) -> Dim:
    for dim in dims:
        if isinstance(dim, int) and dim != 1:
            return dim  # a number other than one decides, whatever the symbols are at run time
    symbols = [d for d in dims if not isinstance(d, int)]
    if not symbols:
        return 1
    return symbols[0] if all(same_dim(symbols[0], s) for s in symbols) else UNKNOWN


def infer_dtype(op_type: str, inputs: Inputs, attributes: Attributes) -> ir.DataType | None:
    """Return the element type of the first output of a node."""
    if op_type in RETURNS_BOOL:
        return ir.DataType.BOOL
    if op_type in RETURNS_INT64:
        return ir.DataType.INT64
    if op_type == "Cast":
        return ir.DataType(attributes["to"])
    if op_type == "ConstantOfShape":
        return attributes["value"].dtype if "value" in attributes else ir.DataType.FLOAT
    place = DTYPE_INPUT.get(op_type, 0)
    source = inputs[place] if place is not None and place < len(inputs) else None
    return None if source is None else source.dtype


def infer_dims(op_type: str, inputs: Inputs, attributes: Attributes) -> Dims | None:
    """Return the shape of the first output of a node, or None where the table does not tell.

    Operators that broadcast are not in it: `broadcast_dims` tells theirs.
    """
    dims = None if not inputs or inputs[0] is None else dims_of(inputs[0])
    if dims is None or op_type in KEEPS_SHAPE:
        return dims
    special = _SPECIAL.get(op_type)
    return None if special is None else special(inputs, dims, attributes)


def _ints(value: ir.Value | None) -> list[int] | None:
    array = constant_array(value)
    return None if array is None else [int(i) for i in array.reshape(-1)]


def _shape_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    return (len(dims[attributes.get("start", 0) : attributes.get("end", len(dims))]),)


def _reduce_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    if len(inputs) < 2 or inputs[1] is None:
        axes: list[int] | None = list(attributes.get("axes", range(len(dims))))
        if attributes.get("noop_with_empty_axes", 0):
            return dims
    else:
        axes = _ints(inputs[1])
    keep = attributes.get("keepdims", 1)
    if axes is None:
        return tuple(UNKNOWN for _ in dims) if keep else None
    gone = {a % len(dims) for a in axes} if dims else set()
    if keep:
        return tuple(1 if i in gone else d for i, d in enumerate(dims))
    return tuple(d for i, d in enumerate(dims) if i not in gone)


def _transpose_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    perm = attributes.get("perm", list(range(len(dims)))[::-1])
    return tuple(dims[p] for p in perm)


def _reshape_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    target = _ints(inputs[1])
    if target is None:
        return None
    copies = not attributes.get("allowzero", 0)  # zero stands for the dimension of the input
    result: list[Dim] = [
        dims[i] if d == 0 and copies and i < len(dims) else UNKNOWN if d < 0 else d
        for i, d in enumerate(target)
    ]
    if -1 in target:
        copied = {i for i, d in enumerate(target) if d == 0 and copies and i < len(dims)}
        whole = integers([d for i, d in enumerate(dims) if i not in copied])
        rest = integers([d for i, d in enumerate(target) if i not in copied and d != -1])
        if whole is not None and rest is not None and 0 not in rest:
            result[target.index(-1)] = math.prod(whole) // math.prod(rest)
    return tuple(result)


def _expand_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    target = _ints(inputs[1])
    return None if target is None else broadcast_dims([dims, tuple(target)])


def _matmul_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    other = None if inputs[1] is None else dims_of(inputs[1])
    if other is None or not dims or not other:
        return None
    batch = broadcast_dims([dims[:-2], other[:-2]])
    rows = dims[-2:-1]
    columns = other[-1:] if len(other) > 1 else ()
    return None if batch is None else (*batch, *rows, *columns)


def _unsqueeze_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    axes = _ints(inputs[1])
    if axes is None:
        return None
    rank = len(dims) + len(axes)
    new = {a % rank for a in axes}
    rest = iter(dims)
    return tuple(1 if i in new else next(rest) for i in range(rank))


def _squeeze_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    axes = _ints(inputs[1]) if len(inputs) > 1 else None
    if axes is None:
        return None
    gone = {a % len(dims) for a in axes}
    return tuple(d for i, d in enumerate(dims) if i not in gone)


def _concat_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    axis = attributes["axis"] % len(dims)
    parts = [None if v is None else dims_of(v) for v in inputs]
    along = integers([UNKNOWN if p is None else p[axis] for p in parts])
    return (*dims[:axis], UNKNOWN if along is None else sum(along), *dims[axis + 1 :])


def _slice_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    starts, ends = _ints(inputs[1]), _ints(inputs[2])
    axes = _ints(inputs[3]) if len(inputs) > 3 else None
    steps = _ints(inputs[4]) if len(inputs) > 4 else None
    if axes is None:
        return tuple(UNKNOWN for _ in dims)
    result = list(dims)
    for i, axis in enumerate(axes):
        dim, step = dims[axis], 1 if steps is None else steps[i]
        if starts is None or ends is None or not isinstance(dim, int):
            result[axis] = UNKNOWN
        else:
            # ONNX writes "to before the first element" as a very negative end; Python writes None.
            end = None if step < 0 and ends[i] < -dim else ends[i]
            result[axis] = len(range(dim)[slice(starts[i], end, step)])
    return tuple(result)


def _gather_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    indices = None if inputs[1] is None else dims_of(inputs[1])
    axis = attributes.get("axis", 0) % len(dims)
    return None if indices is None else (*dims[:axis], *indices, *dims[axis + 1 :])


def _flatten_dims(inputs: Inputs, dims: Dims, attributes: Attributes) -> Dims | None:
    axis = attributes.get("axis", 1)
    return _product(dims[:axis]), _product(dims[axis:])


def _product(dims: Dims) -> Dim:
    known = integers(dims)
    if known is None:
        return dims[0] if len(dims) == 1 else UNKNOWN
    return math.prod(known)


_SPECIAL = {
    "Concat": _concat_dims,
    "Expand": _expand_dims,
    "Flatten": _flatten_dims,
    "Gather": _gather_dims,
    "MatMul": _matmul_dims,
    "Reshape": _reshape_dims,
    "Shape": _shape_dims,
    "Slice": _slice_dims,
    "Squeeze": _squeeze_dims,
    "Transpose": _transpose_dims,
    "Unsqueeze": _unsqueeze_dims,
    **dict.fromkeys(REDUCTIONS, _reduce_dims),
}
