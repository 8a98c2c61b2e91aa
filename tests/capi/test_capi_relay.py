"""Golden runs in C++, in Python and in JavaScript, and one run that goes through all of them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from upstream_table import Host, Session

from onnxtrain.device.session import TrainingSession

JAVASCRIPT = Path(__file__).parents[2] / "js"
GOLDEN = JAVASCRIPT / "test" / "golden"
NETWORKS = ["mlp", "cnn", "bert", "lstm", "int8"]
Run = Callable[[str, Path, Path, range], list[float]]


@pytest.fixture
def host(library: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("ONNXTRAIN_NATIVE", "0")
    return Host(library)


def expected_of(network: str) -> dict[str, Any]:
    return json.loads((GOLDEN / network / "expected.json").read_text())


def batch(step: int, expected: dict[str, Any]) -> list[np.ndarray]:
    """A batch, by the formula of js/test/golden/make.py."""
    shape, words, classes = expected["shape"], expected["words"], expected["classes"]
    drawn = (np.arange(int(np.prod(shape))) * 7919 + step * 104729) % 1009
    x = drawn % words if words else (drawn / 1009 * 2 - 1).astype(np.float32)
    return [x.reshape(shape), (np.arange(shape[0]) * 5 + step * 3) % classes]


def in_cpp(host: Host) -> Run:
    def run(network: str, state: Path, exported: Path, steps: range) -> list[float]:
        session = Session(host, GOLDEN / network, state)
        expected = expected_of(network)
        losses = [float(session.step(*batch(step, expected))) for step in steps]
        session.state.save(state, True)
        session.export(exported, ["y"])
        session.close()
        return losses

    return run


def in_python(network: str, state: Path, exported: Path, steps: range) -> list[float]:
    session = TrainingSession.from_folder(GOLDEN / network, checkpoint=state)
    expected = expected_of(network)
    losses = [float(np.asarray(session.step(*batch(step, expected))[0])) for step in steps]
    session.save_checkpoint(state, include_optimizer_state=True)
    session.export_model_for_inferencing(exported, ["y"])
    return losses


def in_javascript(network: str, state: Path, exported: Path, steps: range) -> list[float]:
    given = GOLDEN / network, state, exported, steps.start, steps.stop
    command = ["node", str(JAVASCRIPT / "test" / "leg.js"), *map(str, given)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(printed.stdout.splitlines()[-1])


def start(network: str, state: Path) -> None:
    session = TrainingSession.from_folder(GOLDEN / network)
    session.set_learning_rate(expected_of(network)["learning_rate"])
    session.save_checkpoint(state, include_optimizer_state=True)


def assert_near(losses: list[float], expected: list[float], tolerance: float) -> None:
    np.testing.assert_allclose(losses, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("network", NETWORKS)
def test_golden_losses(host, tmp_path, network) -> None:
    expected, state = expected_of(network), tmp_path / "state"
    start(network, state)
    losses = in_cpp(host)(network, state, tmp_path / "m.onnx", range(20))
    assert_near(losses, expected["losses"], 1e-6)
    shutil.copy(GOLDEN / network / "at10", state)
    losses = in_cpp(host)(network, state, tmp_path / "m.onnx", range(10, 20))
    assert_near(losses, expected["losses"][10:], 1e-6)


@pytest.mark.parametrize("network", NETWORKS)
def test_python_and_cpp_write_the_same(host, tmp_path, network) -> None:
    made = []
    start(network, tmp_path / "start")
    for name, run in (("cpp", in_cpp(host)), ("python", in_python)):
        files = tmp_path / name, tmp_path / f"{name}.onnx"
        shutil.copy(tmp_path / "start", files[0])
        losses = run(network, *files, range(4))
        made.append((losses, *(file.read_bytes() for file in files)))
    assert made[0] == made[1]


@pytest.mark.parametrize("network", NETWORKS)
def test_a_run_goes_through_three_languages(host, tmp_path, network) -> None:
    """Each of the six ways from one to another; what each writes, the others would write, too."""
    if not (JAVASCRIPT / "dist").is_dir() or shutil.which("node") is None:
        pytest.skip("the relay needs node and the built package, js/dist")
    expected, state = expected_of(network), tmp_path / "state"
    start(network, state)
    legs = [in_cpp(host), in_javascript, in_python, in_cpp(host), in_python, in_javascript]
    legs.append(in_cpp(host))
    for index, leg in enumerate(legs):
        steps = range(index * 2, index * 2 + 2)
        losses = leg(network, state, tmp_path / "exported.onnx", steps)
        assert_near(losses, expected["losses"][steps.start : steps.stop], 1e-6)
        saved = [
            (run(network, shutil.copy(state, tmp_path / "copy"), tmp_path / "again.onnx", range(0)))
            or ((tmp_path / "copy").read_bytes(), (tmp_path / "again.onnx").read_bytes())
            for run in (in_cpp(host), in_python, in_javascript)
        ]
        assert saved[0] == saved[1] == saved[2]
        assert saved[0] == (state.read_bytes(), (tmp_path / "exported.onnx").read_bytes())
