"""Export in C++: the files and the sentences are those of Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from capi_calls import error_of
from small_runs import GOLDEN, open_session, samples
from upstream_table import OrtError, Session

from onnxtrain.device.session import TrainingSession
from onnxtrain.format.model.file import ModelFile

NETWORKS = Path(__file__).parents[2] / "js" / "test" / "golden"
FOLDERS = [GOLDEN / name for name in ("mlp", "cnn", "head", "int8")]
FOLDERS += [NETWORKS / name for name in ("mlp", "cnn", "bert", "lstm", "int8")]


def outputs_of(folder: Path) -> list[str]:
    return [value.name for value in ModelFile.read(folder / "eval_model.onnx").outputs]


def values_of(folder: Path) -> list[str]:
    """All values of an evaluation graph."""
    graph = onnx.load_model(folder / "eval_model.onnx", load_external_data=False).graph
    made = [name for node in graph.node for name in node.output if name]
    return [*made, *(v.name for v in graph.input), *(v.name for v in graph.initializer)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f"{f.parts[-3]}-{f.name}")
def test_the_file_is_pythons(host, tmp_path, folder) -> None:
    ours, theirs = Session(host, folder), TrainingSession.from_folder(folder)
    for name in ("onnxtrain.classes", "other"):
        ours.state.add_property(name, '["é", "b"]')
        theirs.add_property(name, '["é", "b"]')
    ours.export(tmp_path / "cpp.onnx", outputs_of(folder))
    theirs.export_model_for_inferencing(tmp_path / "python.onnx", outputs_of(folder))
    assert (tmp_path / "cpp.onnx").read_bytes() == (tmp_path / "python.onnx").read_bytes()
    ort.InferenceSession(tmp_path / "cpp.onnx", providers=["CPUExecutionProvider"])
    ours.close()


@pytest.mark.parametrize("name", ["cnn", "int8"])
def test_any_value_can_be_an_output(host, tmp_path, name) -> None:
    ours, theirs = Session(host, GOLDEN / name), open_session(name)
    for session in (ours, theirs):
        session.step(*samples(16, name))
    values = values_of(GOLDEN / name)
    for wanted in [*([value] for value in values[::3]), values[::-1]]:
        ours.export(tmp_path / "cpp.onnx", wanted)
        theirs.export_model_for_inferencing(tmp_path / "python.onnx", wanted)
        found, expected = (tmp_path / f"{n}.onnx" for n in ("cpp", "python"))
        assert found.read_bytes() == expected.read_bytes(), wanted
    ours.close()


def test_sentences(host, tmp_path) -> None:
    folder = tmp_path / "mlp"
    shutil.copytree(GOLDEN / "mlp", folder)
    ours, theirs = Session(host, folder), TrainingSession.from_folder(folder)
    (name,) = outputs_of(folder)[:1]
    for target, names in (
        (tmp_path / "m.onnx", []),
        (tmp_path / "m.onnx", [name, name]),
        (tmp_path / "m.onnx", ["zzzzzzzzzzzzzzzz"]),
        (tmp_path, [name]),
        (tmp_path / "none" / "m.onnx", [name]),
        (tmp_path / "m.ort", [name]),
        (folder / "eval_model.onnx", [name]),
        (folder / "checkpoint", [name]),
    ):
        expected = error_of(theirs.export_model_for_inferencing, target, names)
        with pytest.raises(OrtError) as found:
            ours.export(target, names)
        assert found.value.args[1] == expected
    parameter = theirs.state._training.trainable_names()[0]
    value = theirs.get_parameter(parameter) * np.float32(np.nan)
    ours.state.update_parameter(parameter, value)
    theirs.update_parameter(parameter, value)
    expected = error_of(theirs.export_model_for_inferencing, tmp_path / "m.onnx", [name])
    with pytest.raises(OrtError) as found:
        ours.export(tmp_path / "m.onnx", [name])
    assert found.value.args[1] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["mlp"]
    ours.close()
