"""A process may be killed at any moment; `make crash` kills each operation a thousand times."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kills import kill_at_every_call, kill_at_random
from operations import OPERATIONS
from power_loss import Report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs a server that forks"),
]


def check(report: Report) -> None:
    assert not report.wrong, report.wrong[:5]
    assert not report.litter, report.litter[:5]


@pytest.mark.parametrize("name", ["save", "export", "export-int8", "federated"])
def test_killed_at_every_call(name) -> None:
    operation, report = OPERATIONS[name], Report()
    assert kill_at_every_call(operation, operation.write, report) > 3
    check(report)


@pytest.mark.parametrize(
    ("name", "kills"), [("save", 20), ("artifacts", 5), ("fit", 5), ("fit-int8", 5)]
)
def test_killed_at_random(name, kills) -> None:
    report = Report()
    kill_at_random(OPERATIONS[name], kills, 1, report)
    check(report)


def test_two_writers_killed_at_random() -> None:
    report = Report()
    kill_at_random(OPERATIONS["save"], 12, 2, report)
    check(report)
