"""`--quantize` and `--calibration` in a shell."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain.cli import main
from onnxtrain.cli.demo.network import network

RNG = np.random.default_rng(0)
X = RNG.random((40, 1, 8, 8), np.float32)


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "model.onnx")
    np.savez("data.npz", image=X, labels=np.arange(40) % 10)
    return tmp_path


def result(capsys, *arguments: str) -> dict:
    code = main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out)


def refusal(capsys, *arguments: str) -> str:
    assert main([*arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    return shown


def test_inspect_says_what_runs_on_integers(model, capsys) -> None:
    found = result(capsys, "inspect", "model.onnx", "--quantize", "int8")["integers"]
    assert found["products"] == 4 and found["floats"] == {}
    assert result(capsys, "inspect", "model.onnx")["integers"] is None
    assert main(["inspect", "model.onnx", "--quantize", "int8:exclude=conv1"]) == 0
    assert "3 of 4 products run on integers. In floats: 1 Conv: excluded" in capsys.readouterr().out


def test_a_model_is_trained_for_integers_and_exported(model, capsys) -> None:
    made = result(
        capsys, "prepare", "model.onnx", "--quantize", "int8:method=mse", "--calibration",
        "data.npz", "-o", "out",
    )  # fmt: skip
    assert made["notes"][-1].startswith("4 of 4 products run on integers")
    assert main(["train", "out", "--data", "data.npz", "--epochs", "1", "-q"]) == 0
    assert main(["export", "out", "-o", "int8.onnx", "-q"]) == 0
    graph = onnx.load("int8.onnx").graph
    kinds = {t.name: t.data_type for t in graph.initializer}
    assert onnx.TensorProto.INT8 in kinds.values() and onnx.TensorProto.INT32 in kinds.values()


def test_calibration_comes_from_tables_arrays_and_folders(model, capsys) -> None:
    np.save("x.npy", X)
    with open("data.csv", "w") as file:
        print(*(f"p{i}" for i in range(64)), "label", sep=",", file=file)
        for row, sample in enumerate(X):
            print(*sample.reshape(-1), row % 10, sep=",", file=file)
    for name in ("x.npy", "data.csv"):
        made = result(
            capsys, "prepare", "model.onnx", "--quantize", "int8", "--calibration", name, "-o", "a"
        )
        assert made["directory"] == "a"
    pillow = pytest.importorskip("PIL.Image", reason="it is in an extra")
    for label in ("cat", "dog"):
        Path("images", label).mkdir(parents=True)
        pixels = RNG.integers(0, 256, (8, 8)).astype(np.uint8)
        pillow.fromarray(pixels).save(f"images/{label}/0.png")
    result(
        capsys, "prepare", "model.onnx", "--quantize", "int8", "--calibration", "images", "--mean",
        "0.5", "--std", "0.5", "-o", "b",
    )  # fmt: skip


def test_what_is_wrong_is_said_in_a_line(model, capsys) -> None:
    prepare = ("prepare", "model.onnx", "-o", "out")
    assert "need a range to begin with" in refusal(capsys, *prepare, "--quantize", "int8")
    assert "calibration is for quantize" in refusal(capsys, *prepare, "--calibration", "data.npz")
    wrong = refusal(capsys, *prepare, "--quantize", "int9")
    assert "which is none of int8" in wrong and "did you mean 'int8'?" in wrong
    missing = refusal(capsys, *prepare, "--quantize", "int8", "--calibration", "no.npz")
    assert "--calibration: 'no.npz' does not exist" in missing
    np.savez("wide.npz", image=np.zeros((4, 9), np.float32))
    shape = refusal(capsys, *prepare, "--quantize", "int8", "--calibration", "wide.npz")
    assert "--calibration: wide.npz: the array for 'image' has the shape (4, 9)" in shape
    assert not Path("out").exists()
