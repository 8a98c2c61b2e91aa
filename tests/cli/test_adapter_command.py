"""`onnxtrain adapter`: show, export, convert, stack, merge."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain import Adapter
from onnxtrain.cli import main
from onnxtrain.cli.demo.network import network

X = np.random.default_rng(0).normal(size=(4, 1, 8, 8)).astype("f4")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a model, its artifacts with low-rank factors, and a trained checkpoint."""
    folder = tmp_path_factory.mktemp("adapters")
    onnx.save(network(), folder / "model.onnx")
    train = onnxtrain.Lora(rank=2, layers="fc*")
    onnxtrain.prepare(folder / "model.onnx", folder / "artifacts", train=train)
    session = onnxtrain.TrainingSession(folder / "artifacts")
    session.set_learning_rate(0.05)
    for _ in range(3):
        session.step(X, np.arange(4))
    session.save_checkpoint(folder / "artifacts" / "trained")
    session.export_adapter(folder / "a.onnx_adapter")
    return folder


def said(capsys, *words):
    """What a command writes as JSON."""
    assert main(["adapter", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_show(prepared, capsys) -> None:
    found = said(capsys, "show", prepared / "a.onnx_adapter", "--fits", prepared / "artifacts")
    assert [layer["layer"] for layer in found["layers"]] == ["fc1", "fc2"]
    assert (found["rank"], found["dtype"], len(found["base"])) == (2, "float32", 32)
    assert main(["adapter", "show", str(prepared / "a.onnx_adapter")]) == 0
    text = capsys.readouterr().out
    assert "2 layers, float32" in text and "[512, 2] [2, 64]" in text


def test_what_does_not_fit_is_an_error(prepared, capsys, tmp_path) -> None:
    Adapter.read(prepared / "a.onnx_adapter").astype("float16").save(tmp_path / "h.onnx_adapter")
    words = ["show", tmp_path / "h.onnx_adapter", "--fits", prepared / "artifacts"]
    assert main(["adapter", *map(str, words)]) == 2
    assert "is float16 in the adapter and float32" in capsys.readouterr().err


def test_export_takes_the_trained_factors(prepared, capsys, tmp_path) -> None:
    said(capsys, "export", prepared / "artifacts", "-o", tmp_path / "b.onnx_adapter")
    one, two = Adapter.read(prepared / "a.onnx_adapter"), Adapter.read(tmp_path / "b.onnx_adapter")
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_convert_and_back(prepared, capsys, tmp_path) -> None:
    said(capsys, "convert", prepared / "a.onnx_adapter", "-o", tmp_path / "peft")
    assert (tmp_path / "peft" / "adapter_config.json").exists()
    found = said(capsys, "convert", tmp_path / "peft", "-o", tmp_path / "c.onnx_adapter",
                 "--dtype", "bfloat16")  # fmt: skip
    assert found["dtype"] == "bfloat16"


def test_stack(prepared, capsys, tmp_path) -> None:
    adapter = prepared / "a.onnx_adapter"
    found = said(capsys, "stack", adapter, adapter, "--weight", "0.5", "--weight", "0.5", "-o",
                 tmp_path / "s.onnx_adapter")  # fmt: skip
    assert found["rank"] == 4
    words = ["stack", str(adapter), "--weight", "1", "--weight", "2", "-o", str(tmp_path / "s")]
    assert main(["adapter", *words]) == 2
    assert "1 adapters and 2 weights" in capsys.readouterr().err


def test_merge(prepared, capsys, tmp_path) -> None:
    for model in (prepared / "model.onnx", prepared / "artifacts" / "inference_model.onnx"):
        found = said(capsys, "merge", model, prepared / "a.onnx_adapter", "-o", tmp_path / "m.onnx")
        assert {layer["how"] for layer in found["layers"]} == {"float"}
        made = ort.InferenceSession(tmp_path / "m.onnx").run(None, {"image": X})[0]
        session = onnxtrain.TrainingSession.from_folder(
            prepared / "artifacts", checkpoint=prepared / "artifacts" / "trained"
        )
        np.testing.assert_allclose(made, session.predict(X), rtol=1e-4, atol=1e-4)
    words = ["merge", str(model), str(prepared / "a.onnx_adapter"), "-o", str(tmp_path / "m.onnx")]
    assert main(["adapter", *words]) == 0
    assert "2 layers: merged into float weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    ["stack {f}/a.onnx_adapter --weight 2 -o {f}/a.onnx_adapter",
     "convert {f}/a.onnx_adapter --dtype float16 -o {f}/a.onnx_adapter",
     "merge {f}/model.onnx {f}/a.onnx_adapter -o {f}/a.onnx_adapter",
     "export {f}/artifacts -o {f}/artifacts/trained",
     "convert {f}/a.onnx_adapter -o {f}/model.onnx"],
)  # fmt: skip
def test_what_is_there_is_not_overwritten(prepared, capsys, words) -> None:
    content = {path: path.read_bytes() for path in prepared.rglob("*") if path.is_file()}
    assert main(["adapter", *words.format(f=prepared).split()]) == 2
    assert "--output" in capsys.readouterr().err
    assert content == {path: path.read_bytes() for path in prepared.rglob("*") if path.is_file()}
