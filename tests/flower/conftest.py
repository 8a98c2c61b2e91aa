"""Flower reports nothing while it is tested, and warns of what is none of our business."""

import os
import sys
from pathlib import Path

import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples" / "federated")]


@pytest.fixture(scope="session")
def golden() -> Path:
    return HERE.parent / "golden"
