"""The tree as design: which room may import which, no import cycles, no file that holds two ideas.

The graph is read from the source: imports at the top of a module and inside functions alike. What
only the type checker sees (`if TYPE_CHECKING`) does not count.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnxtrain

SRC = Path(onnxtrain.__file__).parent
MOST_LINES = 450
# What each room may import of ours, besides itself. The others (cli, compat, api …) may import all.
ROOMS = {
    "errors": set(),
    "format": {"errors"},
    "device": {"errors", "format"},
    "offline": {"errors", "format"},
    "federated": {"errors", "format", "device"},
}
# What of the workstation runs models as a device does.
RUNS_MODELS = ("onnxtrain.offline.writer.verify", "onnxtrain.offline.compare")
# What the lower rooms of the workstation may import of the others; for types, too.
WORKSTATION = {"graph": set(), "autodiff": {"graph"}, "frontend": {"graph", "autodiff"}}


def _name(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in sorted(SRC.rglob("*.py"))}


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not _is_type_checking(child):
            yield from _statements(child)


def imports_of(module: str) -> set[str]:
    """Return the modules of ours that a module imports."""
    found = set()
    for statement in _statements(ast.parse(FILES[module].read_text())):
        if isinstance(statement, ast.Import):
            found.update(alias.name for alias in statement.names)
            continue
        assert statement.level == 0, f"{module} has a relative import"
        for alias in statement.names:
            submodule = f"{statement.module}.{alias.name}"
            found.add(submodule if submodule in FILES else statement.module or "")
    return {name for name in found if name in FILES} - {module}


GRAPH = {module: imports_of(module) for module in FILES}


def room_of(module: str) -> str:
    return [*module.split("."), ""][1]


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_the_graph_is_read() -> None:
    """A test of the test: it sees modules, lazy imports and cycles, and not those for types."""
    assert len(FILES) > 150
    assert "onnxtrain.offline.inspect" in GRAPH["onnxtrain.cli.workstation"]  # inside a function
    assert "onnxtrain.offline.inspect" not in GRAPH["onnxtrain"]  # for types
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_may(room: str) -> None:
    allowed = ROOMS[room] | {room}
    wrong = [
        f"{module} imports {other}"
        for module, imported in GRAPH.items()
        if room_of(module) == room and not module.startswith(RUNS_MODELS)
        for other in sorted(imported)
        if room_of(other) not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("room", WORKSTATION)
def test_a_room_of_the_workstation_imports_what_is_below_it(room: str) -> None:
    others = {p.stem for p in (SRC / "offline").iterdir()} - WORKSTATION[room] - {room}
    wrong = re.compile(rf"^\s*(?:from|import) onnxtrain\.offline\.(?:{'|'.join(others)})\b", re.M)
    files = sorted((SRC / "offline" / room).rglob("*.py"))
    assert [file for file in files if wrong.search(file.read_text())] == []


def test_no_import_cycles() -> None:
    assert cycles(GRAPH) == []


def test_no_file_is_too_long() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_the_path_of_prepare_fits_on_one_page() -> None:
    """In the order in which things happen; what they consist of is elsewhere."""
    assert len(FILES["onnxtrain.offline.prepare"].read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", [n for n in onnxtrain.__all__ if n != "__version__"])
def test_public_names_have_a_docstring(name: str) -> None:
    assert (getattr(onnxtrain, name).__doc__ or "").strip()
