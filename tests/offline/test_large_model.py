"""A model of 2.5 GB by its path, with external data, from the file to the first step.

Its tables are holes in a sparse file but for a few rows. That is enough to see whether offsets
beyond 2**31 bytes are right, and leaves the time that the disk takes for 2.5 GB.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

import onnxtrain
from artifact_device import Device, close
from large_model import PLACES, POSITIONS, TOKENS, WORDS, rows, save
from onnxtrain.format.checkpoint.file import read_checkpoint

pytestmark = pytest.mark.slow

DISK, MEMORY = 4 << 30, 9 << 30
FEEDS = {"tokens": TOKENS, "positions": POSITIONS, "labels": np.array([1, 0, 9, 4, 4])}


def available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0  # it is not known here
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the model, which does not stay for the next runs."""
    if (free := shutil.disk_usage(tmp_path).free) < DISK:
        pytest.skip(f"needs {DISK:,} bytes of disk, and there are {free:,}")
    save(tmp_path)
    yield tmp_path
    shutil.rmtree(tmp_path)


def generate(folder: Path, *trains: str) -> Path:
    program = Path(__file__).with_name("large_model.py")
    result = subprocess.run(
        [sys.executable, str(program), str(folder), *trains], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return folder / "artifacts"


def reference() -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the rows that are picked."""
    values = {n: torch.tensor(v, requires_grad=True) for n, v in rows().items()}
    scores = (values["words"] + values["places"]) @ values["head"]
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor(FEEDS["labels"]))
    loss.backward()
    return loss.item(), {n: v.grad.numpy() for n, v in values.items()}


def test_the_head_of_a_model_that_is_larger_than_a_message_can_be(folder: Path) -> None:
    artifacts = generate(folder, "head")
    (folder / "model.data").unlink()
    assert (artifacts / "checkpoint.data").stat().st_size > 2.5e9
    assert all(file.stat().st_size < 20_000 for file in artifacts.glob("*.onnx"))
    loss, gradients = reference()
    device = Device(artifacts, only=("training_model", "step_model", "eval_model"))
    results = device.train(**FEEDS)
    assert next(iter(results.values())) == pytest.approx(loss, rel=1e-5)
    close(results["head_grad.accumulation.out"], gradients["head"], "head")
    before = device.values["head"].copy()
    assert device.fused_step(1, 0.5, **FEEDS) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(device.values["head"], before - 0.5 * gradients["head"], atol=1e-6)
    evaluated = next(iter(device.run("eval_model", **FEEDS).values()))
    assert evaluated < loss


def test_more_than_2_gb_train(folder: Path) -> None:
    if (free := available_memory()) < MEMORY:
        pytest.skip(f"needs {MEMORY:,} bytes of memory, and there are {free:,}")
    report = onnxtrain.inspect(folder / "model.onnx")
    assert report.parameter_bytes > 2.5e9 and list(report.weights) == ["words", "places", "head"]
    artifacts = generate(folder, "words", "head")
    content = read_checkpoint(artifacts / "checkpoint")
    session = ort.InferenceSession(artifacts / "step_model.onnx")
    clock = {"learning_rate": np.array([0.5], np.float32), "step": np.array([1])}
    names = ["words.updated", "head.updated"]
    loss_name = session.get_outputs()[0].name
    loss, words, head = session.run([loss_name, *names], {**content.trainable, **FEEDS, **clock})
    words = words.reshape(WORDS, -1)  # it was updated piece by piece
    expected, gradients = reference()
    assert loss == pytest.approx(expected, rel=1e-5)
    stored = rows()
    np.testing.assert_allclose(head, stored["head"] - 0.5 * gradients["head"], atol=1e-6)
    np.testing.assert_allclose(words[TOKENS], stored["words"] - 0.5 * gradients["words"], atol=1e-6)
    untouched = np.array([2, 279_998, 280_000, WORDS // 2, WORDS - 3])
    assert not words[untouched].any() and content.frozen["places"].shape == (PLACES, 1024)
