"""Calls fail, the disk is full, the clock jumps: the old or the new is there, the error ours.

`make soak` does the same for minutes or hours, with kills, stops and federations beside it.
"""

import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults import Faults
from operations import OPERATIONS
from soak import attempt

QUICK = ["save", "save-inline", "export", "export-one-file", "export-int8", "federated"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="limits on files are set by Unix alone"),
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_something_fails(name, tmp_path, monkeypatch) -> None:
    rng = random.Random(name)
    faults, counts = Faults(tmp_path, rng), Counter()
    for round_ in range(6 if name in QUICK else 4 if name == "fit-int8" else 2):
        for kind in faults.kinds:
            monkeypatch.setattr(Faults, "some", lambda self, kind=kind: kind)
            attempt(OPERATIONS[name], tmp_path, round_ % 2 + 1, faults, counts)
    assert not [what for what in counts if what.startswith("foreign")], counts
    assert counts["done"] and counts["refused: full disk"], counts
    assert len([what for what in counts if what.startswith("refused")]) > 2, counts
