"""Flower reports nothing while it is tested, and warns of what is none of our business."""

import contextlib
import logging
import os
import sys
from pathlib import Path

import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"  # the models are tiny
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples" / "federated")]


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    """What Flower says of each round would bury what a failed test says."""
    with contextlib.suppress(ImportError):
        import flwr.serverapp  # noqa: F401  (sets up its logger)
    logging.getLogger("flwr").setLevel(logging.WARNING)
