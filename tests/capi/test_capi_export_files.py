"""Files of exported models in C++, without onnxruntime: external data, hostile graphs, kills."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from capi_calls import error_of, killed_again_and_again
from mutations import mutated
from small_runs import GOLDEN

from onnxtrain.device.export.inference_model import export_model
from onnxtrain.format.checkpoint.content import CheckpointContent
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint
from onnxtrain.format.model.file import ModelFile

NO_RUNTIME = "there is no onnxruntime here"
LARGE = 1800 << 20


def outputs_of(folder: Path) -> list[str]:
    return [value.name for value in ModelFile.read(folder / "eval_model.onnx").outputs]


def in_python(
    model: Path, checkpoint: Path, target: Path, names: list[str], threshold: int
) -> None:
    held = read_checkpoint(checkpoint)
    values = {**held.trainable, **held.frozen}
    given = ModelFile.read(model)
    export_model(given, names, values, target, external_data_threshold=threshold)


@pytest.mark.parametrize("model", ["mlp", "cnn", "head"])
def test_external_data_are_pythons(calls, tmp_path, model) -> None:
    folder = GOLDEN / model
    for name in ("cpp", "python"):
        (tmp_path / name).mkdir()
    given = folder / "eval_model.onnx", folder / "checkpoint"
    names = outputs_of(folder)
    for threshold in (1, LARGE, 1):  # each replaces what was there before
        in_python(*given, tmp_path / "python" / "m.onnx", names, threshold)
        calls.result("export", *given, tmp_path / "cpp" / "m.onnx", ",".join(names), threshold)
        contents = [
            {file.name: file.read_bytes() for file in (tmp_path / made).iterdir()}
            for made in ("cpp", "python")
        ]
        assert contents[0] == contents[1]
        assert ("m.onnx.data" in contents[0]) == (threshold == 1)


def a_large_model(folder: Path) -> tuple[Path, Path, np.ndarray]:
    """A model with one tensor beside it that is no parameter, and a checkpoint."""
    held = np.arange(300_000, dtype=np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Add", ["x", "w"], ["sum"]),
            onnx.helper.make_node("Add", ["sum", "fixed"], ["y"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info(n, 1, [300_000]) for n in ("x", "w")],
        [onnx.helper.make_tensor_value_info("y", 1, [300_000])],
        [onnx.numpy_helper.from_array(held, "fixed")],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.save_model(model, folder / "eval.onnx", save_as_external_data=True, location="fixed.data")
    write_checkpoint(folder / "state", CheckpointContent(trainable={"w": held * 2}))
    return folder / "eval.onnx", folder / "state", held


def test_tensors_of_other_files(calls, tmp_path) -> None:
    model, state, held = a_large_model(tmp_path)
    for threshold in (1, LARGE):
        in_python(model, state, tmp_path / "python.onnx", ["y"], threshold)
        calls.result("export", model, state, tmp_path / "cpp.onnx", "y", threshold)
    assert (tmp_path / "cpp.onnx").read_bytes() == (tmp_path / "python.onnx").read_bytes()
    session = ort.InferenceSession(tmp_path / "cpp.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(["y"], {"x": held})[0], held * 4)
    for content in (b"short", None):
        (tmp_path / "fixed.data").unlink()
        if content is not None:
            (tmp_path / "fixed.data").write_bytes(content)
        target = tmp_path / "new.onnx"
        expected = error_of(in_python, model, state, target, ["y"], LARGE)
        assert calls("export", model, state, target, "y", LARGE) == (False, expected)


@pytest.mark.parametrize("seed", range(2))
def test_hostile_models_are_refused_as_python_refuses_them(calls, tmp_path, seed) -> None:
    """`ONNXTRAIN_MUTATIONS` files for each seed; 300 by default."""
    chooser = random.Random(seed)
    folders = [GOLDEN / name for name in ("mlp", "cnn")]
    good = [(folder / "eval_model.onnx").read_bytes() for folder in folders]
    model, target = tmp_path / "model.onnx", tmp_path / "out.onnx"
    for _ in range(int(os.environ.get("ONNXTRAIN_MUTATIONS", "300"))):
        index = chooser.randrange(len(good))
        model.write_bytes(mutated("protobuf", chooser, good[index], good))
        names, checkpoint = outputs_of(folders[index]), folders[index] / "checkpoint"
        threshold = chooser.choice([1, LARGE])
        python = tmp_path / "python.onnx"
        expected = error_of(in_python, model, checkpoint, python, names, threshold)
        succeeded, text = calls("export", model, checkpoint, target, ",".join(names), threshold)
        if succeeded:
            assert expected is None
            ours = target.read_bytes().replace(b"out.onnx.data", b"python.onnx.data")
            assert threshold == 1 or ours == python.read_bytes()
        elif NO_RUNTIME not in text:
            # Names that are near are not looked for, and some numbers are not as large.
            if "; its outputs are" not in text and "element type" not in text:
                assert text == expected
            assert expected is not None


def test_what_dead_processes_left_is_removed(calls, tmp_path) -> None:
    given = GOLDEN / "mlp" / "eval_model.onnx", GOLDEN / "mlp" / "checkpoint"
    names = ",".join(outputs_of(GOLDEN / "mlp"))
    for name in (".m.onnx.%s.tmp", ".m.onnx.data.%s.tmp", "m.onnx.data.%s"):
        (tmp_path / (name % ("a" * 16))).write_bytes(b"left")
    (tmp_path / "m.onnx.data").write_bytes(b"someone's")
    calls.result("export", *given, tmp_path / "m.onnx", names, LARGE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    calls.result("export", *given, tmp_path / "m.onnx", names, 1)
    calls.result("export", *given, tmp_path / "m.onnx", names, LARGE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]


def test_kills_leave_the_old_model_or_the_new(calls, program, tmp_path) -> None:
    """A process is killed while it exports; the model that is there then runs."""
    model, state, held = a_large_model(tmp_path)
    write_checkpoint(tmp_path / "other", CheckpointContent(trainable={"w": held * 3}))
    target = tmp_path / "out" / "m.onnx"
    target.parent.mkdir()
    calls.result("export", model, state, target, "y", 1)
    lines = "".join(
        f"export\t{model}\t{tmp_path}/{name}\t{target}\ty\t{threshold}\n"
        for name, threshold in [("state", 1), ("other", 1), ("other", LARGE)] * 20
    )
    for _ in killed_again_and_again(program, lines, longest=0.1):
        session = ort.InferenceSession(target, providers=["CPUExecutionProvider"])
        found = session.run(["y"], {"x": np.zeros_like(held)})[0]
        assert any(np.array_equal(found, held * factor) for factor in (3, 4))
    calls.result("export", model, state, target, "y", 1)
    assert sorted(path.name for path in target.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
