"""What a model declares about the shapes of its results, and how much of it is true.

Runtimes do not rely on declared shapes, so many are wrong: the sizes of the example that was
traced, `[batch]` where there are two axes, one name for several sizes, 0 or -1 for anything. What
inference finds counts. A declaration adds what inference leaves open, with less trust the more of
the declarations have turned out wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from onnxtrain.offline.graph.infer import without_declared_shapes
from onnxtrain.offline.graph.onnx_inference import infer_shapes

_Dim = int | str | None
_Dims = list[_Dim]


def settled(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the types of results as they can be relied on, of those with a declared shape.

    A name that an output is declared with is not taken over: it was chosen by who exported the
    model, and nothing has ever checked it. An output that only its declaration calls a scalar has
    no shape.
    """
    graph = proto.graph
    own = {
        name for node in graph.node if node.domain not in ("", "ai.onnx") for name in node.output
    }
    declared = {
        info.name: info
        for info in (*graph.value_info, *graph.output)
        if info.type.tensor_type.HasField("shape") and info.name not in own
    }
    found = _inferred(proto) if declared else {}
    names = {dim for info in graph.input for dim in _named(info) if isinstance(dim, str)}
    outputs = {info.name for info in graph.output}
    varies = any(not isinstance(dim, int) for info in graph.input for dim in _dims(info))
    pairs = {name: (_dims(info), found.get(name)) for name, info in declared.items()}
    doubtful = any(_contradicts(stated, dims, names) for stated, dims in pairs.values())
    inner = [pair for name, pair in pairs.items() if name not in outputs]
    meant = {} if doubtful else _meant(inner, names)
    result = []
    for name, (given, dims) in pairs.items():
        stated = given
        if name in outputs:
            stated = [dim if isinstance(dim, int) and not varies else None for dim in stated]
        if doubtful:
            stated = [None for _ in stated]
        info = onnx.ValueInfoProto(name=name)
        info.type.tensor_type.elem_type = declared[name].type.tensor_type.elem_type
        if stated or dims is not None or name not in outputs:  # else it is a scalar by no account
            _set(info, _merged(stated, None if dims is None else _renamed(dims, meant), names))
        result.append(info)
    return result


def state(proto: onnx.ModelProto, infos: Iterable[onnx.ValueInfoProto]) -> None:
    """Declare shapes in a model, in place of those that it declares."""
    shapes = {info.name: info for info in infos}
    for info in (*proto.graph.value_info, *proto.graph.output):
        if info.name in shapes:
            info.type.tensor_type.ClearField("shape")
            info.type.MergeFrom(shapes[info.name].type)


def name_open_dims(proto: onnx.ModelProto) -> None:
    """Give each open dimension of the inputs a name, in place, so that inference follows it.

    -1 for an open dimension would be computed with.
    """
    for info in proto.graph.input:
        if info.type.tensor_type.HasField("shape"):
            dims = _named(info)
            info.type.tensor_type.ClearField("shape")
            _set(info, dims)


def _inferred(proto: onnx.ModelProto) -> dict[str, _Dims]:
    """Return the shapes that follow from the inputs; inference stops where it meets an error."""
    bare = without_declared_shapes(proto)
    name_open_dims(bare)
    for shape_arithmetic in (True, False):
        try:
            result = infer_shapes(bare, data_prop=shape_arithmetic)
        except Exception:  # the strict inference that follows tells what is wrong
            continue
        infos = (*result.graph.value_info, *result.graph.output)
        return {i.name: _dims(i) for i in infos if i.type.tensor_type.HasField("shape")}
    return {}


def _meant(pairs: Iterable[tuple[_Dims, _Dims | None]], names: set[str]) -> dict[str, str]:
    """Return which sizes of the inputs the names that inference has made up stand for.

    So say declarations: all that give such a size a name give it that one.
    """
    stated: dict[str, set[_Dim]] = {}
    for given, found in pairs:
        for old, new in zip(given, found or (), strict=False):
            if isinstance(new, str) and new not in names and old is not None:
                stated.setdefault(new, set()).add(old)
    alone = {new: next(iter(olds)) for new, olds in stated.items() if len(olds) == 1}
    return {new: old for new, old in alone.items() if isinstance(old, str) and old in names}


def _renamed(dims: _Dims, meant: Mapping[str, str]) -> _Dims:
    return [meant.get(dim, dim) if isinstance(dim, str) else dim for dim in dims]


def _merged(stated: _Dims, found: _Dims | None, names: set[str]) -> _Dims:
    """Fill what inference left open, or named by itself, with what is stated."""
    if found is None:
        return stated
    if len(found) != len(stated):
        return found
    return [
        dim if isinstance(dim, int) or dim in names else other if other is not None else dim
        for dim, other in zip(found, stated, strict=True)
    ]


def _contradicts(stated: _Dims, found: _Dims | None, names: set[str]) -> bool:
    """Tell whether a declared size is another one, or one that varies with the inputs."""
    return found is not None and any(
        isinstance(old, int) and (new in names or (isinstance(new, int) and new != old))
        for old, new in zip(stated, found, strict=False)
    )


def says_nothing(dim: int | str | None) -> bool:
    """Tell whether a dimension is what exporters write for those that they do not know."""
    if isinstance(dim, int):
        return dim <= 0
    return dim is None or not any(c.isalnum() for c in dim) or dim == "None"


def _dims(info: onnx.ValueInfoProto) -> _Dims:
    dims = (
        int(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param
        for dim in info.type.tensor_type.shape.dim
    )
    return [None if says_nothing(dim) else dim for dim in dims]


def _named(info: onnx.ValueInfoProto) -> _Dims:
    """Return the dimensions of an input, with a name for each that is open."""
    dims = enumerate(_dims(info))
    return [f"{info.name}_dim_{i}" if dim is None else dim for i, dim in dims]


def _set(info: onnx.ValueInfoProto, dims: _Dims) -> None:
    shape = info.type.tensor_type.shape
    shape.SetInParent()
    for dim in dims:
        made = shape.dim.add()
        if isinstance(dim, int):
            made.dim_value = dim
        elif dim is not None:
            made.dim_param = dim
