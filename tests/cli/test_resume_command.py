"""`onnxtrain train --resume` goes on to the bit, in another process, or says what differs."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.cli import main
from onnxtrain.device.state import CheckpointState

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Artifacts of a small network with Dropout, and data for it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "cnn", tmp_path / "artifacts")
    x = np.random.default_rng(0).normal(size=(64, 1, 6, 6)).astype(np.float32)
    np.savez("train.npz", x=x, y=x.reshape(64, -1)[:, :3].argmax(axis=1))
    return tmp_path


def train(*arguments: str) -> int:
    common = ["train", "artifacts", "--data", "train.npz", "--batch-size", "8", "-q"]
    return main([*common, "--epochs", "3", *arguments])


def content(path: str):
    state = CheckpointState.load_checkpoint(path)._training
    held = state.content(include_optimizer_state=True)
    group = held.optimizer_groups["group0"]
    tensors = {**held.trainable, **held.frozen, "step": group.step}
    tensors |= {f"{name} moments": np.stack(t) for name, t in group.states.items()}
    losses = state.private["fit"]["history"]["losses"]
    return tensors | {"rate": state.saved_learning_rate}, losses


# Ends like a crash, after the 11th step of 24.
CRASH = """
import os, sys
from onnxtrain.cli import main
from onnxtrain.device.session import TrainingSession
step, count = TrainingSession.step, [0]
def counted(self, *inputs, **named):
    count[0] += 1
    if count[0] == 12:
        os._exit(9)
    return step(self, *inputs, **named)
TrainingSession.step = counted
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--schedule", "cosine"),
        ("--schedule", "linear", "--warmup", "0.2"),
        ("--schedule", "onecycle", "--lr", "0.02"),
        ("--schedule", "exponential"),
        ("--schedule", "step"),
        ("--schedule", "plateau"),
        ("--warmup", "0.3", "--seed", "5"),
    ],
    ids=" ".join,
)
def test_a_run_that_crashed_goes_on_to_the_bit(options, folder, capsys) -> None:
    every = ("--checkpoint-every", "3", *options)
    assert train("--checkpoint", "whole", *every) == 0
    given = ["train", "artifacts", "--data", "train.npz", "--batch-size", "8", "-q"]
    done = subprocess.run(
        [sys.executable, "-c", CRASH, *given, "--epochs", "3", "--checkpoint", "run", *every],
        check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 9, done.stderr
    assert train("--checkpoint", "run", "--resume", *every) == 0, capsys.readouterr().err
    (whole, losses), (resumed, other) = content("whole"), content("run")
    assert losses == other
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--batch-size", "16"), "batch_size 16 (before: 8)"),
        (("--lr", "0.5"), "learning_rate 0.5 (before: 0.01"),
        (("--seed", "3"), "seed: 3 (before: 0)"),
        (("--epochs", "5"), "cosine.total_step_count 40 (before: 24)"),
        (("--accumulate", "2"), "accumulate 2 (before: 1)"),
        (("--schedule", "linear"), "schedule 'linear' (before: 'cosine')"),
        (("--early-stopping", "2"), "patience 2 (before: None)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_other_options_are_refused(changed, message, folder, capsys) -> None:
    options = ("--schedule", "cosine", "--lr", "0.01")
    assert train(*options) == 0
    assert train(*options, "--resume", *changed) == 2
    shown = capsys.readouterr().err
    assert message in shown and "--restart" in shown


def test_a_schedule_that_is_left_out_is_refused(folder, capsys) -> None:
    assert train("--schedule", "cosine") == 0
    assert train("--resume") == 2
    assert "schedule None (before: 'cosine')" in capsys.readouterr().err


def test_a_new_run_from_a_finished_one_trains(folder) -> None:
    assert train("--schedule", "cosine") == 0
    assert train("--from", "artifacts/trained", "--checkpoint", "next") == 0
    before, after = content("artifacts/trained")[0], content("next")[0]
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert any(name.endswith("weight") for name in changed)
