"""Reverse-mode differentiation of an ONNX graph, written back as ONNX.

The pass is the textbook one. A *cotangent* of a value is the derivative of the scalar that we
differentiate (more exactly: of a weighted sum of the output) with respect to that value; it has the
shape and type of the value. It starts with one given cotangent per output, the *seed*, and walks
the nodes backwards. When it comes to a node, all consumers of the node's outputs have been visited,
so the cotangents of the outputs are complete: they are added up, and the rule of the operator turns
them into contributions to the cotangents of the inputs.

Only *active* nodes are visited: those that depend on a value of interest and that the output
depends on, along edges through which a gradient can flow. An integer carries no gradient, unless it
means a float in a quantized network; an operator declared zero lets nothing through, and a rule
names the inputs at which it stops.

Three things keep rules short, and are seen to here: shapes of cotangents are known, broadcasting is
undone (`broadcasts=True`), and rules compute what is easy to say; what nobody needs is swept away
afterwards (`sweep.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import onnx_ir as ir

from onnxtrain.errors import MissingGradientError, MissingRule, OnnxTrainError
from onnxtrain.offline.autodiff.nan_safety import finite_cotangents, nodes_to_guard
from onnxtrain.offline.autodiff.registry import (
    Cotangents,
    Rule,
    lookup,
    refusal,
    zero_reason,
)
from onnxtrain.offline.graph.error_context import error_context
from onnxtrain.offline.graph.integer_operators import means_floats
from onnxtrain.offline.graph.loop_parts import LoopParts, State
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.shapes import dims_of, is_float, may_be_same
from onnxtrain.offline.graph.subgraphs import captured_values, subgraphs_of
from onnxtrain.offline.graph.torch_calls import is_detach


def differentiate(
    op: Ops,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
    straight_through: frozenset[str] | None = None,
    *,
    rules: Mapping[ir.Node, Rule] | None = None,
    finite_seeds: bool = False,
    finite: Iterable[ir.Value] = (),
) -> dict[ir.Value, ir.Value | None]:
    """Append the gradient of `nodes` to the graph that `op` writes into.

    `nodes` are in topological order. `seeds` gives the cotangents of the outputs that are
    differentiated; `finite_seeds` says that none of them is infinite, whoever runs the graph. The
    result has an entry for each value of `wrt`: its cotangent, or None where no gradient flows to
    it. `straight_through` names operators to treat as the identity; it is None in training, where
    users cannot name any. `rules` has nodes with a gradient of their own, found by a pass, and
    `finite` what is no input of the caller although no node computes it.
    """
    path = ActivePath(nodes, wrt, seeds, op.opset, straight_through, rules)
    path.require_rules()
    around = op.scope, op.finite_cotangents
    op.finite_cotangents = finite_cotangents(path.nodes, path.edges, () if finite_seeds else seeds)
    with_zeros = [value for value, seed in seeds.items() if seed.const_value is None]
    trained = [*(wrt if finite_seeds else ()), *finite]
    guarded = nodes_to_guard(nodes, path.nodes, path.edges, with_zeros, trained)
    pending: dict[ir.Value, list[ir.Value]] = {value: [seed] for value, seed in seeds.items()}
    complete: dict[ir.Value, ir.Value | None] = {}
    with op.arithmetic(), _differentiating(path):
        for node in reversed(path.nodes):
            for output in node.outputs:
                complete[output] = _total(op, output, pending.pop(output, []))
            cotangents = [complete[output] for output in node.outputs]
            if all(c is None for c in cotangents):
                continue
            op.scope, op.guarded = f"{label_of(node)}_grad", node in guarded
            with error_context(node, "writing the gradient of"):
                rule = path.rule_of(node)
                for value, cotangent in _contributions(node, rule(op, node, *cotangents)):
                    if value in path.depends:
                        if rule.broadcasts and cotangents[0] is not None:
                            cotangent = op.keep_zeros(cotangent, cotangents[0])
                        settled = _settle(op, node, rule, value, cotangent)
                        pending.setdefault(value, []).append(settled)
            op.guarded = False
        for value in wrt:
            if value not in complete:
                complete[value] = _total(op, value, pending.pop(value, []))
    op.scope, op.finite_cotangents = around
    return {value: complete[value] for value in wrt}


def pull_back(
    op: Ops, write: Callable[[], ir.Value], cotangent: ir.Value, wrt: Sequence[ir.Value]
) -> list[ir.Value | None]:
    """Return the cotangents of `wrt`, for a rule that writes how its node depends on them.

    `write` computes a value again, from operators that have rules.
    """
    before = len(op.target)
    value = write()
    guarded = op.guarded
    found = differentiate(op, list(op.target)[before:], {value: cotangent}, wrt)
    op.guarded = guarded
    return [found[v] for v in wrt]


_current: ContextVar[ActivePath] = ContextVar("the path that is being differentiated")


@contextmanager
def _differentiating(path: ActivePath) -> Iterator[None]:
    token = _current.set(path)
    try:
        yield
    finally:
        _current.reset(token)


def current_path() -> ActivePath:
    """Return the path that is being differentiated, for a rule that differentiates subgraphs."""
    return _current.get()


class ActivePath:
    """The nodes between the values of interest and the outputs that are differentiated."""

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        wrt: Iterable[ir.Value],
        outputs: Iterable[ir.Value],
        opset: int,
        straight_through: frozenset[str] | None = None,
        rules: Mapping[ir.Node, Rule] | None = None,
    ) -> None:
        self._opset = opset
        self._outputs = tuple(outputs)
        self.straight_through = straight_through
        self._wrt = dict.fromkeys(wrt)
        self._given = rules or {}
        self._rules: dict[ir.Node, Rule | None] = {}
        # For each node the values it can pass a gradient to; zero operators have none.
        self.edges: dict[ir.Node, list[ir.Value]] = {n: list(self._flows(n)) for n in nodes}
        self.depends = set(self._wrt)
        for node in nodes:
            if any(v in self.depends for v in self.edges[node]):
                self.depends.update(v for v in self._dependent(node) if _has_cotangent(v))
        matters = set(self._outputs)
        active = []
        for node in reversed(nodes):
            if not any(v in matters for v in node.outputs):
                continue
            used = [v for v in self._edges_to(node, matters) if v in self.depends]
            if used:
                active.append(node)
                matters.update(used)
        self.nodes = active[::-1]
        self._matters = matters

    def lost(self) -> list[ir.Value]:
        """Return the values of interest from which no gradient can come.

        One that reaches the output through operators declared zero has a gradient, namely zero.
        """
        connected = set(self._matters)
        for node in reversed(self.edges):
            if any(v in connected for v in node.outputs):
                connected.update(self._edges_to(node, connected) or _floats_through_zero(node))
        return [value for value in self._wrt if value not in connected]

    def _flows(self, node: ir.Node) -> Iterator[ir.Value]:
        if operator_name(node) in (self.straight_through or ()):
            self._rules[node] = STRAIGHT_THROUGH
            yield from (v for v in node.inputs[:1] if v is not None and is_float(v))
            return
        found = self._given.get(node) or lookup(node.op_type, node.domain, self._opset)
        if found is not None and found.covers is not None and not found.covers(node):
            found = None
        self._rules[node] = found
        if found is None and zero_reason(node.op_type, node.domain) is not None:
            return
        if is_detach(node):
            return
        stops = found.stops if found is not None else frozenset()
        for index, value in enumerate(node.inputs):
            if value is not None and index not in stops and _has_cotangent(value):
                yield value
        captured = [v for v in captured_values(node) if is_float(v)]
        if captured and holds_paths(node):
            given = [v for v in (*node.inputs, *captured) if v is not None and is_float(v)]
            lost = [set(p.lost()) for p in self._subpaths(node, set(given), set(node.outputs))]
            captured = [v for v in captured if not all(v in each for each in lost)]
        yield from captured
        if found is not None and found.reaches is not None:
            yield from (v for v in found.reaches(node) if is_float(v))

    def _dependent(self, node: ir.Node) -> Sequence[ir.Value]:
        """Return the outputs of a node that depend on a value of interest."""
        if self._rules[node] is None or not is_loop(node):
            return node.outputs
        loop, (path,) = LoopParts(node), self._subpaths(node, self.depends, set(node.outputs))
        steps = zip(loop.body.outputs[1:], node.outputs, strict=True)
        starts = {s.final for s in loop.states if s.initial in self.depends}
        return [outer for inner, outer in steps if inner in path.depends or outer in starts]

    def _edges_to(self, node: ir.Node, matters: Container[ir.Value]) -> Sequence[ir.Value]:
        """Return the values that a node can pass a gradient to, given where it comes from."""
        if not self.edges[node] or not is_loop(node):
            return self.edges[node]
        loop, depends = LoopParts(node), set(self.edges[node])
        (path,) = self._subpaths(node, depends, matters)
        starts = {s.before: s.initial for s in loop.states}
        reached = [starts.get(v, v) for v in path._wrt if v not in path.lost()]
        return [*reached, *(s.initial for s in loop.states if s.final in matters)]

    def inside(self, node: ir.Node) -> Iterator[ActivePath]:
        """Yield the paths in the subgraphs of an active node, from what they use to its outputs.

        What a subgraph captures counts where it depends on a value of interest.
        """
        yield from self._subpaths(node, self.depends, self._matters)

    def _subpaths(
        self, node: ir.Node, depends: Container[ir.Value], matters: Container[ir.Value]
    ) -> Iterator[ActivePath]:
        captured = [v for v in captured_values(node) if v in depends]
        if is_loop(node):
            yield self._through_steps(LoopParts(node), captured, depends, matters)
            return
        for body in subgraphs_of(node):
            pairs = zip(node.outputs, body.outputs, strict=True)
            outputs = [inner for outer, inner in pairs if outer in matters]
            yield self._subpath(body, captured, outputs)

    def _through_steps(
        self,
        loop: LoopParts,
        captured: Sequence[ir.Value],
        depends: Container[ir.Value],
        matters: Container[ir.Value],
    ) -> ActivePath:
        """Return the path in one step; what a state carries on is found step by step."""
        states = [s for s in loop.states if is_float(s.before)]
        starts = dict.fromkeys((*captured, *(s.before for s in states if s.initial in depends)))
        ends = dict.fromkeys(s.after for s in states if s.final in matters)
        ends.update((inner, None) for inner, outer in loop.collected if outer in matters)
        while True:
            path = self._subpath(loop.body, starts, ends)
            known = len(starts) + len(ends)
            starts.update((s.before, None) for s in states if s.after in path.depends)
            ends.update((s.after, None) for s in states if s.before in path._matters)
            if len(starts) + len(ends) == known:
                return path

    def _subpath(
        self, body: ir.Graph, wrt: Iterable[ir.Value], outputs: Iterable[ir.Value]
    ) -> ActivePath:
        return ActivePath(list(body), wrt, outputs, self._opset, self.straight_through)

    def with_subpaths(self) -> Iterator[ActivePath]:
        """Yield this path and those in the subgraphs of its nodes."""
        yield self
        for node in self.nodes:
            if holds_paths(node) and self._rules[node] is not None:
                for path in self.inside(node):
                    yield from path.with_subpaths()

    def between(self, states: Iterable[State]) -> set[ir.Value]:
        """Return the states of a Loop that carry a gradient, by their values before a step."""
        return {s.before for s in states if s.before in self._wrt and s.after in self._outputs}

    def reached(self) -> list[ir.Value]:
        """Return the values of interest that a gradient comes to."""
        return [value for value in self._wrt if value in self._matters]

    def rule_of(self, node: ir.Node) -> Rule:
        """Return the rule of an active node."""
        found = self._rules[node]
        assert found is not None, "require_rules() comes first"
        return found

    def without_rule(self) -> list[ir.Node]:
        """Return the active nodes that no rule differentiates, those in subgraphs included."""
        return [n for path in self.with_subpaths() for n in path.nodes if path._rules[n] is None]

    def require_rules(self) -> None:
        """Raise one error that lists every active node without a rule, in subgraphs too."""
        missing = [
            MissingRule(
                op=f"{node.domain or 'ai.onnx'}.{node.op_type}",
                node=label_of(node),
                reason=refusal(node.op_type, node.domain) or "no gradient rule is registered",
                path=path._path_to(node),
            )
            for path in self.with_subpaths()
            for node in path.nodes
            if path._rules[node] is None
        ]
        if missing:
            raise MissingGradientError(missing, training=self.straight_through is None)

    def _path_to(self, node: ir.Node) -> list[str]:
        """Name the way from a value of interest to a node, its middle left out if it is long."""
        steps: list[str] = []
        current: ir.Node | None = node
        while current is not None:
            steps.append(f"{current.op_type}({label_of(current)})")
            source = next(v for v in self.edges[current] if v in self.depends)
            if source in self._wrt:
                steps.append(repr(source.name))
                break
            current = source.producer()
        steps.reverse()
        return steps if len(steps) <= 8 else [*steps[:4], "…", *steps[-3:]]


def _has_cotangent(value: ir.Value) -> bool:
    """Tell whether a gradient can flow to a value: floats, and integers that mean floats."""
    return is_float(value) or means_floats(value)


def holds_paths(node: ir.Node) -> bool:
    """Tell whether gradients flow through the subgraphs of a node."""
    return is_loop(node) or (node.op_type == "If" and node.domain == "")


def is_loop(node: ir.Node) -> bool:
    """Tell whether a node is a Loop."""
    return node.op_type == "Loop" and node.domain == ""


def operator_name(node: ir.Node) -> str:
    """Return the name of an operator as users write it: the domain only where it is not ai.onnx."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _floats_through_zero(node: ir.Node) -> list[ir.Value]:
    if zero_reason(node.op_type, node.domain) is None or not is_float(node.outputs[0]):
        return []
    return [v for v in node.inputs if v is not None and is_float(v)]


