"""The names in a model: each value has one, is made once, and is there where it is used."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from onnxtrain.errors import ModelError

Body = onnx.GraphProto | onnx.FunctionProto


def require_sound_names(model: onnx.ModelProto, origin: str) -> None:
    """Raise a ModelError where a value has no name, is made twice, or is used but not there.

    The order of nodes is left open, as runtimes do not mind it.
    """
    waiting: list[tuple[Body, tuple[set[str], ...]]] = [(model.graph, ())]
    waiting.extend((function, ()) for function in model.functions)
    while waiting:
        body, around = waiting.pop()
        visible = (*around, _defined(body, origin))
        for node in body.node:
            for name in node.input:
                _require(name, visible, f"{described(node)} uses", origin)
            waiting.extend((graph, visible) for graph in subgraphs(node))
        for name in _outputs(body):
            if not name:
                raise ModelError(f"{origin}: an output of {_titled(body)} has no name")
            _require(name, visible, f"{_titled(body)} has the output", origin)


def described(node: onnx.NodeProto) -> str:
    """Name a node for the reader of an error, by its first output where it has no name."""
    label = node.name or next((name for name in node.output if name), "")
    return f"node {label!r} ({node.op_type})"


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node holds."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def _defined(body: Body, origin: str) -> set[str]:
    """Return the names that a body defines, each of them once."""
    makers: dict[str, str] = {}

    def define(name: str, maker: str) -> None:
        if name in makers:
            raise ModelError(
                f"{origin}: there are two values {name!r}, {makers[name]} and {maker}: every value "
                "needs a name of its own"
            )
        makers[name] = maker

    for name in _inputs(body):
        if not name:
            raise ModelError(f"{origin}: an input of {_titled(body)} has no name")
        define(name, f"an input of {_titled(body)}")
    if isinstance(body, onnx.GraphProto):
        given = set(makers)
        for tensor in body.initializer:
            if not tensor.name:
                raise ModelError(f"{origin}: an initializer of {_titled(body)} has no name")
            if tensor.name not in given:  # one that is an input too is its default
                define(tensor.name, "an initializer")
            given.discard(tensor.name)
    for node in body.node:
        for name in filter(None, node.output):
            define(name, f"a result of {described(node)}")
    return set(makers)


def _require(name: str, visible: tuple[set[str], ...], user: str, origin: str) -> None:
    if name and not any(name in scope for scope in visible):
        raise ModelError(
            f"{origin}: {user} {name!r}, which is not there: no node makes it, and it is neither "
            "an input nor an initializer"
        )


def _titled(body: Body) -> str:
    kind = "graph" if isinstance(body, onnx.GraphProto) else "function"
    return f"the {kind} {body.name!r}"


def _inputs(body: Body) -> list[str]:
    return [v if isinstance(v, str) else v.name for v in body.input]


def _outputs(body: Body) -> list[str]:
    return [v if isinstance(v, str) else v.name for v in body.output]
