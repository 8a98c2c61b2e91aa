"""Folders of other kinds in C++: low-rank factors on a base of their own, and the ORT format."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from capi_calls import error_of
from small_runs import GOLDEN, samples
from test_base_file import LABELS, X, cut, damage, network
from upstream_table import Host, OrtError, Session

import onnxtrain
from onnxtrain import artifacts
from onnxtrain.device.session import TrainingSession
from onnxtrain.format.model.file import ModelFile


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    onnxtrain.prepare(network(), folder, train="lora:rank=2")
    return folder


@pytest.fixture
def with_base(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "lora")


def in_ort_format(folder: Path, target: Path) -> Path:
    """The same folder, with its graphs in the ORT format."""
    target.mkdir()
    shutil.copy(folder / "checkpoint", target)
    for graph in folder.glob("*.onnx"):
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.save_model_format", "ORT")
        options.optimized_model_filepath = str(target / graph.with_suffix(".ort").name)
        ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    return target


def assert_trains_as_python(host: Host, folder: Path, data, tmp_path: Path) -> None:
    ours, theirs = Session(host, folder), TrainingSession.from_folder(folder)
    for index in range(8):
        losses = []
        for session in (ours, theirs):
            if index % 2:
                losses.append(session.step(*data))
                continue
            losses.append(session.train_step(*data))
            session.optimizer_step()
            session.lazy_reset_grad()
        found, expected = (np.ravel(v[0] if isinstance(v, tuple) else v)[0] for v in losses)
        assert abs(found - expected) <= 1e-6
    ours.state.save(tmp_path / "cpp", True)
    theirs.save_checkpoint(tmp_path / "python", include_optimizer_state=True)
    assert (tmp_path / "cpp").read_bytes() == (tmp_path / "python").read_bytes()
    ours.close()


def test_low_rank_factors_train_on_their_base(host, with_base, tmp_path) -> None:
    assert_trains_as_python(host, with_base, (X, LABELS), tmp_path)
    ours = Session(host, with_base, tmp_path / "cpp")
    theirs = TrainingSession.from_folder(with_base, checkpoint=tmp_path / "cpp")
    ours.export(tmp_path / "cpp.onnx", ["y"])
    theirs.export_model_for_inferencing(tmp_path / "python.onnx", ["y"])
    assert (tmp_path / "cpp.onnx").read_bytes() == (tmp_path / "python.onnx").read_bytes()
    ours.close()


@pytest.mark.parametrize("harm", [damage, cut, Path.unlink], ids=["damaged", "cut", "missing"])
def test_a_base_that_is_not_the_right_one(host, with_base, harm) -> None:
    harm(with_base / "base.data")
    expected = error_of(TrainingSession.from_folder, with_base)
    with pytest.raises(OrtError) as found:
        Session(host, with_base)
    assert found.value.args[1] == expected


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_ort_format(host, tmp_path, model) -> None:
    folder = in_ort_format(GOLDEN / model, tmp_path / "ort")
    assert_trains_as_python(host, folder, samples(8, model), tmp_path)
    ours, theirs = Session(host, folder), TrainingSession.from_folder(folder)
    with pytest.raises(OrtError) as found:
        ours.export(tmp_path / "m.onnx", ["y"])
    expected = error_of(theirs.export_model_for_inferencing, tmp_path / "m.onnx", ["y"])
    assert found.value.args[1] == expected
    ours.close()


def test_a_graph_with_gradients_of_its_inputs_trains(host, tmp_path) -> None:
    artifacts.generate_artifacts(
        network(),
        requires_grad=["a.weight", "x"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path / "inputs",
    )
    graph = ModelFile.read(tmp_path / "inputs" / "training_model.onnx")
    assert "x_grad.accumulation.out" in [value.name for value in graph.outputs]
    assert_trains_as_python(host, tmp_path / "inputs", (X, LABELS), tmp_path)