STRAIGHT_THROUGH = Rule(
    lambda op, node, dy, *rest: (dy,),
    "",
    "",
    1,
    False,
    frozenset(),
    "identity in the backward pass",
)


def _contributions(node: ir.Node, returned: Cotangents) -> Iterator[tuple[ir.Value, ir.Value]]:
    if isinstance(returned, Mapping):
        pairs: Iterable[tuple[ir.Value | None, ir.Value | None]] = returned.items()
    else:
        if any(extra is not None for extra in returned[len(node.inputs) :]):
            raise OnnxTrainError(
                f"the gradient rule of {node.op_type} returned {len(returned)} cotangents for the "
                f"{len(node.inputs)} inputs of node {label_of(node)!r}"
            )
        pairs = zip(node.inputs, returned, strict=False)
    for value, cotangent in pairs:
        if value is not None and cotangent is not None:
            yield value, cotangent


def _settle(op: Ops, node: ir.Node, rule: Rule, value: ir.Value, cotangent: ir.Value) -> ir.Value:
    """Bring a contribution to the shape of its value, and check that a rule kept its promise."""
    if rule.broadcasts:
        cotangent = op.sum_to(cotangent, value)
    wanted = value.dtype if is_float(value) else ir.DataType.FLOAT
    if cotangent.dtype is not None and cotangent.dtype != wanted:
        raise OnnxTrainError(
            f"the gradient rule of {node.op_type} returned {cotangent.dtype} for "
            f"{value.name!r}, which is {value.dtype} (node {label_of(node)!r})"
        )
    if not may_be_same(dims_of(cotangent), dims_of(value)):
        raise OnnxTrainError(
            f"the gradient rule of {node.op_type} returned shape {cotangent.shape} for "
            f"{value.name!r}, whose shape is {value.shape} (node {label_of(node)!r})"
        )
    return cotangent


def _total(op: Ops, value: ir.Value, parts: Sequence[ir.Value]) -> ir.Value | None:
    """Add up the contributions to one value, and name the sum after it."""
    if not parts:
        return None
    name = f"{value.name}_grad"
    if op.nested:  # the plain name is for the cotangent of this value in the graph outside
        name = f"{op.target.name}/{name}"
    if len(parts) > 1:
        for number, part in enumerate(parts):
            _name(op, part, f"{name}_{number}")
    op.scope = name
    total = op.add_all(parts)
    _name(op, total, name)
    if not is_float(value):
        total.dtype = ir.DataType.FLOAT
        op.shape_as(total, value)
    elif total.shape is None or total.type is None:
        op.type_as(total, value)
    return total


def _name(op: Ops, cotangent: ir.Value, name: str) -> None:
    """Name a cotangent, unless it has a name already as the cotangent of another value."""
    producer = cotangent.producer()
    if (
        producer is not None
        and producer.name
        and (cotangent.name or "").startswith(f"{producer.name}_out")
    ):
        cotangent.name = op.names.fresh(name)
