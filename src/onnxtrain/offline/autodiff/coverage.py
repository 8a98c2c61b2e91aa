"""What onnxtrain does with each operator of ai.onnx; writes docs/ops.md.

Run as `python -m onnxtrain.offline.autodiff.coverage docs/ops.md`. A test fails when the page is
stale or when an operator is known in no way.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx

import onnxtrain.offline.autodiff.rules  # noqa: F401  (registers the rules)
from onnxtrain.offline.autodiff.definitions import defined
from onnxtrain.offline.autodiff.expand import has_function_body
from onnxtrain.offline.autodiff.registry import lookup, refusal, registered, zero_reason
from onnxtrain.offline.graph.versions import FLOOR_OPSET

RULED, EXPANDED, ZERO, REFUSED, UNKNOWN = "rule", "expanded", "zero", "refused", "unknown"
REWRITTEN = "rewritten"


@dataclass(frozen=True)
class Coverage:
    """How one operator is handled."""

    op: str
    versions: tuple[int, ...]
    how: str
    notes: str


# Operators that no model has any more when rules run: the upgrade to the opset floor replaces them.
_REWRITTEN = {
    "Scatter": "becomes ScatterElements, which replaced it in opset 11",
    "Upsample": "becomes Resize, which replaced it in opset 10",
}


def coverage() -> list[Coverage]:
    """Classify every operator of the newest opset that the installed onnx knows."""
    history: dict[str, list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            history.setdefault(schema.name, []).append(schema.since_version)
    return [_classify(op, tuple(sorted(versions))) for op, versions in sorted(history.items())]


def _classify(op: str, versions: tuple[int, ...]) -> Coverage:
    schema = onnx.defs.get_schema(op, versions[-1])
    rule = lookup(op, "", versions[-1])
    zero, refused = zero_reason(op), refusal(op)
    if op in _REWRITTEN:
        return Coverage(op, versions, REWRITTEN, _REWRITTEN[op])
    if rule is not None:
        stops = [_input_name(schema, index) for index in sorted(rule.stops)]
        without = f"no gradient to {', '.join(stops)}" if stops else ""
        return Coverage(op, versions, RULED, "; ".join(filter(None, (rule.notes, without))))
    if zero is not None:
        return Coverage(op, versions, ZERO, zero)
    if refused is not None:
        return Coverage(op, versions, REFUSED, refused)
    if op in defined(""):
        return Coverage(op, versions, EXPANDED, "by a definition of our own")
    if has_function_body(schema):
        return Coverage(op, versions, EXPANDED, "by the function body of the standard")
    return Coverage(op, versions, UNKNOWN, "")


def _input_name(schema: onnx.defs.OpSchema, index: int) -> str:
    return f"`{schema.inputs[index].name}`" if index < len(schema.inputs) else f"input {index}"


def page() -> str:
    """Return docs/ops.md."""
    rows = coverage()
    counts = Counter(row.how for row in rows)
    own = sorted(f"`{d}.{op}`" for d, op in registered() if d)
    lines = [
        "# Operators",
        "",
        "<!-- Written by `make docs` from the rules; a test checks that it is current. -->",
        "",
        f"The {len(rows)} operators of `ai.onnx` that onnx {onnx.__version__} knows "
        f"(opset {onnx.defs.onnx_opset_version()}), and what differentiation does with each. "
        f"Models of every opset are supported; those older than opset {FLOOR_OPSET} are upgraded "
        "to it first.",
        "",
        "| how | operators | meaning |",
        "|---|---|---|",
        f"| rule | {counts[RULED]} | a gradient rule is written for it |",
        f"| expanded | {counts[EXPANDED]} | replaced by its definition in other operators, which "
        "have rules |",
        f"| rewritten | {counts[REWRITTEN]} | replaced by its successor before differentiation |",
        f"| zero | {counts[ZERO]} | its derivative is zero or does not exist: nothing flows back |",
        f"| refused | {counts[REFUSED]} | an error that gives the reason, where it lies on the "
        "gradient path |",
        "",
        "Operators off the path between what is trained and the loss need none of this: any "
        "operator may stand there, custom ones included.",
        "",
    ]
    if own:
        lines += [f"Operators of other domains with a rule: {', '.join(own)}.", ""]
    lines += ["| operator | changed in opset | how | notes |", "|---|---|---|---|"]
    for row in rows:
        versions = ", ".join(str(v) for v in row.versions)
        lines.append(f"| {row.op} | {versions} | {row.how} | {row.notes} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
