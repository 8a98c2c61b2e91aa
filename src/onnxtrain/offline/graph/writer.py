"""Writer: appends nodes to a graph.

`op.Mul(a, 2.0)` appends a node to the graph that is being written and returns its output. Any
operator name works; Python numbers become constants of the element type of the tensor beside them,
lists of integers become int64 vectors. `a * b`, `a + b`, `-a` work on values while a rule runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import onnx_ir as ir

from onnxtrain.offline.graph.initializers import WRITTEN
from onnxtrain.offline.graph.kernels import Attribute, mark_kernel, written_after
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.op_facts import BROADCASTS
from onnxtrain.offline.graph.shapes import (
    Dim,
    Dims,
    broadcast_dims,
    constant_array,
    dims_of,
    infer_dims,
    infer_dtype,
)

Output = TypeVar("Output", ir.Value, ir.Value | None)
Operand = ir.Value | float | int | bool | Sequence[int] | np.ndarray[Any, Any] | None
_arithmetic_lock = threading.RLock()


class Writer:
    """A writer of nodes into a graph."""

    def __init__(self, graph: ir.Graph, opset: int, names: Names | None = None) -> None:
        self.opset = opset
        self.names = names or Names.of(graph)
        self.scope = "grad"
        self.finite_cotangents: Container[ir.Value] = ()  # set while a gradient is written
        self.guarded = False  # set while the gradient of a guarded node is written
        self.lean = False  # whether a formulation that takes little memory goes before a fast one
        self.on_gpu = False  # whether one of few nodes does: each is a launch, and no branch is one
        self._root = graph
        self._targets = [graph]
        self._constants: dict[tuple[np.dtype[Any], tuple[int, ...], bytes], ir.Value] = {}
        # The shapes of values, by the value or by its sizes; and values as rows of their last axis.
        self._shapes: dict[ir.Value | tuple[int | ir.Value, ...], ir.Value] = {}
        self._rows: dict[ir.Value, ir.Value] = {}
        self._symbols: dict[str, ir.Value] = {}  # symbolic dimensions of the inputs
        self._wide: dict[tuple[ir.Value, int], ir.Value] = {}  # scalars, with more axes

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
        dims: Dims | None = None
        if op_type in BROADCASTS:
            shapes = [None if v is None else dims_of(v) for v in values]
            values = self._with_equal_ranks(values, shapes)
            dims = broadcast_dims(shapes)
        name = self.names.fresh(f"{self.scope}/{op_type}")
        given = [_attribute(k, v) for k, v in kept.items()]
        node = ir.Node(domain, op_type, values, given, num_outputs=outputs, name=name)
        for output in node.outputs:
            output.name = self.names.fresh(f"{name}_out")
        first = node.outputs[0]
        if like is not None:
            self.type_as(first, like)
        elif not domain:
            dtype = infer_dtype(op_type, values, kept)
            if dtype is not None:
                first.dtype = dtype
            if op_type not in BROADCASTS:
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

    def _with_equal_ranks(
        self, values: list[ir.Value | None], shapes: Sequence[Dims | None]
    ) -> list[ir.Value | None]:
        """Give scalars the rank of a tensor beside them whose last axis has the size one.

        Otherwise onnxruntime broadcasts element by element: a kernel of 1280×320×1×1 takes 2.0 ms
        times a scalar, and 0.025 ms times a tensor of 1×1×1×1.
        """
        rank = max(
            (len(s) for s in shapes if s is not None and _is_slow_with_scalars(s)), default=0
        )
        if not rank:
            return values
        return [
            v if v is None or shape not in ((), (1,)) else self._widen(v, rank)
            for v, shape in zip(values, shapes, strict=True)
        ]

    def _widen(self, scalar: ir.Value, rank: int) -> ir.Value:
        known = constant_array(scalar)
        if known is not None:
            return self.const(known.reshape([1] * rank))
        if (scalar, rank) not in self._wide:
            (wide,) = self.call("Reshape", scalar, [1] * rank)
            self._wide[scalar, rank] = self.with_dims(wide, [1] * rank)
        return self._wide[scalar, rank]

    def const(
        self, value: Any, dtype: ir.DataType | None = None, name: str | None = None
    ) -> ir.Value:
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
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.Tensor(array)
            name = self.names.fresh(name or _constant_name(array))
            made = ir.Value(name=name, const_value=tensor)
            made.dtype, made.shape = tensor.dtype, ir.Shape(array.shape)
            made.meta[WRITTEN] = True
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
        remembered = self._shapes, self._rows, self._symbols, self._wide
        self._shapes, self._rows = {}, {}
        self._symbols, self._wide = dict(self._symbols), dict(self._wide)
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
            self._shapes, self._rows, self._symbols, self._wide = remembered
        graph.outputs.extend(results)
        return graph

    def kernel(
        self,
        kind: str,
        inputs: Sequence[ir.Value],
        write: Callable[[], Sequence[Output]],
        *,
        saved: Collection[ir.Value] = (),
        **attributes: Attribute,
    ) -> list[Output]:
        """Write nodes that a native kernel can stand in for, and return what they compute.

        `inputs` is what the kernel reads, in its order; the nodes may read more. `write` appends
        the nodes and returns the outputs of the kernel, None for those that nobody needs. For
        `saved`, see `mark_kernel`.
        """
        last = self.target[-1] if len(self.target) else None
        remembered = self._shapes, self._rows, self._symbols, self._wide
        # What is written inside is not used outside: a kernel would not compute it.
        self._shapes, self._rows = dict(self._shapes), dict(self._rows)
        self._symbols, self._wide = dict(self._symbols), dict(self._wide)
        try:
            outputs = list(write())
        finally:
            self._shapes, self._rows, self._symbols, self._wide = remembered
        written = list(written_after(self.target, last))[::-1]
        mark_kernel(written, kind, inputs, outputs, saved=saved, **attributes)
        return outputs

    @property
    def target(self) -> ir.Graph:
        """The graph that nodes are appended to at the moment."""
        return self._targets[-1]

    @property
    def nested(self) -> bool:
        """Whether that is a subgraph."""
        return len(self._targets) > 1

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


def _attribute(name: str, value: Any) -> ir.Attr:
    """Return an attribute; onnx_ir's own conversion checks slow protocols first."""
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return ir.AttrInt64s(name, value)
    return ir.convenience.convert_attribute(name, value)


def _is_slow_with_scalars(dims: Dims) -> bool:
    return len(dims) > 1 and dims[-1] == 1 and any(d != 1 for d in dims)


def _made_in(value: ir.Value, graph: ir.Graph) -> bool:
    producer = value.producer()
    return producer is not None and producer.graph is graph


def _constant_name(array: np.ndarray[Any, Any]) -> str:
    if array.size > 6:
        return "const"
    numbers = "x".join(f"{i:.6g}" if array.dtype.kind != "b" else str(i) for i in array.flat)
    return f"const/{array.dtype.name}/{numbers}" if numbers else f"const/{array.dtype.name}/empty"


def attributes_of(node: ir.Node) -> Mapping[str, Any]:
    """Return the attributes of a node as plain Python values."""
    return {name: attribute.value for name, attribute in node.attributes.items()}
