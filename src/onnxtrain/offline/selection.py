"""Which initializers of a model are weights, and why.

`survey` tells weights, running statistics and constants apart by what the graph does with them:
see `tensor_uses.py`. What torch's exporters note goes before that. `patterns.py` selects what
trains among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import onnx_ir as ir

import onnxtrain.offline.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.errors import ArgumentTypeError, UnknownNameError
from onnxtrain.offline.autodiff.engine import ActivePath, operator_name
from onnxtrain.offline.autodiff.expand import expand_by_definition
from onnxtrain.offline.autodiff.registry import refusal
from onnxtrain.offline.frontend.torch_notes import TorchNotes, module_of
from onnxtrain.offline.graph.initializers import FROM_CONSTANT, WRITTEN
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.graph.op_facts import READS_SHAPE
from onnxtrain.offline.graph.shapes import is_float
from onnxtrain.offline.graph.subgraphs import ancestors, captured_values, subgraphs_of
from onnxtrain.offline.graph.torch_calls import lost_detach
from onnxtrain.offline.tensor_uses import TRAIN_IT, TensorUses, Use, is_quantized

Names = str | Iterable[str]
_INTEGERS, _QUANTIZED = "integers", "quantized weight of "


class Role(StrEnum):
    """What an initializer is to training."""

    WEIGHT = "weight"
    STATISTIC = "running statistic"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Finding:
    """The role of one initializer, and the reason."""

    name: str
    role: Role
    kind: str  # what it is: "weight of Conv", "bound of Clip"
    node: str = ""  # which uses it
    advice: str = ""
    modules: tuple[str, ...] = ()  # what torch calls it, where its name does not say so
    matrices: tuple[str, ...] = ()  # the weights of the product that it is the bias of
    elements: int = 0
    is_weight_form: bool = False  # it would be a weight if it received a gradient

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing to wonder about: a shape, an index, or a number of a formula."""
        return self.kind.startswith((_INTEGERS, "number in ", "exponent of "))

    @property
    def reason(self) -> str:
        """Say why it has its role."""
        where = f" {self.node!r}" if self.node else ""
        return f"{self.kind}{where}{f': {self.advice}' if self.advice else ''}"


