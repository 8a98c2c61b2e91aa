"""`onnxtrain compare`: files of each kind, JSON, and what is wrong in one line."""

import csv
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from onnxtrain.cli import main
from onnxtrain.offline.compare import latency

OPSET = [helper.make_opsetid("", 17)]


def classifier(path: str, noise: float = 0.0, dims=("n", 4), classes: int = 3) -> None:
    """Write a model whose scores are a product of its input, with or without noise in it."""
    rng = np.random.default_rng(0)
    size = int(np.prod([d for d in dims[1:] if isinstance(d, int)]))
    weight = np.eye(size, classes) + noise * rng.standard_normal((size, classes))
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["x"], ["flat"], "flatten"),
            helper.make_node("MatMul", ["flat", "w"], ["y"], "product"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [dims[0], classes])],
        [numpy_helper.from_array(weight.astype(np.float32), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=OPSET, ir_version=9), path)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(latency, "_MOST", 3)
    classifier("float.onnx")
    classifier("other.onnx", 0.3)
    x = np.random.default_rng(1).standard_normal((60, 4)).astype(np.float32)
    labels = x[:, :3].argmax(axis=1)
    np.savez("data.npz", x=x, y=labels)
    np.savez("bare.npz", x=x)
    np.save("x.npy", x)
    np.save("labels.npy", labels)
    for name, column in (("data.csv", "label"), ("odd.csv", "kind")):
        with open(name, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*"abcd", column])
            writer.writerows([*row, n] for row, n in zip(x, labels, strict=True))
    return tmp_path


def run(capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    found = main(["compare", *arguments])
    shown = capsys.readouterr()
    assert found == code, shown.err
    return shown.out, shown.err


def result(capsys, *arguments: str) -> dict:
    return json.loads(run(capsys, *arguments, "--json", "--no-latency")[0])


@pytest.mark.parametrize(
    "data", ["data.npz", "x.npy labels.npy", "labels=labels.npy x=x.npy", "data.csv",
             "odd.csv --label kind"],
)  # fmt: skip
def test_data_of_each_kind(capsys, data) -> None:
    found = result(capsys, "float.onnx", "other.onnx", "--data", *data.split())
    assert found["samples"] == 60
    assert found["first"]["metrics"] == {"accuracy": 1.0}
    assert found["second"]["metrics"]["accuracy"] == pytest.approx(found["agreement"])
    assert found["agreement"] < 1
    assert found["layers"][0]["name"] == "y"
    assert found["layers"][0]["errors"]["snr"] < 30


@pytest.mark.parametrize("data", ["bare.npz", "x.npy", "odd.csv --columns a,b,c,d"])
def test_data_without_labels(capsys, data) -> None:
    found = result(capsys, "float.onnx", "other.onnx", "--data", *data.split())
    assert found["first"]["metrics"] == {}
    assert 0 < found["agreement"] < 1


def test_folders_of_images(capsys, folder) -> None:
    for name, colour in (("blue", (0, 0, 255)), ("green", (0, 255, 0)), ("red", (255, 0, 0))):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (5, 4), colour).save(folder / "photos" / name / f"{i}.png")
    for name, classes in (("image.onnx", 3), ("thousand.onnx", 10)):
        classifier(name, 0, ("n", 3, 1, 1), classes)
    found = result(capsys, "image.onnx", "image.onnx", "--data", "photos")
    # Scores are the red, green and blue of an image, and classes are in alphabetical order.
    assert found["first"]["metrics"]["accuracy"] == pytest.approx(1 / 3)
    order = ("--class-names", "red,green,blue")
    found = result(capsys, "image.onnx", "image.onnx", "--data", "photos", *order)
    assert found["first"]["metrics"]["accuracy"] == 1
    _, err = run(capsys, "thousand.onnx", "thousand.onnx", "--data", "photos", code=2)
    assert "there are 3 classes, and the model has 10" in err
    found = result(capsys, "image.onnx", "image.onnx", "--data", "photos/red")
    assert found["first"]["metrics"] == {}
    assert found["samples"] == 2


def test_the_table(capsys) -> None:
    out, err = run(capsys, "float.onnx", "other.onnx", "--data", "data.npz", "--batch-size", "20")
    assert err == ""
    words = [line.split() for line in out.splitlines() if line]
    assert words[0] == ["float.onnx", "other.onnx"]
    first = [line[0] for line in words]
    assert first[1:3] == ["accuracy", "size"]
    assert first.count("latency,") == 2
    assert words[-2][:2] == ["layer", "operator"]
    assert words[-1][:3] == ["y", "MatMul", "w"]
    assert run(capsys, "float.onnx", "other.onnx", "--data", "data.npz", "-q")[0] == ""
    out, _ = run(
        capsys, "float.onnx", "other.onnx", "--data", "data.npz", "--layers", "0", "--no-latency"
    )
    assert "latency" not in out
    assert "SNR dB" not in out


def test_metrics_as_eval_has_them(capsys) -> None:
    found = result(
        capsys, "float.onnx", "other.onnx", "--data", "data.npz", "--metric", "f1", "--metric",
        "confusion", "--metric-output", "y",
    )  # fmt: skip
    assert found["first"]["metrics"]["f1"] == 1
    assert np.array(found["second"]["metrics"]["confusion"]).sum() == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("float.onnx missing.onnx --data data.npz", "'missing.onnx' does not exist"),
        ("float.onnx . --data data.npz", "is a folder"),
        ("float.onnx data.npz --data data.npz", "data.npz"),
        ("float.onnx other.onnx --data missing.npz", "--data: 'missing.npz' does not exist"),
        ("float.onnx other.onnx --data float.onnx", "is not an image"),
        ("float.onnx other.onnx --data bare.npz --metric f1", "and the data have none"),
        ("float.onnx other.onnx --data data.npz --metric nothing", "there is no metric"),
        ("float.onnx other.onnx --data data.npz --metric-output z", "of='z'"),
        ("float.onnx wide.onnx --data data.npz", "the models take different inputs"),
        ("float.onnx other.onnx --data wide.npz", "has the shape (5, 7)"),
        ("float.onnx other.onnx --data range.npz", "is no class"),
        ("float.onnx other.onnx --data text.npz", "is not an .npz file"),
        ("float.onnx other.onnx --data data.csv --label kind", "there is no column 'kind'"),
        ("float.onnx other.onnx", "--data"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(capsys, arguments, words) -> None:
    classifier("wide.onnx", 0, ("n", 7))
    np.savez("wide.npz", x=np.zeros((5, 7), np.float32), y=np.zeros(5, np.int64))
    np.savez("range.npz", x=np.zeros((5, 4), np.float32), y=np.full(5, 8))
    Path("text.npz").write_text("no arrays")
    try:
        out, err = run(capsys, *arguments.split(), code=2)
    except SystemExit as ended:  # the parser's own
        assert ended.code == 2
        out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
