"""Which initializers of a model train.

`survey` tells weights, running statistics and constants apart by how the graph uses them. `choose`
selects what trains, by names or patterns.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

import onnx_ir as ir

import onnxtrain.offline.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.errors import (
    ArgumentTypeError,
    NotDifferentiableError,
    OnnxTrainError,
    UnknownNameError,
    UnknownNameWarning,
)
from onnxtrain.offline.autodiff.engine import ActivePath, operator_name
from onnxtrain.offline.autodiff.expand import expand_by_definition
from onnxtrain.offline.autodiff.registry import lookup, refusal
from onnxtrain.offline.frontend.canonical_model import FROM_CONSTANT
from onnxtrain.offline.graph.op_facts import PARAMETER_INPUTS
from onnxtrain.offline.graph.shapes import is_float
from onnxtrain.offline.passes.tie_weights import Tied, find_tied, with_tied

# Constants of this size or more are stored in the checkpoint, once; smaller ones stay in graphs.
_STORED_ONCE = 1 << 16  # bytes


class Role(Enum):
    """What an initializer is to training."""

    WEIGHT = "weight"
    STATISTIC = "running statistic"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Survey:
    """The initializers of a canonical model, sorted by their role for one output (the loss)."""

    model: ir.Model
    output: ir.Value
    roles: dict[str, Role]
    reached: frozenset[str]  # the floats that receive a gradient, weights or constants
    unreached: tuple[str, ...]  # what looks like a weight, but receives no gradient

    def names(self, role: Role) -> list[str]:
        """Return the initializers with this role."""
        return [name for name, found in self.roles.items() if found is role]

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """Return the number of elements of initializers."""
        return {name: _elements(self.model.graph.initializers[name]) for name in names}

    def tied(self) -> tuple[Tied, ...]:
        """Return the matrices that are copies of each other, also those without a gradient."""
        return find_tied(self.model.graph, [*self.names(Role.WEIGHT), *self.unreached])

    def without_gradient(self) -> tuple[str, ...]:
        """List the operators without a gradient between the weights and the output."""
        model = self.model

        def path() -> ActivePath:
            graph = model.graph
            weights = [graph.initializers[n] for n in self.names(Role.WEIGHT)]
            output = _value_named(graph, str(self.output.name))
            return ActivePath(list(graph), weights, [output], model.opset_imports[""])

        if not path().without_rule():
            return ()
        model = model.clone()  # operators without a rule give way to their definitions
        expand_by_definition(model, path)
        return tuple(
            f"{operator_name(n)} (node {n.name!r}): "
            f"{refusal(n.op_type, n.domain) or 'no gradient rule'}"
            for n in path().without_rule()
        )


def survey(model: ir.Model, output: ir.Value | str, brought: Collection[str] = ()) -> Survey:
    """Sort the initializers of a canonical model by their role for `output`.

    A weight is a float that receives a gradient from `output`. Two cases are a convention: a scalar
    is a constant unless it is the input of an operator that always holds weights, and a Constant
    node is a constant unless the model keeps all its weights in Constant nodes. What a loss
    brought with it (`brought`, by name) is a constant too.
    """
    graph = model.graph
    if isinstance(output, str):
        output = _value_named(graph, output)
    statistics = set(running_statistics(graph))
    candidates = [
        v
        for v in graph.initializers.values()
        if is_float(v) and not v.is_graph_input() and v.name not in statistics
    ]
    path = ActivePath(list(graph), candidates, [output], model.opset_imports[""])
    reached = set(path.reached())
    candidates = [v for v in candidates if v.name not in brought]
    constants_hold_weights = not any(
        FROM_CONSTANT not in v.meta and _elements(v) > 1 for v in candidates
    )
    weights = {v for v in candidates if _is_weight(v, constants_hold_weights)}
    found = {}
    for name, value in graph.initializers.items():
        is_weight = value in weights and value in reached
        other = Role.WEIGHT if is_weight else Role.CONSTANT
        found[name] = Role.STATISTIC if name in statistics else other
    opset = model.opset_imports[""]
    unreached = tuple(
        v.name or "" for v in candidates if v in weights - reached and not _is_setting(v, opset)
    )
    return Survey(model, output, found, frozenset(v.name or "" for v in reached), unreached)


def output_named(graph: ir.Graph, name: str | None) -> ir.Value:
    """Return an output of the graph, the first one by default."""
    outputs = {value.name: value for value in graph.outputs}
    if name is not None and name not in outputs:
        raise UnknownNameError(
            f"the model has no output {name!r}; its outputs are {some_of(outputs)}"
        )
    return graph.outputs[0] if name is None else outputs[name]


def _value_named(graph: ir.Graph, name: str) -> ir.Value:
    for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
        if value.name == name:
            return value
    raise UnknownNameError(f"the model has no value {name!r} to take as the loss")


def _is_weight(value: ir.Value, constants_hold_weights: bool) -> bool:
    is_parameter_input = any(
        node.domain == "" and index in PARAMETER_INPUTS.get(node.op_type, ())
        for node, index in value.uses()
    )
    if FROM_CONSTANT in value.meta:
        return constants_hold_weights and (is_parameter_input or _elements(value) > 1)
    rank = len(value.shape) if value.shape is not None else 0
    return _elements(value) > 1 or is_parameter_input or rank > 0


def _is_setting(value: ir.Value, opset: int) -> bool:
    """Whether every use is one that passes no gradient, such as the scales of a Resize."""
    for node, index in value.uses():
        rule = lookup(node.op_type, node.domain, opset)
        if rule is None or index not in rule.stops:
            return False
    return True


def running_statistics(graph: ir.Graph) -> list[str]:
    """Return the running means and variances of BatchNormalization."""
    return [
        value.name
        for node in graph.all_nodes()
        if node.op_type == "BatchNormalization" and node.domain == ""
        for value in node.inputs[3:5]
        if value is not None and value.is_initializer() and value.name
    ]


def _elements(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.size


# ---- what trains ---------------------------------------------------------------------------------


def choose(
    found: Survey,
    train: Iterable[str] | None,
    freeze: Iterable[str] | None,
    tied: Sequence[Tied] = (),
) -> tuple[list[str], list[str]]:
    """Return the names of what trains and of what is frozen, that is, stored in the checkpoint.

    Weights and statistics that do not train are frozen whether they are listed or not; so are large
    constants. What is tied trains or is frozen together, whichever of it is named.
    """
    roles = found.roles
    named = _frozen(list(freeze or ()), found)
    kept = with_tied(named, tied)
    if train is None:
        trains = [n for n in found.names(Role.WEIGHT) if n not in kept]
    else:
        trains = _trained(train, found)
    both = sorted(kept.intersection(trains))
    if both:
        raise OnnxTrainError(
            f"{some_of(both)} cannot both train and be frozen{_why(both, named, tied)}"
        )
    together = with_tied(trains, tied)
    trains += [n for n in roles if n in together.difference(trains)]
    kept.update(n for n, role in roles.items() if role is not Role.CONSTANT)
    for name, value in found.model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= _STORED_ONCE and not value.is_graph_input():
            kept.add(name)
    chosen = set(trains)
    return trains, [n for n in roles if n in kept and n not in chosen]


def _why(both: Iterable[str], frozen: Collection[str], tied: Iterable[Tied]) -> str:
    """Say which groups make a name frozen that was not named so."""
    groups = [str(g) for g in tied if g.names.intersection(both) - set(frozen)]
    said = f": {'; '.join(groups)} is one parameter. Keep its uses apart with tie_weights=False"
    return said if groups else ""


def list_of_names(names: Iterable[str] | None, argument: str) -> list[str] | None:
    """Return an argument that lists names as a list; a single name is no list."""
    if names is None:
        return None
    if isinstance(names, Iterable) and not isinstance(names, str | bytes):
        given = list(names)
        if all(isinstance(name, str) for name in given):
            return given
    raise ArgumentTypeError(f"{argument} is a list of names, not {names!r}")


def _frozen(freeze: Sequence[str], found: Survey) -> list[str]:
    """Return what is frozen by name or pattern.

    A pattern without a match is an error: the user would train what should be frozen. A missing
    name is only a warning, because upstream's scripts list names that its exporter drops.
    """
    missing = []
    for name in freeze:
        if _matching([name], found.roles):
            continue
        if _is_pattern(name):
            raise UnknownNameError(
                f"nothing to freeze: {name!r} matches no initializer of the model. "
                f"{_similar(name, found)}"
            )
        missing.append(name)
    if missing:
        warnings.warn(
            f"nothing to freeze: the model has no initializer {some_of(missing)}",
            UnknownNameWarning,
            stacklevel=5,
        )
    return _matching(freeze, found.roles)


def _trained(train: Iterable[str], found: Survey) -> list[str]:
    """Return what trains by name or pattern; either without a match is an error.

    A pattern selects the weights among its matches, or the other floats with a gradient if none of
    them is a weight. A name selects exactly that initializer or input.
    """
    inputs = [value.name or "" for value in found.model.graph.inputs]
    chosen: set[str] = set()
    for name in train:
        if found.roles.get(name) is Role.STATISTIC:
            raise NotDifferentiableError(
                f"{name!r} cannot train: it is a running statistic of BatchNormalization, which "
                "each step updates"
            )
        if name in found.roles or name in inputs:
            chosen.add(name)
            continue
        matches = _matching([name], found.roles)
        if not matches:
            raise UnknownNameError(f"{name!r} cannot train: {_what_it_is(name, found)}")
        weights = [n for n in matches if found.roles[n] is Role.WEIGHT]
        weights = weights or [n for n in matches if n in found.reached]
        if not weights:
            raise NotDifferentiableError(
                f"{name!r} cannot train: it matches {some_of(matches)}, and none of these is a "
                "weight that the loss depends on"
            )
        chosen.update(weights)
    return [n for n in (*found.roles, *inputs) if n in chosen]


def _what_it_is(name: str, found: Survey) -> str:
    for node in found.model.graph.all_nodes():
        if any(value.name == name for value in node.outputs):
            return (
                f"it is computed by {operator_name(node)} (node {node.name!r}), and only "
                f"initializers and inputs can. {_similar(name, found)}"
            )
    return f"the model has no such initializer or input. {_similar(name, found)}"


def _similar(name: str, found: Survey) -> str:
    near = get_close_matches(name, found.roles, n=3)
    if near:
        return f"Did you mean {' or '.join(map(repr, near))}?"
    return f"Its weights are {some_of(found.names(Role.WEIGHT))}."


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


def _matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return those of `names` that are listed or match a listed pattern."""
    listed = set(patterns)
    globs = [p for p in listed if _is_pattern(p)]
    return [n for n in names if n in listed or any(fnmatch.fnmatchcase(n, g) for g in globs)]


def some_of(names: Iterable[str | None], most: int = 12) -> str:
    """List names, and count those beyond the first."""
    listed = [repr(n) for n in names]
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
