"""`--train` takes words, and `inspect` weighs them."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain.cli import main
from onnxtrain.cli.demo.network import network


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "model.onnx")
    return tmp_path


def result(capsys, *arguments: str) -> dict:
    code = main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out)


def test_prepare_takes_words_and_patterns_together(model, capsys) -> None:
    made = result(
        capsys, "prepare", "model.onnx", "--train", "lora:rank=2,layers=fc1", "--train", "bias",
        "--train", "conv1.*", "-o", "out",
    )  # fmt: skip
    assert {"fc1.lora_A.weight", "fc1.lora_B.weight", "fc2.bias", "conv1.weight"} <= set(
        made["trainable"]
    )
    assert "fc2.weight" not in made["trainable"]
    x, labels = np.random.default_rng(0).random((40, 1, 8, 8), np.float32), np.arange(40) % 10
    np.savez("data.npz", image=x, labels=labels)
    assert main(["train", "out", "--data", "data.npz", "--epochs", "1", "-q"]) == 0
    assert main(["export", "out", "-o", "trained.onnx", "-q"]) == 0


def test_a_wrong_word_ends_with_a_line(model, capsys) -> None:
    assert main(["prepare", "model.onnx", "--train", "last:0", "-o", "out"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "as in 'last:3'" in shown


def test_inspect_weighs_choices(model, capsys) -> None:
    found = result(capsys, "inspect", "model.onnx", "--choices", "--train", "last:99")["choices"]
    by_word = {choice["train"]: choice for choice in found}
    assert list(by_word) == ["*", "lora", "bias", "norm", "last:3", "head", "last:99"]
    everything, biases, head = by_word["*"], by_word["bias"], by_word["head"]
    assert everything["parameters"] > by_word["lora"]["parameters"] > biases["parameters"] > 0
    sizes = [choice["activations"]["bytes_per_sample"] for choice in (everything, biases, head)]
    assert sizes[0] >= sizes[1] > sizes[2] > 0
    assert "layers with weights that train" in by_word["last:99"]["problem"]
    assert main(["inspect", "model.onnx", "--train", "head"]) == 0
    assert "train=        head  " in capsys.readouterr().out
