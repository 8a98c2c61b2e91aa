"""Facts about operators stand in one table: its names exist, and no other module keeps a set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from onnxtrain.offline.graph import op_facts

OFFLINE = Path(op_facts.__file__).parents[1]
OPERATORS = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
TABLES = {name: table for name, table in vars(op_facts).items() if name.isupper()}

# Modules that list operators for a reason of their own.
EXCEPTIONS = {
    "graph/op_facts.py": "the table itself",
    "autodiff/rules/rnn_activations.py": "activations by the names that attributes give them",
    "frontend/canonicalize.py": "the words that attributes may hold",
    "frontend/fused/activations.py": "activations by the names that attributes give them",
    "frontend/upgrade/first_opsets.py": "the history of operators",
    "writer/opset_downgrade.py": "the history of operators, reviewed change by change",
    "passes/replace_classifier.py": "the layers that it replaces",
    "autodiff/rules/batch_norm.py": "the nodes that it has written itself",
    "autodiff/rules/rnn_kernels.py": "the layers that have kernels",
    "graph/integer_operators.py": "the operators that have a form for integers",
    "graph/scalars.py": "what attention is written with",
    "passes/webgpu/kernels.py": "the kernels of another runtime",
}


@pytest.mark.parametrize("name", TABLES)
def test_each_name_is_an_operator(name: str) -> None:
    assert TABLES[name]
    assert set(TABLES[name]) <= OPERATORS


def test_positions_of_inputs_exist() -> None:
    for table in (op_facts.PARAMETER_INPUTS, op_facts.SHAPE_INPUTS):
        for name, positions in table.items():
            versions = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == name]
            assert max(positions) < max(s.max_input for s in versions), name


def names_in(node: ast.AST) -> list[ast.expr]:
    """Return the elements of a literal that is a collection of names."""
    if isinstance(node, ast.Set | ast.List | ast.Tuple):
        return node.elts
    if isinstance(node, ast.Dict) and not all(map(is_code, node.values)):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [ast.Constant(word) for word in node.value.split()]
    return []


def is_code(value: ast.expr) -> bool:
    """Tell a table of functions (definitions, adapters, rules) from one of facts."""
    return isinstance(value, ast.Name | ast.Attribute | ast.Lambda | ast.Call)


def collections_of_operators(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    exported = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and [getattr(target, "id", "") for target in node.targets] == ["__all__"]
    }
    for node in ast.walk(tree):
        names = {e.value for e in names_in(node) if isinstance(e, ast.Constant)}
        found = names & OPERATORS
        if len(found) >= 3 and len(found) * 2 > len(names) and id(node) not in exported:
            yield node.lineno, found


def test_a_set_of_operators_is_found() -> None:
    for text in (
        '{"Add", "Mul", "Sub"}',
        '"Add Mul Sub".split()',
        '{"Add": 1, "Mul": 2, "Sub": 3}',
    ):
        assert list(collections_of_operators(ast.parse(text)))
    for text in ('{"Add": add, "Mul": mul, "Sub": sub}', '"If a Loop is left"', '("Add", "Mul")'):
        assert not list(collections_of_operators(ast.parse(text)))


def test_no_other_module_lists_operators() -> None:
    found = {
        path.relative_to(OFFLINE).as_posix(): lists
        for path in sorted(OFFLINE.rglob("*.py"))
        if (lists := list(collections_of_operators(ast.parse(path.read_text()))))
    }
    assert {path: lists for path, lists in found.items() if path not in EXCEPTIONS} == {}
    assert found.keys() == EXCEPTIONS.keys(), "an exception that is none any more"
