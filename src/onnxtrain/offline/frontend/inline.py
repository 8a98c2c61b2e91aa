"""Calls of model-local functions, replaced by what they stand for.

Values keep their names where those are free; what a call returns has the name that the caller gave
it. A result that is just handed through gets a node of its own, so that inputs keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.names import Names

_MOST = 1_000_000  # nodes; functions that call others twice, twenty levels deep, would be more

Functions = Mapping[ir.OperatorIdentifier, ir.Function]


def inline_functions(model: ir.Model) -> None:
    """Replace every call of a model-local function by its body, in place."""
    if not model.functions:
        return
    _require_moderate_size(model)
    names = Names.of(model.graph)
    waiting = [node for node in model.graph.all_nodes() if _called(node, model.functions)]
    while waiting:
        node = waiting.pop()
        function = model.functions[node.op_identifier()]
        for domain, version in function.opset_imports.items():
            # Where it has another, the operators are the same in both: the checker has seen to it.
            model.opset_imports.setdefault(domain, version)
        written = _Call(node, function, names).write()
        waiting.extend(n for n in written if _called(n, model.functions))
    model.functions.clear()


def _called(node: ir.Node, functions: Functions) -> bool:
    return node.op_identifier() in functions


def _require_moderate_size(model: ir.Model) -> None:
    sizes: dict[ir.OperatorIdentifier, int] = {}

    def count(nodes: Iterator[ir.Node]) -> int:
        return sum(size_of(node.op_identifier()) for node in nodes)

    def size_of(called: ir.OperatorIdentifier) -> int:
        if called not in model.functions:
            return 1
        if called not in sizes:
            sizes[called] = count(model.functions[called].all_nodes())
        return sizes[called]

    total = count(model.graph.all_nodes())
    if total > _MOST:
        raise ModelError(
            f"the model has {total} nodes once its functions are inlined; onnxtrain supports up to "
            f"{_MOST}"
        )


class _Call:
    """One call: what its inputs and attributes are in the body, and what became of its values."""

    def __init__(self, node: ir.Node, function: ir.Function, names: Names) -> None:
        self.node, self.function, self.names = node, function, names
        for given, taken, kind in (
            (node.inputs, function.inputs, "inputs"),
            (node.outputs, function.outputs, "outputs"),
        ):
            if len(given) > len(taken):
                raise ModelError(
                    f"node {self._label()!r} calls the function {function.name!r} of the domain "
                    f"{function.domain!r} with {len(given)} {kind}; it has {len(taken)}"
                )
        missing = [None] * (len(function.inputs) - len(node.inputs))
        self.values: dict[ir.Value, ir.Value | None] = dict(
            zip(function.inputs, (*node.inputs, *missing), strict=True)
        )
        self.attributes = {
            name: attribute
            for name, attribute in (*function.attributes.items(), *node.attributes.items())
            if attribute.value is not None
        }

    def write(self) -> list[ir.Node]:
        """Put the body in the place of the call; return all its nodes, in subgraphs too."""
        graph = self.node.graph
        assert graph is not None
        nodes = [self._copy_node(inner) for inner in self.function]
        graph.insert_before(self.node, nodes)
        made = {value for node in nodes for value in node.outputs}
        for old, inner in zip(self.node.outputs, self.function.outputs, strict=False):
            if not old.name:
                continue
            new = self.values.get(inner)
            if new is None:
                raise ModelError(
                    f"node {self._label()!r} uses an output of the function {self.function.name!r} "
                    "that is an input which the call leaves out"
                )
            if new not in made:  # handed through, or an output already
                identity = ir.node("Identity", [new])
                graph.insert_before(self.node, [identity])
                new = identity.outputs[0]
            made.discard(new)
            new.name, new.type, new.shape = old.name, new.type or old.type, new.shape or old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        graph.remove(self.node, safe=True)
        return [n for node in nodes for n in (node, *_inside(node))]

    def _label(self) -> str:
        return self.node.name or next((v.name for v in self.node.outputs if v.name), "")

    def _copy_node(self, node: ir.Node) -> ir.Node:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if v is None else self.values.get(v, v) for v in node.inputs],
            [a for a in map(self._copy_attribute, node.attributes.values()) if a is not None],
            num_outputs=len(node.outputs),
            overload=node.overload,
            name=self.names.fresh(node.name) if node.name else None,
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            self._copy_value(old, new)
        return copy

    def _copy_value(self, old: ir.Value, new: ir.Value) -> ir.Value:
        new.name = self.names.fresh(old.name) if old.name else old.name
        new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
        self.values[old] = new
        return new

    def _copy_attribute(self, attribute: ir.Attr) -> ir.Attr | None:
        """Return the attribute for this call; None where it stands for one that is not given."""
        if attribute.is_ref():
            found = self.attributes.get(attribute.ref_attr_name or "")
            return None if found is None else ir.Attr(attribute.name, found.type, found.value)
        if attribute.type == ir.AttributeType.GRAPH:
            return ir.AttrGraph(attribute.name, self._copy_graph(attribute.as_graph()))
        if attribute.type == ir.AttributeType.GRAPHS:
            graphs = [self._copy_graph(graph) for graph in attribute.as_graphs()]
            return ir.AttrGraphs(attribute.name, graphs)
        return attribute

    def _copy_graph(self, graph: ir.Graph) -> ir.Graph:
        inputs = [self._copy_value(v, ir.Value()) for v in graph.inputs]
        copy = ir.Graph(inputs, [], nodes=[], name=graph.name)
        for value in graph.initializers.values():
            tensor = value.const_value
            assert tensor is not None
            initializer = self._copy_value(value, ir.Value())
            initializer.const_value = ir.Tensor(
                tensor.numpy(), dtype=tensor.dtype, name=initializer.name
            )
            copy.register_initializer(initializer)
        copy.extend([self._copy_node(node) for node in graph])
        for value in graph.outputs:
            output = self.values.get(value, value)
            assert output is not None
            copy.outputs.append(output)
        return copy


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                yield from graph.all_nodes()
