"""Power fails, or the process is killed, while a server writes its progress."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr.serverapp", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "crash"))

from kills import kill_at_every_call
from operations import OPERATIONS
from power_loss import Report, check_operation


def test_power_fails() -> None:
    report = check_operation(OPERATIONS["server"], limit=20, nested=3)
    assert not report.wrong and not report.litter, report.wrong + report.litter
    assert {None, 1, 2} <= set(report.found)


def test_the_server_is_killed() -> None:
    operation, report = OPERATIONS["server"], Report()
    assert kill_at_every_call(operation, operation.write, report) > 5
    assert not report.wrong and not report.litter, report.wrong + report.litter
