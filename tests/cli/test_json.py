"""With --json every command writes one JSON value to standard output, whatever it says besides."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain.cli import main
from onnxtrain.cli.console import Console
from onnxtrain.cli.demo.network import network

GOLDEN = Path(__file__).parents[1] / "golden"
COMMANDS = {
    "inspect model.onnx": "can_train",
    "inspect model.onnx --weights": "weights",
    "prepare model.onnx -o out": "trainable",
    "prepare model.onnx -o out --classes 3": "trainable",
    "train artifacts --data data.npz --validation data.npz --epochs 2": "losses",
    "train artifacts --data data.npz --epochs 2 --checkpoint other": "checkpoint",
    "train artifacts --data data.npz --restart --early-stopping 1": "epochs",
    "eval artifacts --data data.npz --metric accuracy --metric confusion": "eval_loss",
    "export artifacts -o exported.onnx": "outputs",
    "export artifacts -o exported.ort --format ort": "bytes",
    "checkpoint show artifacts": "parameters",
    "gradient model.onnx --wrt image -o gradient.onnx": "nodes",
    "doctor": "native",
    "doctor artifacts": "graphs",
    "ops": "operators",
    "ops Conv Loop": "operators",
}


def strict(text: str) -> dict:
    """Read JSON as other languages do, which know no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "mlp", "artifacts")
    onnx.save(network(), "model.onnx")
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    np.savez("data.npz", input=x, labels=x[:, :3].argmax(axis=1))
    return tmp_path


@pytest.mark.parametrize("quiet", [[], ["--quiet"]], ids=["", "quiet"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_json(folder, capsys, command, quiet) -> None:
    assert main([*command.split(), "--json", *quiet]) == 0
    assert COMMANDS[command] in strict(capsys.readouterr().out)


def test_what_goes_wrong_leaves_standard_output_empty(folder, capsys) -> None:
    assert main(["eval", "artifacts", "--data", "missing.npz", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_numbers_that_are_not_finite_are_null(capsys) -> None:
    Console(as_json=True).result({"loss": float("nan"), "norms": [np.float32("inf"), 1.0]})
    assert strict(capsys.readouterr().out) == {"loss": None, "norms": [None, 1.0]}


def test_a_run_that_has_had_its_epochs_says_so(folder, capsys) -> None:
    run = ["train", "artifacts", "--data", "data.npz", "--epochs", "2"]
    assert main([*run, "--json"]) == 0
    capsys.readouterr()
    assert main([*run, "--resume", "--json"]) == 0
    shown = capsys.readouterr()
    assert len(strict(shown.out)["epochs"]) == 2
    assert "has had 2 epochs" in shown.err
