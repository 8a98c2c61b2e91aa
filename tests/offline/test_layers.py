"""The rooms of the workstation import in one direction, and no module imports itself."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import onnxtrain

ROOT = Path(onnxtrain.__file__).parent
# What a room of offline/ may import, besides itself, of the others.
BELOW = {"graph": set(), "autodiff": {"graph"}, "frontend": {"graph", "autodiff"}}


@cache
def modules() -> dict[str, Path]:
    paths = {p.relative_to(ROOT.parent).with_suffix(""): p for p in ROOT.rglob("*.py")}
    return {".".join(p.parts).removesuffix(".__init__"): file for p, file in paths.items()}


@cache
def imports(module: str) -> set[str]:
    """Return the modules that a module imports when it is loaded, or for its types."""
    found = set()
    waiting: list[ast.stmt] = ast.parse(modules()[module].read_text(encoding="utf-8")).body
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in modules() else str(node.module) for name in names)
        elif isinstance(node, ast.If | ast.Try):
            waiting.extend(node.body)
    return {name for name in found if name in modules() and name != module}


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    allowed = {room, *BELOW[room]}
    wrong = {
        module: others
        for module in modules()
        if module.split(".")[1:3] == ["offline", room]
        and (
            others := sorted(
                name
                for name in imports(module)
                if name.startswith("onnxtrain.offline.") and name.split(".")[2] not in allowed
            )
        )
    }
    assert wrong == {}


def test_no_module_of_the_workstation_imports_itself() -> None:
    names = [name for name in modules() if name.startswith("onnxtrain.offline")]
    try:
        list(TopologicalSorter({name: imports(name) for name in names}).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
