"""Ops: what gradient rules write with.

`op.Mul(a, 2.0)` appends a node to the graph that is being written and returns its output. Any
operator name works; Python numbers become constants of the element type of the tensor beside them,
lists of integers become int64 vectors. `a * b`, `a + b`, `-a` work on values while a rule runs.

The helpers below the operators hide the difference between static and symbolic dimensions: what is
known beforehand is folded into constants, the rest is computed at run time. No rule needs to ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.names import Names
from onnxtrain.autodiff.shapes import (
    Dim,
    Dims,
    constant_array,
    dims_of,
    infer_dims,
    infer_dtype,
    same_dim,
    same_dims,
    static_dims,
    working_type,
)
from onnxtrain.errors import ShapeInferenceError

if TYPE_CHECKING:
    from onnxtrain.autodiff.engine import ActivePath

Operand = ir.Value | float | int | bool | Sequence[int] | np.ndarray[Any, Any] | None
_arithmetic_lock = threading.RLock()


class Ops:
    """A writer of nodes into a graph."""

    def __init__(self, graph: ir.Graph, opset: int, names: Names | None = None) -> None:
        self.opset = opset
        self.names = names or Names.of(graph)
        self.scope = "grad"
        self.path: ActivePath | None = None  # what is being differentiated, for nested graphs
        self._root = graph
        self._targets = [graph]
        self._constants: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
        self._shapes: dict[ir.Value, ir.Value] = {}
        self._symbols: dict[str, ir.Value] = {}  # symbolic dimensions of the inputs

    # ---- writing nodes -------------------------------------------------------------------------

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def write(*inputs: Operand, **attributes: Any) -> ir.Value:
            return self.call(op_type, *inputs, **attributes)[0]

        return write

    def call(
        self,
        op_type: str,
        *inputs: Operand,
        outputs: int = 1,
        like: ir.Value | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """Append a node and return its outputs.

        `like` gives type and shape of the first output where they are known to be those of another
        value. Attributes that are None are left out.
        """
        kept = {k: v for k, v in attributes.items() if v is not None}
        values = self._operands(inputs)
        node = ir.node(
            op_type, values, kept, domain=domain, num_outputs=outputs,
            name=self.names.fresh(f"{self.scope}/{op_type}"),
        )  # fmt: skip
        for output in node.outputs:
            output.name = self.names.fresh(f"{node.name}_out")
        first = node.outputs[0]
        if like is not None:
            self.type_as(first, like)
        else:
            dtype = infer_dtype(op_type, values, kept)
            if dtype is not None:
                first.dtype = dtype
            dims = infer_dims(op_type, values, kept)
            first.shape = None if dims is None else ir.Shape(dims)
        self._targets[-1].append(node)
        return tuple(node.outputs)

    def _operands(self, inputs: Sequence[Operand]) -> list[ir.Value | None]:
        beside = next(
            (v.dtype for v in inputs if isinstance(v, ir.Value) and v.dtype != ir.DataType.BOOL),
            ir.DataType.FLOAT,
        )
        return [
            v if v is None or isinstance(v, ir.Value) else self.const(v, beside) for v in inputs
        ]

    def const(self, value: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """Return a constant: equal ones are one initializer.

        An array keeps its own type, a list of integers becomes int64; a number takes `dtype`.
        """
        if isinstance(value, np.ndarray):
            array = value
        elif isinstance(value, (bool, np.bool_)):
            array = np.array(value, dtype=np.bool_)
        elif isinstance(value, (list, tuple)):
            array = np.array(value, dtype=np.int64)
        else:
            array = np.array(value, dtype=(dtype or ir.DataType.FLOAT).numpy())
        tensor = ir.tensor(array)
        key = (tensor.dtype, tuple(array.shape), array.tobytes())
        if key not in self._constants:
            name = self.names.fresh(_constant_name(array))
            made = ir.Value(name=name, const_value=tensor)
            made.dtype, made.shape = tensor.dtype, ir.Shape(array.shape)
            self._root.register_initializer(made)
            self._constants[key] = made
        return self._constants[key]

    def int64(self, value: int | Sequence[int]) -> ir.Value:
        """Return an int64 constant: a scalar for a number, a vector for a list."""
        return self.const(np.array(value, dtype=np.int64))

    def type_as(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Give a value the type and shape of another and return it.

        Where its type is known already, it has to be the same one: this converts nothing.
        """
        if None not in (value.dtype, like.dtype) and value.dtype != like.dtype:
            raise TypeError(f"{value.name!r} is {value.dtype}, not {like.dtype} as {like.name!r}")
        value.type = like.type
        return self.shape_as(value, like)

    def shape_as(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Give a value the shape of another, which may be of another type, and return it."""
        value.shape = None if like.shape is None else like.shape.copy()
        return value

    def with_dims(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """State the shape of a value that the table in `shapes.py` cannot know."""
        value.shape = ir.Shape(dims)
        return value

    def body(
        self,
        inputs: Sequence[tuple[str, ir.DataType, Sequence[Dim] | None]],
        write: Callable[..., Sequence[ir.Value]],
        name: str = "body",
    ) -> ir.Graph:
        """Write a subgraph: `write(*inputs)` appends its nodes and returns its outputs.

        Values of the surrounding graph may be used inside. An output that is not made inside is
        passed through Identity, as ONNX asks.
        """
        made = []
        for label, dtype, dims in inputs:
            value = ir.Value(name=self.names.fresh(f"{self.scope}/{label}"))
            value.dtype, value.shape = dtype, None if dims is None else ir.Shape(dims)
            made.append(value)
        graph = ir.Graph(made, [], nodes=[], name=self.names.fresh(f"{self.scope}/{name}"))
        self._targets.append(graph)
        remembered = self._shapes, self._symbols
        self._shapes, self._symbols = {}, dict(self._symbols)
        try:
            results = [
                v if _made_in(v, graph) and not v.is_graph_output() else self.Identity(v)
                for v in write(*made)
            ]
            for index, result in enumerate(results):
                if any(result is earlier for earlier in results[:index]):
                    results[index] = self.Identity(result)
        finally:
            self._targets.pop()
            self._shapes, self._symbols = remembered
        graph.outputs.extend(results)
        return graph

    @property
    def target(self) -> ir.Graph:
        """The graph that nodes are appended to at the moment."""
        return self._targets[-1]

    @property
    def nested(self) -> bool:
        """Whether that is a subgraph."""
        return len(self._targets) > 1

    # ---- shapes --------------------------------------------------------------------------------

    def dims(self, value: ir.Value) -> Dims:
        """Return the dimensions of a value; an unknown rank is an error that names it."""
        dims = dims_of(value)
        if dims is None:
            raise ShapeInferenceError(
                f"the rank of {value.name!r} is not known, and a gradient needs it "
                f"(while writing {self.scope}). Give the value a shape in the model "
                "(value_info), or fix the shape of the inputs that it is computed from."
            )
        return dims

    def rank(self, value: ir.Value) -> int:
        """Return the number of dimensions."""
        return len(self.dims(value))

    def shape_of(self, value: ir.Value) -> ir.Value:
        """Return the shape as an int64 vector: a constant where it is static."""
        static = static_dims(value)
        if static is not None:
            return self.int64(static)
        if value not in self._shapes:
            parts = self._known_sizes(value)
            whole = self.Shape(value) if parts is None else self.dims_vector(*parts)
            self._shapes[value] = whole
        return self._shapes[value]

    def _known_sizes(self, value: ir.Value) -> list[int | ir.Value] | None:
        """Return the dimensions from the inputs of the graph, if they have all of them.

        A Shape of the value itself would keep the value in memory until it is read.
        """
        parts = []
        for dim in dims_of(value) or (None,):
            size = dim if isinstance(dim, int) else self._symbol(dim)
            if size is None:
                return None
            parts.append(size)
        return parts

    def _symbol(self, dim: Dim | None) -> ir.Value | None:
        """Return a symbolic dimension as a vector of length one, if an input has it."""
        if dim is None or isinstance(dim, int) or dim.value is None:
            return None
        name = dim.value
        if name not in self._symbols:
            for value in self._root.inputs:
                dims = dims_of(value) or ()
                axis = next((a for a, d in enumerate(dims) if same_dim(d, dim)), None)
                if axis is not None:
                    self._symbols[name] = self.Shape(value, start=axis, end=axis + 1)
                    break
        return self._symbols.get(name)

    def dim(self, value: ir.Value, axis: int) -> ir.Value:
        """Return one dimension as an int64 vector of length one."""
        dims = self.dims(value)
        axis %= len(dims)
        size = dims[axis]
        if isinstance(size, int):
            return self.int64([size])
        known = self._symbol(size)
        return self.Shape(value, start=axis, end=axis + 1) if known is None else known

    def dims_vector(self, *parts: int | ir.Value | Sequence[int]) -> ir.Value:
        """Concatenate numbers and int64 vectors into one shape vector, folding constants."""
        pieces = [p if isinstance(p, ir.Value) else self.int64(_as_list(p)) for p in parts]
        arrays = [constant_array(p) for p in pieces]
        if all(a is not None for a in arrays):
            return self.int64([int(i) for a in arrays if a is not None for i in a.reshape(-1)])
        pieces = [p for p, a in zip(pieces, arrays, strict=True) if a is None or a.size]
        return pieces[0] if len(pieces) == 1 else self.Concat(*pieces, axis=0)

    def count(
        self,
        value: ir.Value,
        axes: Sequence[int] | None = None,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """Return how many elements lie along `axes` (default: all).

        The result is of type `dtype`, or of that of `value`: mind that float16 ends at 65,504.
        """
        dims, dtype = self.dims(value), dtype or value.dtype
        chosen = [a % len(dims) for a in axes] if axes is not None else list(range(len(dims)))
        sizes = [dims[a] for a in chosen]
        if all(isinstance(d, int) for d in sizes):
            total = int(np.prod([d for d in sizes if isinstance(d, int)], dtype=np.int64))
            return self.const(float(total), dtype)
        picked = self.Gather(self.shape_of(value), chosen, axis=0)
        return self.Cast(self.ReduceProd(picked, keepdims=0), to=dtype)

    def one_over_count(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Return the inverse of `count`, which a half type can hold where it cannot the count."""
        count = self.count(value, axes, working_type(value))
        known = constant_array(count)
        if known is not None:
            return self.const(1.0 / float(known) if known else 0.0, value.dtype)
        return self.cast(self.Reciprocal(count), value.dtype)

    # ---- rearranging ---------------------------------------------------------------------------

    def reshape(self, value: ir.Value, shape: ir.Value | Sequence[int]) -> ir.Value:
        """Reshape to a shape vector; 0 in it means zero elements, as nowhere else in ONNX."""
        target = shape if isinstance(shape, ir.Value) else self.int64(list(shape))
        known = constant_array(target)
        zero = known is None or 0 in known
        return self.Reshape(value, target, allowzero=1 if zero else None)

    def reshape_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Reshape to the shape of another value."""
        if same_dims(dims_of(value), dims_of(like)):
            return value
        return self.shape_as(self.reshape(value, self.shape_of(like)), like)

    def expand_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Broadcast to the shape of another value."""
        if same_dims(dims_of(value), dims_of(like)):
            return value
        return self.shape_as(self.Expand(value, self.shape_of(like)), like)

    def full_like(self, like: ir.Value, fill: float) -> ir.Value:
        """Return a tensor of one number, with the type and shape of another value."""
        return self.expand_like(self.const(fill, like.dtype), like)

    def zeros_like(self, like: ir.Value) -> ir.Value:
        """Return zeros with the type and shape of another value."""
        return self.full_like(like, 0.0)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Permute the axes; the identity writes nothing."""
        return value if list(perm) == sorted(perm) else self.Transpose(value, perm=list(perm))

    def swap_last(self, value: ir.Value) -> ir.Value:
        """Transpose the last two axes."""
        axes = list(range(self.rank(value)))
        return self.Transpose(value, perm=[*axes[:-2], axes[-1], axes[-2]])

    def unsqueeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Insert axes of size one (positions in the result)."""
        return self.Unsqueeze(value, list(axes)) if len(axes) else value

    def squeeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Remove axes of size one."""
        return self.Squeeze(value, list(axes)) if len(axes) else value

    def slice(
        self,
        value: ir.Value,
        axis: int,
        start: int | ir.Value,
        end: int | ir.Value,
        step: int = 1,
    ) -> ir.Value:
        """Slice along one axis; bounds may be numbers or int64 vectors of length one."""
        axis %= self.rank(value)
        bounds = [b if isinstance(b, ir.Value) else self.int64([b]) for b in (start, end)]
        return self.Slice(value, *bounds, [axis], *([[step]] if step != 1 else []))

    def cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Convert to an element type; nothing is written where it has it already."""
        return value if value.dtype == dtype else self.Cast(value, to=dtype)

    # ---- reducing ------------------------------------------------------------------------------

    def sum(self, value: ir.Value, axes: Sequence[int], keepdims: bool = False) -> ir.Value:
        """Sum over axes; summing over none changes nothing."""
        if not len(axes):
            return value
        return self.ReduceSum(value, [a % self.rank(value) for a in axes], keepdims=int(keepdims))

    def mean(self, value: ir.Value, axes: Sequence[int], keepdims: bool = True) -> ir.Value:
        """Average over axes, kept with size one by default."""
        return self.ReduceMean(value, [a % self.rank(value) for a in axes], keepdims=int(keepdims))

    def add_all(self, values: Sequence[ir.Value]) -> ir.Value:
        """Add values of one shape in a single node.

        Add runs on all threads and Sum on one, which pays only where it spares intermediate sums.
        """
        if len(values) == 1:
            return values[0]
        return self.Add(*values) if len(values) == 2 else self.Sum(*values)

    def sum_to(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Undo a broadcast: sum `value` down to the shape of `like`.

        Axes whose broadcasting is certain, or certainly absent, are settled here. Where a symbolic
        dimension leaves it open, the axes to sum are found at run time.
        """
        source, target = dims_of(value), dims_of(like)
        if value is like or same_dims(source, target):
            return value
        if source is None or target is None:
            return self._sum_to_at_run_time(value, like, None)
        lead = len(source) - len(target)
        pairs = list(enumerate(zip(source[lead:], target, strict=True), start=lead))
        certain = [axis for axis, (s, t) in pairs if t == 1 and s != 1]
        open_ = [
            axis for axis, (s, t) in pairs
            if not isinstance(t, int) and s != 1 and not same_dim(s, t)
        ]  # fmt: skip
        if open_:
            return self._sum_to_at_run_time(value, like, lead)
        result = self.sum(value, list(range(lead)) + certain, keepdims=bool(certain))
        return self.reshape_like(result, like) if certain and lead else self.shape_as(result, like)

    def _sum_to_at_run_time(self, value: ir.Value, like: ir.Value, lead: int | None) -> ir.Value:
        """Find the axes to sum at run time; `lead` is by how much the ranks differ, if known."""
        small, large = self.shape_of(like), self.shape_of(value)
        if lead is None:
            difference = self.Sub(self.Shape(large), self.Shape(small))
            small = self.Concat(self.Expand(self.int64([1]), difference), small, axis=0)
        elif lead:
            small = self.Concat([1] * lead, small, axis=0)
        differs = self.Not(self.Equal(small, large))
        axes = self.Squeeze(self.NonZero(differs), [0])
        summed = self.ReduceSum(value, axes, keepdims=1, noop_with_empty_axes=1)
        return self.shape_as(self.Reshape(summed, self.shape_of(like), allowzero=1), like)

    # ---- arithmetic on values ------------------------------------------------------------------

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Let `+ - * /` on values write nodes here.

        onnx_ir keeps one handler for the whole process, so only one thread differentiates at a
        time.
        """
        with _arithmetic_lock:
            previous = ir.set_value_magic_handler(self)
            try:
                yield
            finally:
                ir.set_value_magic_handler(previous)


def _made_in(value: ir.Value, graph: ir.Graph) -> bool:
    producer = value.producer()
    return producer is not None and producer.graph is graph


def _as_list(part: int | Sequence[int]) -> list[int]:
    return [part] if isinstance(part, int) else list(part)


def _constant_name(array: np.ndarray[Any, Any]) -> str:
    if array.size > 6:
        return "const"
    numbers = "x".join(f"{i:.6g}" if array.dtype.kind != "b" else str(i) for i in array.flat)
    return f"const/{array.dtype.name}/{numbers}" if numbers else f"const/{array.dtype.name}/empty"


def attributes_of(node: ir.Node) -> Mapping[str, Any]:
    """Return the attributes of a node as plain Python values."""
    return {name: attribute.value for name, attribute in node.attributes.items()}
