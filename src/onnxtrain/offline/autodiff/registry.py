"""Which gradient belongs to which operator.

An operator is known in one of three ways: by a *rule* that writes its gradient, as *zero* (its
derivative is zero or does not exist, and that is stated), or as *refused* with the reason. What is
known in none of them may still be expanded by its ONNX function body; see `expand.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import onnx_ir as ir

if TYPE_CHECKING:
    from onnxtrain.offline.graph.ops import Ops

Cotangents = Sequence["ir.Value | None"] | Mapping[ir.Value, "ir.Value | None"]
RuleFunction = Callable[..., Cotangents]
F = TypeVar("F", bound=RuleFunction)


@dataclass(frozen=True)
class Rule:
    """The gradient of one operator from opset `since` on.

    `stops` are the positions of inputs through which no gradient flows although they may hold
    floats (a scale, a region of interest); `notes` says so to the reader of docs/ops.md. `reaches`
    names the values beyond the inputs of a node that its gradient flows to. `covers` tells
    whether a node has a form that the rule is for; all have by default.
    """

    function: RuleFunction
    op_type: str
    domain: str
    since: int
    broadcasts: bool
    stops: frozenset[int]
    notes: str
    reaches: Callable[[ir.Node], Iterable[ir.Value]] | None = None
    covers: Callable[[ir.Node], bool] | None = None

    def __call__(self, op: Ops, node: ir.Node, *cotangents: ir.Value | None) -> Cotangents:
        """Write the gradient of `node` and return one cotangent per input."""
        return self.function(op, node, *cotangents)


_rules: dict[tuple[str, str], list[Rule]] = {}  # newest opset first
_zero: dict[tuple[str, str], str] = {}
_refused: dict[tuple[str, str], str] = {}


def _key(op_type: str, domain: str) -> tuple[str, str]:
    return ("" if domain == "ai.onnx" else domain, op_type)


def rule(
    *op_types: str,
    domain: str = "",
    since: int = 1,
    broadcasts: bool = False,
    stops: Iterable[int] = (),
    notes: str = "",
    reaches: Callable[[ir.Node], Iterable[ir.Value]] | None = None,
    covers: Callable[[ir.Node], bool] | None = None,
) -> Callable[[F], F]:
    """Register a function as the gradient of one or more operators.

    The function is called as `function(op, node, *cotangents)`, with one cotangent per output
    (None where the output does not matter), and returns one cotangent per input, or None where
    there is none; a shorter tuple is padded with None. For a node that uses values of an outer
    graph it may return a mapping from value to cotangent instead.

    The rule covers the opsets from `since` on, all of them by default, and takes the place of what
    was registered for these before: a rule of your own goes before a built-in one.

    `reaches(node)` names values that the node does not use itself but that its gradient flows to:
    the float that was quantized, for an operator that sees only the integers made of it. They come
    before the node, and the function returns a mapping in which they have their place.

    `covers(node)` tells whether the rule is for the form of a node. For another one, the reason is
    shown with which the operator is refused.

    With `broadcasts=True` the returned cotangents may still have the broadcast shape: the engine
    sums them down to the shape of their input.
    """

    def register(function: F) -> F:
        for op_type in op_types:
            entry = Rule(
                function, op_type, domain, since, broadcasts, frozenset(stops), notes, reaches,
                covers,
            )  # fmt: skip
            older = _rules.get(_key(op_type, domain), ())
            _rules[_key(op_type, domain)] = [entry, *(r for r in older if r.since < since)]
        return function

    return register


def required(node: ir.Node, count: int = 1) -> list[ir.Value]:
    """Return the first inputs of a node: those that its operator is never without."""
    return [value for value in node.inputs[:count] if value is not None]


def optional(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input that may be left out, or None."""
    return node.inputs[index] if index < len(node.inputs) else None


def output_of(op: Ops, node: ir.Node, index: int, label: str) -> ir.Value:
    """Return an output of a node, which is added where the model leaves it out."""
    node.resize_outputs(max(len(node.outputs), index + 1))
    output = node.outputs[index]
    output.name = output.name or op.names.fresh(f"{node.outputs[0].name}_{label}")
    return output


def zero_gradient(*op_types: str, domain: str = "", reason: str) -> None:
    """Declare that nothing flows back through these operators, and why."""
    for op_type in op_types:
        _zero[_key(op_type, domain)] = reason


def refuse(*op_types: str, domain: str = "", reason: str) -> None:
    """Declare that these operators cannot be differentiated, and why."""
    for op_type in op_types:
        _refused[_key(op_type, domain)] = reason


def lookup(op_type: str, domain: str, opset: int) -> Rule | None:
    """Return the rule for an operator at an opset, or None."""
    return next((r for r in _rules.get(_key(op_type, domain), ()) if r.since <= opset), None)


def zero_reason(op_type: str, domain: str = "") -> str | None:
    """Return why the gradient of an operator is zero, or None where it is not declared zero."""
    return _zero.get(_key(op_type, domain))


def refusal(op_type: str, domain: str = "") -> str | None:
    """Return why an operator is refused, or None where it is not."""
    return _refused.get(_key(op_type, domain))


def registered() -> dict[tuple[str, str], tuple[Rule, ...]]:
    """Return all rules by (domain, operator), for the documents and the coverage test."""
    return {key: tuple(versions) for key, versions in _rules.items()}
