"""Every operator is known, every rule has a Spec, and the page that says so is current."""

import importlib
from pathlib import Path

import onnxtrain.offline.autodiff.rules  # noqa: F401
from onnxtrain.offline.autodiff.coverage import RULED, UNKNOWN, coverage, page
from onnxtrain.offline.autodiff.registry import refusal, registered, zero_reason

ROOT = Path(__file__).parents[2]


def test_no_operator_of_the_standard_is_unknown() -> None:
    assert [row.op for row in coverage() if row.how == UNKNOWN] == []


def test_no_operator_is_known_in_two_ways() -> None:
    twice = [
        op
        for (domain, op), rules in registered().items()
        if (zero_reason(op, domain) is not None or refusal(op, domain) is not None)
        and not all(rule.covers for rule in rules)  # what a rule does not cover
    ]
    assert twice == []


def test_every_rule_has_a_spec() -> None:
    tested = set()
    for file in sorted((ROOT / "tests" / "rules").glob("test_*.py")):
        module = importlib.import_module(file.stem)
        tested |= {spec.op for spec in getattr(module, "SPECS", ())}
        tested |= set(getattr(module, "ALSO_TESTED", ()))
    untested = {row.op for row in coverage() if row.how == RULED} - tested
    assert untested == set()


def test_the_page_of_operators_is_current() -> None:
    stored = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert stored == page(), "run `make docs`"
