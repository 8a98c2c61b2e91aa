"""The file of a base: damaged, missing, or of other graphs, it is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import ModelError, OnnxTrainError

X, LABELS = np.ones((2, 30), np.float32), np.array([0, 1])


def network(seed: int = 0) -> onnx.ModelProto:
    random = np.random.default_rng(seed)
    tensors = {"a.weight": (30, 40), "b.weight": (40, 2)}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "a.weight"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "b.weight"], ["y"]),
        ],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 30])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [
            numpy_helper.from_array(random.random(shape).astype(np.float32), name)
            for name, shape in tensors.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnxtrain.prepare(network(), tmp_path / "artifacts", train="lora:rank=2")
    return tmp_path / "artifacts"


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize("harm", [damage, cut], ids=["damaged", "cut"])
def test_a_damaged_base_is_refused(folder: Path, harm) -> None:
    harm(folder / "base.data")
    with pytest.raises(ModelError, match="is damaged, or belongs to other graphs"):
        onnxtrain.TrainingSession(folder)


def test_a_missing_base_is_named(folder: Path) -> None:
    (folder / "base.data").unlink()
    with pytest.raises(ModelError, match="which is not there: copy it too"):
        onnxtrain.TrainingSession(folder)


def test_the_base_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    onnxtrain.prepare(network(1), other, train="lora:rank=2")
    shutil.copy(other / "base.data", folder / "base.data")
    with pytest.raises(ModelError, match="belongs to other graphs"):
        onnxtrain.TrainingSession(folder)


def test_a_graph_in_memory_says_where_its_base_is(folder: Path) -> None:
    graphs = [(folder / f"{n}_model.onnx").read_bytes() for n in ("training", "eval")]
    with pytest.raises(OnnxTrainError, match="takes its base from the file"):
        onnxtrain.TrainingSession(folder / "checkpoint", *graphs).eval_step(X, LABELS)


def test_folders_without_factors_lose_the_base(folder: Path) -> None:
    session = onnxtrain.TrainingSession(folder)
    session.step(X, LABELS)
    onnxtrain.prepare(network(), folder)
    assert not (folder / "base.data").exists()
    assert not (folder / "inference_model.onnx").exists()
    onnxtrain.TrainingSession(folder).step(X, LABELS)