@dataclass(frozen=True)
class Survey:
    """The initializers of a canonical model, sorted by their role for one output (the loss)."""

    model: ir.Model
    output: ir.Value
    findings: dict[str, Finding]
    reached: frozenset[str]  # the floats that receive a gradient, weights or constants
    by_gradient: bool = True  # or else the floats that the output depends on in any way

    @cached_property
    def roles(self) -> dict[str, Role]:
        """The roles alone, by name."""
        return {name: finding.role for name, finding in self.findings.items()}

    @property
    def unreached(self) -> tuple[str, ...]:
        """What looks like a weight, but receives no gradient."""
        return tuple(
            n for n, f in self.findings.items() if f.is_weight_form and f.role.name == "CONSTANT"
        )

    def weight_forms(self) -> list[str]:
        """Return what is a weight, or would be one if it received a gradient."""
        return [name for name, found in self.findings.items() if found.is_weight_form]

    def names(self, role: Role) -> list[str]:
        """Return the initializers with this role."""
        return [name for name, found in self.roles.items() if found is role]

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Return the number of elements of initializers."""
        return {name: self.findings[name].elements for name in names}

    @cached_property
    def _expanded(self) -> tuple[ActivePath, tuple[ir.Node, ...]]:
        """The path from the weights to the output, and the nodes on it that have no gradient."""
        model = self.model

        def path() -> ActivePath:
            graph = model.graph
            weights = [graph.initializers[n] for n in self.names(Role.WEIGHT)]
            output = value_named(graph, str(self.output.name))
            return ActivePath(list(graph), weights, [output], model.opset_imports[""])

        if path().without_rule():
            model = model.clone()  # operators without a rule give way to their definitions
            expand_by_definition(model, path)
        found = path()
        return found, tuple(found.without_rule())

    def without_gradient(self) -> tuple[str, ...]:
        """List the operators without a gradient between the weights and the output."""
        if not self.by_gradient:
            return ()
        return tuple(
            f"{operator_name(n)} (node {n.name!r}): "
            f"{refusal(n.op_type, n.domain) or 'no gradient rule'}"
            for n in self._expanded[1]
        )

    @cached_property
    def lost_detach(self) -> ir.Node | None:
        """A node on the path whose input torch detaches, where the model does not say so."""
        path = self._expanded[0]
        return lost_detach(path.edges, path.nodes) if self.by_gradient else None

    @cached_property
    def cut_by(self) -> tuple[str, ...]:
        """The operators that end the gradient before weights, or inputs if there are none."""
        graph, opset = self.model.graph, self.model.opset_imports[""]
        sources = [graph.initializers[n] for n in self.unreached] or list(graph.inputs)
        path = ActivePath(list(graph), sources, [self.output], opset)
        leads, found = {self.output}, list[str]()
        for node in reversed(graph):
            if any(v in leads for v in node.outputs):
                given = {v for v in (*node.inputs, *captured_values(node)) if v is not None}
                leads |= given
                is_end = not path.depends.isdisjoint(given) and path.depends.isdisjoint(
                    node.outputs
                )
                if node in path.without_rule() or (is_end and node.op_type not in READS_SHAPE):
                    found.append(operator_name(node))
        return tuple(dict.fromkeys(reversed(found)))

    @cached_property
    def blocked(self) -> frozenset[str]:
        """The weights that reach the output through an operator without a gradient."""
        if not self.by_gradient:
            return frozenset()
        path, nodes = self._expanded
        bodies = {b: outer for outer in path.edges for b in subgraphs_of(outer)} if nodes else {}
        outer = {inner: node for body, node in bodies.items() for inner in body.all_nodes()}
        before = {v for node in nodes for v in path.edges[outer.get(node, node)]}
        for node in reversed(path.edges):
            if any(v in before for v in node.outputs):
                before.update(path.edges[node])
        return frozenset(v.name or "" for v in before) & set(self.names(Role.WEIGHT))


def why_nothing_trains(
    findings: Collection[Finding], unreached: Sequence[str], cut_by: Sequence[str]
) -> str:
    """Say why no weight of a model trains, and what to do."""
    cut = f" ({', '.join(cut_by)} ends it)" if cut_by else ""
    left_out = [f.name for f in findings if f.advice]
    or_by_name = f", or name {some_of(left_out, 4)} in train=[...]" if left_out else ""
    if holders := holders_of_integers(findings):
        return (
            f"its weights are integers, of {', '.join(holders)}. Take the float model that it was "
            f"quantized from{or_by_name}"
        )
    if unreached and cut_by:
        return (
            f"no gradient comes to {some_of(unreached, 3)}{cut}. Say which output the loss reads "
            f"(of=...), put a new layer before that (classes=..., after=...), or train without "
            f"gradients, which is slow (optimizer='mezo'){or_by_name}"
        )
    if unreached:
        return (
            f"the output depends on no weight, such as {some_of(unreached, 3)}. Say which output "
            f"the loss reads (of=...){or_by_name}"
        )
    if left_out:
        names = some_of(left_out, 4)
        return f"no tensor has the place of a weight. To train {names}, name it in train=[...]"
    return (
        f"the output depends on no weight that has a gradient{cut}. Add a layer (classes=..., "
        "after=...)"
    )


def holders_of_integers(findings: Iterable[Finding]) -> dict[str, int]:
    """Count the quantized weights of each operator."""
    kinds = (f.kind for f in findings if f.kind.startswith(_QUANTIZED))
    return dict(Counter(kind.removeprefix(_QUANTIZED) for kind in kinds))


def survey(
    model: ir.Model,
    output: ir.Value | str,
    brought: Collection[str] = (),
    *,
    by_gradient: bool = True,
) -> Survey:
    """Sort the initializers of a canonical model by their role for `output`.

    A weight is a float that receives a gradient from `output` and that a layer uses as a weight.
    What torch notes as a parameter is a weight too, and what it notes as a buffer is none. A
    Constant node is a constant unless the model keeps its weights in Constant nodes. What a loss
    brought with it (`brought`, by name) is a constant. Without `by_gradient`, it is enough that
    the output depends on a float, whether that has a gradient or not.
    """
    graph = model.graph
    if isinstance(output, str):
        output = value_named(graph, output)
    statistics = set(running_statistics(graph))
    floats = [v for v in graph.initializers.values() if is_float(v) and not v.is_graph_input()]
    candidates = [v for v in floats if v.name not in statistics]
    if by_gradient:
        path = ActivePath(list(graph), candidates, [output], model.opset_imports[""])
        reached = set(path.reached())
    else:
        reached = _read_by(output).intersection(candidates)
    sorter = _Sorter(model, statistics, brought, reached)
    drafts = [sorter.find(value) for value in graph.initializers.values()]
    findings = _name_matrices({f.name: f for f in _settle_constants(drafts, graph)})
    names = frozenset(v.name or "" for v in reached)
    return Survey(model, output, findings, names, by_gradient)


def _read_by(output: ir.Value) -> set[ir.Value]:
    """Return all that an output is computed from."""
    producer = output.producer()
    nodes = ancestors([] if producer is None else [producer])
    return {v for n in nodes for v in (*n.inputs, *captured_values(n)) if v is not None}


class _Sorter:
    """Finds the role of one initializer after the other."""

    def __init__(
        self,
        model: ir.Model,
        statistics: Collection[str],
        brought: Collection[str],
        reached: Collection[ir.Value],
    ) -> None:
        self._uses, self._notes = TensorUses(model), TorchNotes(model)
        self._statistics, self._brought, self._reached = statistics, brought, reached

    def find(self, value: ir.Value) -> Finding:
        name, elements = value.name or "", elements_of(value)
        if name in self._statistics:
            kind = "running statistic of BatchNormalization"
            return Finding(name, Role.STATISTIC, kind, elements=elements)
        if name in self._brought:
            return Finding(name, Role.CONSTANT, "part of the loss", elements=elements)
        if not is_float(value):
            return Finding(name, Role.CONSTANT, _kind_of_integers(value), elements=elements)
        if value.is_graph_input():
            return Finding(name, Role.CONSTANT, "input with a default", elements=elements)
        if elements == 1 and WRITTEN in value.meta:
            return Finding(name, Role.CONSTANT, "number in a definition", elements=elements)
        return self._of_float(value, name, elements)

    def _of_float(self, value: ir.Value, name: str, elements: int) -> Finding:
        uses = self._uses.of(value)
        noted = self._notes.kind_of(value)
        use = uses[0] if uses else None
        takes = use is not None and use.is_weight if noted is None else noted == "PARAMETER"
        kind, advice = ("not used", "") if use is None else (use.text, use.advice)
        if noted == "BUFFER":
            kind, advice = f"buffer of the torch module, {kind}", ""
        elif noted == "CONSTANT":
            kind, advice = (
                f"computed by the exporter, {kind}" if use and use.is_weight else kind,
                "",
            )
        elif noted == "PARAMETER" and use is not None and not use.is_weight:
            kind, advice = f"parameter of the torch module, {use.text}", ""
        is_reached = value in self._reached
        advice = advice if is_reached else ""
        if takes and not is_reached:
            kind, advice = f"{kind}, without a gradient", ""
        return Finding(
            name,
            Role.WEIGHT if takes and is_reached else Role.CONSTANT,
            kind,
            label_of(use.node) if use else "",
            advice,
            tuple(self._modules(value, name, uses)),
            tuple(self._matrices(uses)),
            elements,
            takes,
        )

    def _modules(self, value: ir.Value, name: str, uses: Sequence[Use]) -> Iterator[str]:
        """Yield what torch calls a tensor that has another name in the model."""
        known = list(dict.fromkeys(self._notes.folded_names(value)))
        if known or _is_path(name):
            yield from known
            return
        for use in uses:
            module = module_of(use.node)
            if use.is_weight and module:
                yield from (f"{module}.{leaf}" for leaf in use.leaves)

    def _matrices(self, uses: Sequence[Use]) -> Iterator[str]:
        """Yield the initializers behind the matrix that a tensor is the bias of."""
        waiting = [use.matrix for use in uses if use.matrix is not None]
        while waiting:
            value = waiting.pop()
            producer = value.producer()
            if value.is_initializer() and is_float(value):
                yield value.name or ""
            elif producer is not None:
                waiting += [v for v in producer.inputs if v is not None]


def _is_path(name: str) -> bool:
    """Whether a name is that of a parameter in torch, and not one that an exporter made."""
    return "." in name and not name.startswith(("/", "onnx::"))


def _name_matrices(findings: dict[str, Finding]) -> dict[str, Finding]:
    """Call a matrix that has lost its name after its bias: `query.weight`, as in `query.bias`."""
    found = dict(findings)
    for bias in findings.values():
        if not (_is_path(bias.name) and bias.name.endswith("bias")):
            continue
        known = f"{bias.name.removesuffix('bias')}weight"
        for matrix in (found[name] for name in bias.matrices):
            if not _is_path(matrix.name) and known not in (*found, *matrix.modules):
                found[matrix.name] = replace(matrix, modules=(*matrix.modules, known))
    return found


def _kind_of_integers(value: ir.Value) -> str:
    users = [node for node, _ in value.uses()]
    if users and is_quantized(value):
        return f"{_QUANTIZED}{operator_name(users[0])}"
    return f"{_INTEGERS} ({str(value.dtype).lower()})"


def _settle_constants(findings: Sequence[Finding], graph: ir.Graph) -> Iterator[Finding]:
    """Let Constant nodes be weights only where they hold most of them."""

    def is_constant(finding: Finding) -> bool:
        return FROM_CONSTANT in graph.initializers[finding.name].meta

    counts = {True: 0, False: 0}
    for finding in findings:
        if finding.is_weight_form:
            counts[is_constant(finding)] += finding.elements
    for finding in findings:
        if finding.is_weight_form and is_constant(finding) and counts[True] <= counts[False]:
            yield replace(
                finding, role=Role.CONSTANT, kind=f"Constant node, {finding.kind}",
                advice=TRAIN_IT, is_weight_form=False,
            )  # fmt: skip
        else:
            yield finding


def output_named(graph: ir.Graph, name: str | None) -> ir.Value:
    """Return an output of the graph, the first one by default."""
    outputs = {value.name: value for value in graph.outputs}
    if name is not None and name not in outputs:
        raise UnknownNameError(
            f"the model has no output {name!r}; its outputs are {some_of(outputs)}"
        )
    return graph.outputs[0] if name is None else outputs[name]


def value_named(graph: ir.Graph, name: str) -> ir.Value:
    """Return an input or a computed value of the graph."""
    for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
        if value.name == name:
            return value
    raise UnknownNameError(f"the model has no value {name!r} to take as the loss")


def running_statistics(graph: ir.Graph) -> list[str]:
    """Return the running means and variances of BatchNormalization."""
    return [
        value.name
        for node in graph.all_nodes()
        if node.op_type == "BatchNormalization" and node.domain == ""
        for value in node.inputs[3:5]
        if value is not None and value.is_initializer() and value.name
    ]


def elements_of(value: ir.Value) -> int:
    """Return the number of elements of an initializer."""
    return 0 if value.const_value is None else value.const_value.size


def listed(names: str | Iterable[str] | None) -> Iterable[str] | None:
    """Return one name as a list of one; None stays None."""
    return [names] if isinstance(names, str) else names


def list_of_names(names: Iterable[str] | None, argument: str) -> list[str] | None:
    """Return an argument that lists names as a list; a single name is no list."""
    if names is None:
        return None
    if isinstance(names, Iterable) and not isinstance(names, str | bytes):
        given = list(names)
        if all(isinstance(name, str) for name in given):
            return given
    raise ArgumentTypeError(f"{argument} is a list of names, not {names!r}")


def some_of(names: Iterable[str | None], most: int = 12) -> str:
    """List names, and count those beyond the first."""
    listed = [repr(n) for n in names]
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
