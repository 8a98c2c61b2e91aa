"""The last step before a graph is written: groups of nodes become calls of functions.

`graph/kernels.py` tells what a group is. The function has the group's nodes as its body, so that
any runtime can put them in the place of the call; its name is that of the kernel and a number,
since bodies differ. (Functions of one name and several overloads are not an option: onnxruntime
before 1.27 runs the last body for all of them.) Groups with equal bodies share a function.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import onnx_ir as ir

from onnxtrain.format.names import FUNCTION_DOMAIN
from onnxtrain.offline.blocks.values import all_graphs, defined_names, rename
from onnxtrain.offline.graph.kernels import (
    KernelGroup,
    forget_kernel,
    input_values,
    kernel_groups,
    output_values,
)
from onnxtrain.offline.graph.names import Names
from onnxtrain.offline.graph.subgraphs import captured_values, release, subgraphs_of, values_of
from onnxtrain.offline.graph.sweep import sweep

_LEAST_IR_VERSION = 8  # has functions
_SMALL = 4096  # bytes of a constant that a body has itself; larger ones are inputs


def write_functions(model: ir.Model, native: bool = True) -> list[onnx.FunctionProto]:
    """Replace the groups of a model by calls, in place; return the functions.

    Without `native`, all nodes stay as they are; what only kernels would read is removed.
    `passes/native_kernels.py` has the passes that go before.
    """
    functions = _Functions(model.opset_imports)
    if native:
        _replace_groups(model.graph, functions, Names.of(model.graph), {})
    forget_kernel(model.graph.all_nodes())
    sweep(model.graph)
    if functions.made:
        model.opset_imports[FUNCTION_DOMAIN] = 1
        model.ir_version = max(model.ir_version or 0, _LEAST_IR_VERSION)
    return functions.made


@dataclass(frozen=True, eq=False)
class _Call:
    """A group that becomes a call."""

    group: KernelGroup
    nodes: Sequence[ir.Node]
    inputs: Sequence[ir.Value]  # of the kernel
    outputs: Sequence[ir.Value | None]


def _replace_groups(
    graph: ir.Graph, functions: _Functions, names: Names, outer: Mapping[str, ir.Value]
) -> None:
    """Replace the groups of a graph, then those of the subgraphs that are left.

    `outer` are the values of the graphs around it, by name.
    """
    named = {**outer, **{str(v.name): v for v in values_of(graph)}}
    calls = _fitting(graph, named)
    if calls:
        unit_of = {node: call for call in calls for node in call.nodes}
        order = _in_order(graph, unit_of)
        graph.remove(list(graph))
        for unit in order:
            graph.append(functions.call(unit, names) if isinstance(unit, _Call) else unit)
        named = {**outer, **{str(v.name): v for v in values_of(graph)}}
    for node in graph:
        for body in subgraphs_of(node):
            _replace_groups(body, functions, names, named)


# ---- which groups can be replaced ----------------------------------------------------------------


def _fitting(graph: ir.Graph, named: Mapping[str, ir.Value]) -> list[_Call]:
    """Return the groups that can be replaced by a node."""
    owners = _owners(graph)
    calls = list[_Call]()
    for group, nodes in kernel_groups(graph).items():
        inputs, outputs = input_values(group, nodes, named), output_values(group, nodes)
        in_order = [nodes[place] for place in sorted(nodes)]
        if inputs is not None and any(outputs) and _is_closed(in_order, outputs, owners):
            calls.append(_Call(group, in_order, inputs, outputs))
    while True:
        kept = _without_cycles(graph, _with_partners(calls, owners))
        if len(kept) == len(calls):
            break
        calls = kept
    for group, nodes in kernel_groups(graph).items():
        if not any(call.group is group for call in calls):
            forget_kernel(nodes.values())
    return calls


def _owners(graph: ir.Graph) -> dict[ir.Node, ir.Node]:
    """Map the nodes in subgraphs to the node of the graph that they are a part of."""
    return {
        inner: node for node in graph for body in subgraphs_of(node) for inner in body.all_nodes()
    }


def _is_closed(
    nodes: Sequence[ir.Node],
    outputs: Iterable[ir.Value | None],
    owners: Mapping[ir.Node, ir.Node],
) -> bool:
    """Tell whether nobody outside reads what the nodes compute, but for the outputs."""
    inside, public = set(nodes), set(outputs)
    for node in nodes:
        for value in node.outputs:
            if value in public:
                continue
            readers = {owners.get(user, user) for user, _ in value.uses()}
            if value.is_graph_output() or not readers <= inside:
                return False
    return True


def _with_partners(calls: list[_Call], owners: Mapping[ir.Node, ir.Node]) -> list[_Call]:
    """Leave out calls that would save something, or read it, without their partners."""
    while True:
        call_of = {node: call for call in calls for node in call.nodes}
        saved = {
            value: call
            for call in calls
            for i in call.group.saved_outputs
            if (value := call.outputs[i]) is not None
        }
        lost = set[_Call]()
        for call in calls:
            if any(call.inputs[i] not in saved for i in call.group.saved_inputs):
                lost.add(call)
        for value, call in saved.items():
            readers = {call_of.get(owners.get(user, user)) for user, _ in value.uses()} - {call}
            expected = (
                r is not None and any(r.inputs[i] is value for i in r.group.saved_inputs)
                for r in readers
            )
            if value.is_graph_output() or not all(expected):
                lost.add(call)
        if not lost:
            return calls
        calls = [call for call in calls if call not in lost]


def _without_cycles(graph: ir.Graph, calls: list[_Call]) -> list[_Call]:
    """Leave out calls that would wait for themselves: a value goes out of the group and back in."""
    while True:
        unit_of = {node: call for call in calls for node in call.nodes}
        cycles = _cycles(_sources(graph, unit_of))
        if not cycles:
            return calls
        lost = {
            max((unit for unit in cycle if isinstance(unit, _Call)), key=lambda c: len(c.nodes))
            for cycle in cycles
        }
        calls = [call for call in calls if call not in lost]


_Unit = _Call | ir.Node


def _sources(graph: ir.Graph, unit_of: Mapping[ir.Node, _Call]) -> dict[_Unit, dict[_Unit, None]]:
    """Return for each call and each other node what it waits for, in the order of the graph."""
    found: dict[_Unit, dict[_Unit, None]] = {}
    for node in graph:
        unit = unit_of.get(node, node)
        own = found.setdefault(unit, {})
        more = unit.inputs if isinstance(unit, _Call) else ()
        for value in (*node.inputs, *captured_values(node), *more):
            producer = None if value is None else value.producer()
            if producer is not None and producer.graph is graph:
                source = unit_of.get(producer, producer)
                if source is not unit:
                    own[source] = None
    return found


def _cycles(sources: Mapping[_Unit, Iterable[_Unit]]) -> list[list[_Unit]]:
    """Return the groups of units that wait for each other (strongly connected components)."""
    number: dict[_Unit, int] = {}
    lowest: dict[_Unit, int] = {}
    stack, on_stack, found = list[_Unit](), set[_Unit](), list[list[_Unit]]()
    for start in sources:
        if start in number:
            continue
        pending: list[tuple[_Unit, Iterator[_Unit]]] = [(start, iter(sources[start]))]
        while pending:
            unit, rest = pending[-1]
            if unit not in number:
                number[unit] = lowest[unit] = len(number)
                stack.append(unit)
                on_stack.add(unit)
            after = next((u for u in rest if u not in number or u in on_stack), None)
            if after is not None:
                if after in number:
                    lowest[unit] = min(lowest[unit], number[after])
                else:
                    pending.append((after, iter(sources[after])))
                continue
            pending.pop()
            if pending:
                above = pending[-1][0]
                lowest[above] = min(lowest[above], lowest[unit])
            if lowest[unit] == number[unit]:
                component = list[_Unit]()
                while not component or component[-1] is not unit:
                    component.append(stack.pop())
                    on_stack.discard(component[-1])
                if len(component) > 1:
                    found.append(component)
    return found


def _in_order(graph: ir.Graph, unit_of: Mapping[ir.Node, _Call]) -> list[_Unit]:
    """Return calls and other nodes so that each comes behind what it reads.

    A call takes the place of the last node of its group, and nothing else moves without need:
    onnxruntime runs nodes in an order that follows the file.
    """
    sources = _sources(graph, unit_of)
    place = {unit_of.get(node, node): index for index, node in enumerate(graph)}
    readers: dict[_Unit, list[_Unit]] = {unit: [] for unit in sources}
    waits = {unit: len(found) for unit, found in sources.items()}
    for unit, found in sources.items():
        for source in found:
            readers[source].append(unit)
    by_place = {index: unit for unit, index in place.items()}
    ready = [place[unit] for unit, count in waits.items() if not count]
    heapq.heapify(ready)
    order = list[_Unit]()
    while ready:
        unit = by_place[heapq.heappop(ready)]
        order.append(unit)
        for reader in readers[unit]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, place[reader])
    return order


# ---- functions -----------------------------------------------------------------------------------


@dataclass
class _Functions:
    """The functions that were written, each body once."""

    opsets: Mapping[str, int]
    made: list[onnx.FunctionProto] = field(default_factory=list)
    _names: dict[bytes, str] = field(default_factory=dict)
    _replaced: dict[ir.Value, ir.Value] = field(default_factory=dict)  # outputs of groups, by calls

    def call(self, call: _Call, names: Names) -> ir.Node:
        """Return a node that calls the function of a group, and lets its readers read it."""
        call = replace(call, inputs=[self._replaced.get(v, v) for v in call.inputs])
        group, body = call.group, _Body(call)
        function = onnx.FunctionProto(
            domain=FUNCTION_DOMAIN,
            input=body.inputs,
            output=body.outputs,
            attribute=sorted(group.attributes),
        )
        function.node.extend(body.nodes)
        inner = (n for node in call.nodes for b in subgraphs_of(node) for n in b.all_nodes())
        used = {node.domain for node in (*call.nodes, *inner)}
        for domain in sorted({"", *used}):
            function.opset_import.add(domain=domain, version=self.opsets[domain])
        key = group.kind.encode() + b" " + function.SerializeToString(deterministic=True)
        if key not in self._names:
            self._names[key] = function.name = f"{group.kind}_{len(self.made)}"
            self.made.append(function)
        node = _call_node(call, self._names[key], body, names)
        for old, new in zip(call.outputs, node.outputs, strict=False):
            if old is not None:
                self._replaced[old] = new
        return node


def _call_node(call: _Call, name: str, body: _Body, names: Names) -> ir.Node:
    kept = {k: v for k, v in call.group.attributes.items() if v is not None}
    node = ir.Node(
        FUNCTION_DOMAIN, name, [*call.inputs, *body.more],
        [ir.convenience.convert_attribute(k, v) for k, v in kept.items()],
        num_outputs=len(body.outputs), name=names.fresh(call.nodes[-1].name or name),
    )  # fmt: skip
    for index, (old, new) in enumerate(zip(call.outputs, node.outputs, strict=False)):
        if old is None:
            new.name = names.fresh(f"{name}_unused")
            continue
        new.name, new.type = old.name, old.type
        # The shape of what a kernel saves may be another one.
        new.shape = None if index in call.group.saved_outputs else old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = f"{old.name}_inside"
    for inner in call.nodes:
        release(inner)
    return node


class _Body:
    """The body of a function: the nodes of a group, with names of their own.

    Bodies that do the same are equal: values are numbered in the order of the nodes.
    """

    def __init__(self, call: _Call) -> None:
        self.more: list[ir.Value] = []  # what the nodes read beside the inputs of the kernel
        self.nodes: list[onnx.NodeProto] = []
        self._renamed = {str(v.name): f"i{i}" for i, v in reversed(list(enumerate(call.inputs)))}
        self.inputs = [f"i{i}" for i in range(len(call.inputs))]
        last = max(i for i, v in enumerate(call.outputs) if v is not None)
        self.outputs = [f"o{i}" for i in range(last + 1)]
        for name, value in zip(self.outputs, call.outputs, strict=False):
            if value is not None:
                self._renamed[str(value.name)] = name
            else:  # a number that nobody reads
                self._add(onnx.helper.make_node("Constant", [], [name], value_float=0.0))
        self._inside = {v for node in call.nodes for v in node.outputs}
        for node in call.nodes:
            self._write(node)

    def _add(self, node: onnx.NodeProto) -> None:
        node.name = f"{node.op_type}_{len(self.nodes)}"
        self.nodes.append(node)

    def _write(self, node: ir.Node) -> None:
        for value in (*node.inputs, *captured_values(node)):
            if value is not None and value not in self._inside:
                self._read(value)
        for value in node.outputs:
            if value.name and str(value.name) not in self._renamed:
                self._renamed[str(value.name)] = f"v{len(self._renamed)}"
        proto = ir.to_proto(node)
        self._rename_bodies(proto)
        proto.input[:] = [self._renamed.get(name, name) for name in proto.input]
        proto.output[:] = [self._renamed.get(name, name) for name in proto.output]
        self._add(proto)

    def _read(self, value: ir.Value) -> None:
        """Let the body read a value from outside: a small constant as its own, else an input."""
        name = str(value.name)
        if name in self._renamed:
            return
        tensor = value.const_value
        if tensor is not None and value.is_initializer() and tensor.nbytes <= _SMALL:
            self._renamed[name] = f"v{len(self._renamed)}"
            stored = ir.to_proto(tensor)
            stored.name = ""
            self._add(onnx.helper.make_node("Constant", [], [self._renamed[name]], value=stored))
        else:
            self._renamed[name] = f"i{len(self.inputs)}"
            self.inputs.append(self._renamed[name])
            self.more.append(value)

    def _rename_bodies(self, node: onnx.NodeProto) -> None:
        holder = onnx.GraphProto(node=[node])
        for graph in list(all_graphs(holder))[1:]:
            for name in filter(None, defined_names(graph)):
                self._renamed.setdefault(name, f"v{len(self._renamed)}")
            graph.name = "body"
            del graph.value_info[:]
            for index, inner in enumerate(graph.node):
                inner.name = f"{inner.op_type}_{index}"
            rename(graph, self._renamed)
        node.CopyFrom(holder.node[0])
