"""The shapes of the values that a Loop carries from step to step.

A state may change its shape in a step, so onnx infers none for it, nor for what is computed from
it. Most states keep theirs. Here the shape of the initial value is assumed for every step, and the
body inferred with it: what a step then returns shows whether the assumption holds. Dimensions in
which it does not are left open, and the rest is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx

Dim = int | str | None  # None is open
Shape = list[Dim]
Infer = Callable[[onnx.ModelProto], onnx.ModelProto]
_Key = tuple[int, int]  # which Loop, which of its states
_OWN = "loop/"  # the symbols of dimensions that have no name outside of the Loop
_INT64 = onnx.TensorProto.INT64
_GENERATED = "unk__"  # what onnx calls them, differently in each run


def infer_with_loops(proto: onnx.ModelProto, data_prop: bool) -> onnx.ModelProto:
    """Infer strictly; the shapes of the states of Loops are part of the result."""

    def infer(model: onnx.ModelProto) -> onnx.ModelProto:
        return onnx.shape_inference.infer_shapes(model, True, True, data_prop)

    if not any(True for _ in _loops(proto.graph, {})):
        return infer(proto)
    try:
        return _infer(proto, infer, keep_ranks=True)
    except Exception:  # exporters may declare wrong ones
        return _infer(proto, infer, keep_ranks=False)


def _infer(proto: onnx.ModelProto, infer: Infer, keep_ranks: bool) -> onnx.ModelProto:
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    for loop in _loops(bare.graph, {}):
        _forget_shapes(loop.body, keep_ranks)
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
            (number, index): (loop, index)
            for number, loop in enumerate(_loops(inferred.graph, {}))
            for index in range(loop.states)
        }
        new = {
            key: shape
            for key, place in found.items()
            if key not in assumed and (shape := _initial_shape(*place)) is not None
        }
        # Only when all that can be assumed has been, a step shows whether it holds.
        learnt: dict[_Key, Shape | None] = dict(new) or {
            key: _confirmed(*found[key], shape) for key, shape in assumed.items() if shape
        }
        if all(assumed.get(key, ()) == shape for key, shape in learnt.items()):
            return inferred
        assumed.update(learnt)


def _with_assumptions(
    bare: onnx.ModelProto, assumed: Mapping[_Key, Shape | None]
) -> onnx.ModelProto:
    tried = onnx.ModelProto()
    tried.CopyFrom(bare)
    loops = list(_loops(tried.graph, {}))
    for (number, index), shape in assumed.items():
        loops[number].assume(index, shape)
    return tried


def _initial_shape(loop: _Loop, index: int) -> Shape | None:
    initial = _shape_of(loop.around.get(loop.node.input[2 + index]))
    if initial is None:
        return None
    name = loop.node.output[index] if index < len(loop.node.output) else f"state_{index}"
    return [f"{_OWN}{name}/{i}" if _is_open(dim) else dim for i, dim in enumerate(initial)]


def _confirmed(loop: _Loop, index: int, assumed: Shape) -> Shape | None:
    """Return what the first and the next step leave of an assumption."""
    first = _shape_of(loop.around.get(loop.node.input[2 + index]))
    after = _shape_of(loop.body.output[1 + index].type)
    if first is None or after is None or not len(first) == len(after) == len(assumed):
        return None
    return [
        dim if dim == c and (dim == a or (_is_open(a) and str(dim).startswith(_OWN))) else None
        for dim, a, c in zip(assumed, first, after, strict=True)
    ]


def _is_open(dim: Dim) -> bool:
    return dim is None or str(dim).startswith(_GENERATED)


@dataclass(frozen=True)
class _Loop:
    node: onnx.NodeProto
    body: onnx.GraphProto
    graph: onnx.GraphProto
    around: Mapping[str, onnx.TypeProto]  # the types of the values that are visible there

    @property
    def states(self) -> int:
        return len(self.node.input) - 2

    def assume(self, index: int, shape: Shape | None) -> None:
        """State the shape of a state, in the body and behind the Loop."""
        before = self.body.input[2 + index]
        if not before.type.WhichOneof("value"):
            initial = self.around.get(self.node.input[2 + index], onnx.TypeProto())
            before.type.CopyFrom(initial)
        if not before.type.HasField("tensor_type"):
            return
        infos = [before]
        name = self.node.output[index] if index < len(self.node.output) else ""
        declared = (*self.graph.output, *self.graph.value_info)
        infos += [info for info in declared if name and info.name == name]
        if name and len(infos) == 1:
            infos.append(self.graph.value_info.add(name=name))
        for info in infos:
            info.type.tensor_type.elem_type = before.type.tensor_type.elem_type
            _set_shape(info, shape)


def _loops(graph: onnx.GraphProto, outer: Mapping[str, onnx.TypeProto]) -> Iterator[_Loop]:
    """Yield the Loops of a graph and of its subgraphs."""
    around = dict(outer)
    for info in (*graph.input, *graph.value_info, *graph.output):
        around[info.name] = info.type
    for tensor in graph.initializer:
        around[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                if node.op_type == "Loop" and node.domain == "":
                    yield _Loop(node, attribute.g, graph, around)
                yield from _loops(attribute.g, around)


def _forget_shapes(body: onnx.GraphProto, keep_ranks: bool) -> None:
    """Drop the sizes in a body, which inference finds: exporters note those of one step."""
    own = {name for node in body.node if node.domain for name in node.output}
    for info in (*body.value_info, *body.output):
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
