"""Scripts in the manner of upstream's documentation, notebooks and examples, run as they are.

They are in `tests/scripts` and import from `onnxruntime.training`; `python -m onnxtrain.compat`
runs them. Each prepares artifacts and says what torch makes of the same data, with which the first
loss and the gradients are compared.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from artifact_device import Device, close

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent / "scripts"
OFFLINE = {
    # name: what trains, what is given out beside the loss
    "mnist_artifacts": (4, ["output"]),
    "mnist_onnxblock": (4, ["output"]),
    "mobilenet_head": (2, []),
    "masked_language_model": (39, ["logits"]),
    "two_outputs": (4, ["first"]),
    "weighted_losses": (8, []),
    "voice_head": (2, []),
}


def run(script: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "onnxtrain.compat", str(SCRIPTS / f"{script}.py")],
        cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(HERE.parent / "models")},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("script", OFFLINE)
def test_the_first_loss_and_gradients_are_those_of_torch(script: str, tmp_path: Path) -> None:
    run(script, tmp_path)
    said = np.load(tmp_path / "torch.npz")
    device = Device(tmp_path)
    feeds = {n.removeprefix("feed:"): said[n] for n in said.files if n.startswith("feed:")}
    results = device.train(**feeds)
    own = ("accumulation.out", ".updated", "updated_flag", "finite_check")
    loss, *others = [n for n in results if not n.endswith(own)]
    trains, outputs = OFFLINE[script]
    assert (len(device.trainable), others) == (trains, outputs)
    assert results[loss].item() == pytest.approx(said["loss"].item(), rel=1e-4)
    largest = max(np.linalg.norm(said[f"grad:{name}"]) for name in device.trainable)
    for name in device.trainable:
        gradient = results[f"{name}_grad.accumulation.out"]
        close(gradient, said[f"grad:{name}"], name, 1e-3 * largest)
    evaluated = device.run("eval_model", **feeds)[loss].item()
    assert evaluated == pytest.approx(said["loss"].item(), rel=1e-4)
    before = {name: device.values[name] for name in device.trainable}
    device.step(1, 0.01, **feeds)
    assert all(not np.array_equal(device.values[name], before[name]) for name in before)


@pytest.mark.parametrize("prepared_by", ["mnist_artifacts", "mnist_onnxblock"])
def test_training_as_in_the_notebook(prepared_by: str, tmp_path: Path) -> None:
    run(prepared_by, tmp_path)
    said = json.loads(run("mnist_training", tmp_path))
    assert said["module"] == "onnxtrain.api"
    assert said["history"][2] < 0.2 * said["history"][0] and said["test_loss"] < 0.2
    assert said["accuracy"] > 0.95 and said["exported"] > 0.9
    names = sorted(["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"])
    assert (said["parameters"], said["epochs"]) == (names, 3)
    assert said["sizes"] == [397_510, 397_510]
