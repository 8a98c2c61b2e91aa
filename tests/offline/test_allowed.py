"""The written list of operators is the list of those that the gradient code writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import onnxtrain.offline.autodiff.registry
from allowed_ops import EMITTED_OPS, REPEATED_OPS
from onnxtrain.offline.graph.versions import FLOOR_OPSET
from onnxtrain.offline.writer import opset_downgrade

SOURCE = Path(onnxtrain.offline.__file__).parent
# What rewrites the forward part: operators of other domains, of older opsets, without a rule.
FORWARD = {"definitions.py", "expand.py"}
ARITHMETIC = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.USub: "Neg"}


def gradient_files() -> list[Path]:
    paths = [p for room in ("autodiff", "graph") for p in sorted((SOURCE / room).rglob("*.py"))]
    return [*(p for p in paths if p.name not in FORWARD), SOURCE / "passes" / "counter_rng.py"]


def uses_of_ops(path: Path) -> Iterator[tuple[ast.Attribute, ast.Call | None]]:
    """Yield what is used of an Ops, with the call where it is called.

    That is `op.X`, and `self.X` in its own file.
    """
    holders = {"op", "self"} if path.name == "ops.py" else {"op"}
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            holder = node.value
            name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
            if name in holders:
                yield node, calls.get(node)


def written() -> dict[str, str]:
    """Return each operator that is written by name, with one place where it is."""
    found: dict[str, str] = {name: "arithmetic" for name in ARITHMETIC.values()}
    for path in gradient_files():
        for use, call in uses_of_ops(path):
            place = f"{path.name}:{use.lineno}"
            if use.attr[:1].isupper():
                found[use.attr] = place
            elif (
                use.attr in ("call", "_reduce") and call and isinstance(call.args[0], ast.Constant)
            ):
                found[call.args[0].value] = place
    return found


def test_everything_written_is_allowed() -> None:
    allowed = EMITTED_OPS | REPEATED_OPS.keys()
    surplus = {op: place for op, place in written().items() if op not in allowed}
    assert not surplus, f"not in allowed_ops.py: {surplus}"


def test_everything_allowed_is_written() -> None:
    unused = (EMITTED_OPS | REPEATED_OPS.keys()) - written().keys()
    assert not unused, f"in allowed_ops.py but never written: {sorted(unused)}"


def test_operators_are_written_by_name() -> None:
    """A name that is computed could not be checked here."""
    computed = [
        f"{path.name}:{use.lineno}"
        for path in gradient_files()
        for use, call in uses_of_ops(path)
        if use.attr == "call"
        and not (call and isinstance(call.args[0], ast.Constant))
        and path.name != "ops.py"
    ]
    assert not computed


@pytest.mark.parametrize("op", sorted(EMITTED_OPS))
def test_allowed_operators_mean_one_thing_at_every_opset(op: str) -> None:
    schema = onnx.defs.get_schema(op, FLOOR_OPSET, "")
    assert not schema.deprecated
    newest = onnx.defs.get_schema(op, onnx.defs.onnx_opset_version(), "")
    assert not newest.deprecated
    assert not [step for step in opset_downgrade.CLOSED if step[0] == op]


@pytest.mark.parametrize("op", sorted(REPEATED_OPS))
def test_repeated_operators_have_a_rule(op: str) -> None:
    assert (("", op)) in onnxtrain.offline.autodiff.registry.registered()
