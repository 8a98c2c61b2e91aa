"""The shapes of the values that a Loop carries from step to step.

A state may change its shape in a step, so onnx infers none for it, nor for what is computed from
it. Most states keep theirs. Here the shape of the initial value is assumed for every step, and the
body inferred with it: what a step then returns shows whether the assumption holds. Dimensions in
which it does not are left open, and the rest is tried again. The result of an If is treated alike,
since onnx forgets the name of a size even where both branches have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnxtrain.offline.graph.onnx_inference import infer_shapes

Dim = int | str | None  # None is open
Shape = list[Dim]
Infer = Callable[[onnx.ModelProto], onnx.ModelProto]
_Key = tuple[int, int]  # which Loop or If, which of its states or outputs
_OWN = "loop/"  # the symbols of dimensions that have no name outside of the Loop
_INT64 = onnx.TensorProto.INT64
_GENERATED = "unk__"  # what onnx calls them, differently in each run


def infer_with_loops(proto: onnx.ModelProto, data_prop: bool) -> onnx.ModelProto:
    """Infer strictly; the shapes of the states of Loops are part of the result."""

    def infer(model: onnx.ModelProto) -> onnx.ModelProto:
        return infer_shapes(model, strict=True, data_prop=data_prop)

    if not any(isinstance(place, _Loop) for place in _places(proto.graph, {})):
        return infer(proto)
    try:
        return _infer(proto, infer, keep_ranks=True)
    except Exception:  # exporters may declare wrong ones
        return _infer(proto, infer, keep_ranks=False)


def _infer(proto: onnx.ModelProto, infer: Infer, keep_ranks: bool) -> onnx.ModelProto:
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    for place in _places(bare.graph, {}):
        for body in place.bodies:
            _forget_shapes(body, keep_ranks)
    _show_constants(bare.graph, {})
    assumed: dict[_Key, Shape | None] = {}  # None: not even the rank stays
    while True:
        try:
            inferred = infer(_with_assumptions(bare, assumed))
        except Exception:
            if not any(assumed.values()):
                raise
            # A step does not run with these shapes: keep the ranks, or nothing.
            ranks = any(dim is not None for shape in assumed.values() for dim in shape or ())
            assumed = {
                key: [None] * len(shape) if shape and ranks else None
                for key, shape in assumed.items()
            }
            continue
        found = {
            (number, index): (place, index)
            for number, place in enumerate(_places(inferred.graph, {}))
            for index in range(place.count)
        }
        new = {
            key: shape
            for key, place in found.items()
            if key not in assumed and (shape := _initial_shape(*place)) is not None
        }
        # Where a size is open, another assumption may still tell it.
        new = {key: shape for key, shape in new.items() if not _has_own(shape)} or new
        # Only when all that can be assumed has been, a step shows whether it holds.
        learnt: dict[_Key, Shape | None] = dict(new) or {
            key: _confirmed(*found[key], shape)
            for key, shape in assumed.items()
            if shape is not None
        }
        if all(assumed.get(key, ()) == shape for key, shape in learnt.items()):
            return inferred
        assumed.update(learnt)


def _with_assumptions(
    bare: onnx.ModelProto, assumed: Mapping[_Key, Shape | None]
) -> onnx.ModelProto:
    tried = onnx.ModelProto()
    tried.CopyFrom(bare)
    places = list(_places(tried.graph, {}))
    for (number, index), shape in assumed.items():
        places[number].assume(index, shape)
    return tried


def _initial_shape(place: _Place, index: int) -> Shape | None:
    initial = _shape_of(place.first(index))
    if initial is None or (any(map(_is_open, initial)) and not isinstance(place, _Loop)):
        return None
    name = place.node.output[index] if index < len(place.node.output) else f"state_{index}"
    return [f"{_OWN}{name}/{i}" if _is_open(dim) else dim for i, dim in enumerate(initial)]


def _confirmed(place: _Place, index: int, assumed: Shape) -> Shape | None:
    """Return what the first and the next step leave of an assumption."""
    first, after = _shape_of(place.first(index)), _shape_of(place.after(index))
    if first is None or after is None or not len(first) == len(after) == len(assumed):
        return None
    return [
        dim if dim == c and (dim == a or (_is_open(a) and str(dim).startswith(_OWN))) else None
        for dim, a, c in zip(assumed, first, after, strict=True)
    ]


def _has_own(shape: Shape) -> bool:
    return any(str(dim).startswith(_OWN) for dim in shape)


def _is_open(dim: Dim) -> bool:
    return dim is None or str(dim).startswith(_GENERATED)


@dataclass(frozen=True)
class _Place:
    """A node whose outputs come in two ways: without and after a step, or from either branch."""

    node: onnx.NodeProto
    bodies: Sequence[onnx.GraphProto]
    graph: onnx.GraphProto
    around: Mapping[str, onnx.TypeProto]  # the types of the values that are visible there

    @property
    def count(self) -> int:
        return len(self.node.output)

    def first(self, index: int) -> onnx.TypeProto | None:
        kind: onnx.TypeProto = self.bodies[0].output[index].type
        return kind

    def after(self, index: int) -> onnx.TypeProto:
        kind: onnx.TypeProto = self.bodies[1].output[index].type
        return kind

    def assume(self, index: int, shape: Shape | None) -> None:
        """State the shape of an output."""
        kind = self.first(index)
        if shape is not None and kind is not None and kind.HasField("tensor_type"):
            self.declare(index, kind, shape)

    def declare(self, index: int, kind: onnx.TypeProto, shape: Shape | None) -> None:
        name = self.node.output[index] if index < len(self.node.output) else ""
        if not name:
            return
        found = [i for i in (*self.graph.output, *self.graph.value_info) if i.name == name]
        for info in found or [self.graph.value_info.add(name=name)]:
            info.type.tensor_type.elem_type = kind.tensor_type.elem_type
            _set_shape(info, shape)


class _Loop(_Place):
    @property
    def body(self) -> onnx.GraphProto:
        return self.bodies[0]

    @property
    def count(self) -> int:
        return len(self.node.input) - 2

    def first(self, index: int) -> onnx.TypeProto | None:
        return self.around.get(self.node.input[2 + index])

    def after(self, index: int) -> onnx.TypeProto:
        kind: onnx.TypeProto = self.body.output[1 + index].type
        return kind

    def assume(self, index: int, shape: Shape | None) -> None:
        """State the shape of a state, in the body and behind the Loop."""
        before = self.body.input[2 + index]
        if not before.type.WhichOneof("value"):
            initial = self.around.get(self.node.input[2 + index], onnx.TypeProto())
            before.type.CopyFrom(initial)
        if before.type.HasField("tensor_type"):
            _set_shape(before, shape)
            self.declare(index, before.type, shape)


def _places(graph: onnx.GraphProto, outer: Mapping[str, onnx.TypeProto]) -> Iterator[_Place]:
    """Yield the Loops and Ifs of a graph and of its subgraphs."""
    around = dict(outer)
    for info in (*graph.input, *graph.value_info, *graph.output):
        around[info.name] = info.type
    for tensor in graph.initializer:
        around[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    for node in graph.node:
        bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        if node.domain == "" and node.op_type == "Loop":
            yield _Loop(node, bodies, graph, around)
        elif node.domain == "" and node.op_type == "If":
            yield _Place(node, bodies, graph, around)
        for body in bodies:
            yield from _places(body, around)


def _forget_shapes(body: onnx.GraphProto, keep_ranks: bool) -> None:
    """Drop the sizes in a body, which inference finds: exporters note those of one step."""
    own = {name for node in body.node if node.domain for name in node.output}
    for info in (*body.input[2:], *body.value_info, *body.output):
        shape = _shape_of(info.type)
        if info.name not in own and shape is not None:
            _set_shape(info, [None] * len(shape) if keep_ranks else None)


def _show_constants(graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]) -> None:
    """Repeat integers of the graphs around in each body: inference sees only its own."""
    constants = {**outer, **{t.name: t for t in graph.initializer if t.data_type == _INT64}}
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                body = attribute.g
                used = {name for inner in body.node for name in inner.input}
                _show_constants(body, constants)
                body.initializer.extend(constants[name] for name in used & constants.keys())


def _shape_of(kind: onnx.TypeProto | None) -> Shape | None:
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in kind.tensor_type.shape.dim
    ]


def _set_shape(info: onnx.ValueInfoProto, shape: Shape | None) -> None:
    info.type.tensor_type.ClearField("shape")
    if shape is None:
        return
    info.type.tensor_type.shape.SetInParent()
    for dim in shape:
        entry = info.type.tensor_type.shape.dim.add()
        if isinstance(dim, int):
            entry.dim_value = dim
        elif dim is not None:
            entry.dim_param = dim
