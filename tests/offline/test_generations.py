"""The files of an artifact folder belong together: mixtures and damaged graphs are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxtrain
from graphs import linear, model, value
from onnxtrain.device.module import Module
from onnxtrain.device.optimizer import Optimizer
from onnxtrain.device.session import TrainingSession
from onnxtrain.device.state import CheckpointState
from onnxtrain.errors import ArgumentError, CheckpointError, ModelError, OnnxTrainError
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint
from onnxtrain.format.generation import PROPERTY

GRAPHS = ("training_model", "eval_model", "optimizer_model", "step_model")
FILES = ("checkpoint", *(f"{name}.onnx" for name in GRAPHS))
X = np.ones((4, 3), np.float32)
pytestmark = [  # onnxruntime's tool for the ORT format does not close files
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def scaled(scale: float) -> onnx.ModelProto:
    """The same interface each time, with other weights: nothing but the generation tells."""
    made = linear()
    for tensor in made.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor) * np.float32(scale)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("generations")
    for name, scale in (("old", 1.0), ("new", 2.0)):
        onnxtrain.prepare(
            scaled(scale), root / name, loss=None, verify=False, nominal_checkpoint=True,
            ort_format=name == "new",
        )  # fmt: skip
    return root / "old", root / "new"


def opened(folder: Path, as_bytes: bool) -> TrainingSession:
    if not as_bytes:
        return TrainingSession(folder)
    checkpoint, *graphs = ((folder / name).read_bytes() for name in FILES)
    return TrainingSession(checkpoint, *graphs)


@pytest.mark.parametrize("as_bytes", [False, True], ids=["paths", "bytes"])
@pytest.mark.parametrize("other", FILES)
def test_one_file_of_another_generation_is_refused(folders, tmp_path, other, as_bytes) -> None:
    old, new = folders
    shutil.copytree(old, tmp_path / "mixed")
    shutil.copy(new / other, tmp_path / "mixed" / other)
    with pytest.raises(CheckpointError, match=r"is of generation [0-9a-f]{8}, and .* is of") as it:
        opened(tmp_path / "mixed", as_bytes)
    assert "prepare" in str(it.value) and "state.generation = None" in str(it.value)
    if not as_bytes and other != "checkpoint":
        assert other in str(it.value)
    opened(old, as_bytes).step(X)


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_graphs_are_compared_with_each_other(folders, pair) -> None:
    """Where the checkpoint has no generation, as one of an earlier version."""
    old, new = folders
    graphs: list = [None] * 4
    graphs[pair[0]] = old / f"{GRAPHS[pair[0]]}.onnx"
    graphs[pair[1]] = new / f"{GRAPHS[pair[1]]}.onnx"
    graphs[0] = graphs[0] or without_generation(old / "training_model.onnx")
    state = CheckpointState.load_checkpoint(old / "checkpoint")
    state.generation = None
    with pytest.raises(CheckpointError, match="the other graphs are of"):
        TrainingSession(state, *graphs)


def without_generation(path: Path) -> bytes:
    proto = onnx.load(path, load_external_data=False)
    entry = next(entry for entry in proto.metadata_props if entry.key == "onnxtrain")
    about = json.loads(entry.value)
    del about["generation"]
    entry.value = json.dumps(about)
    return proto.SerializeToString()


def test_module_and_optimizer_check_it_too(folders) -> None:
    old, new = folders
    state = CheckpointState.load_checkpoint(old / "checkpoint")
    with pytest.raises(CheckpointError, match="onnx is of generation"):
        Module(new / "training_model.onnx", state)
    module = Module(old / "training_model.onnx", state)
    with pytest.raises(CheckpointError, match="onnx is of generation"):
        Optimizer(new / "optimizer_model.onnx", module)


def test_the_ort_format_has_the_generation(folders, tmp_path) -> None:
    old, new = folders
    for stem in GRAPHS:
        shutil.copy(new / f"{stem}.ort", tmp_path)
    shutil.copy(new / "checkpoint", tmp_path)
    TrainingSession(tmp_path).step(X)
    shutil.copy(old / "checkpoint", tmp_path)
    with pytest.raises(CheckpointError, match=r"training_model\.ort is of generation"):
        TrainingSession(tmp_path)
    shutil.copy(new / "checkpoint", tmp_path)
    with (tmp_path / "eval_model.ort").open("ab") as file:
        file.write(bytes(8))
    with pytest.raises(ModelError, match=r"eval_model\.ort is damaged"):
        TrainingSession(tmp_path)


@pytest.mark.parametrize("as_bytes", [False, True], ids=["paths", "bytes"])
@pytest.mark.parametrize("stem", GRAPHS)
def test_a_damaged_graph_is_refused(folders, tmp_path, stem, as_bytes) -> None:
    """A number is another one: the file is as valid as before."""
    shutil.copytree(folders[0], tmp_path / "folder")
    file = tmp_path / "folder" / f"{stem}.onnx"
    proto = onnx.load(file, load_external_data=False)
    proto.model_version = 7
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="is damaged") as it:
        opened(tmp_path / "folder", as_bytes)
    assert as_bytes or stem in str(it.value)
    # Two ways out for someone who changed it on purpose.
    state = CheckpointState.load_checkpoint(tmp_path / "folder" / "checkpoint")
    state.generation = None
    TrainingSession.from_folder(tmp_path / "folder", checkpoint=state).step(X)
    file.write_bytes(without_generation(file))
    opened(tmp_path / "folder", as_bytes).step(X)


def test_every_flipped_bit_of_a_graph_is_noticed(folders) -> None:
    """Unless it is in the metadata, whatever a bit says, the graph is not run."""
    folder = folders[0]
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    good = (folder / "eval_model.onnx").read_bytes()
    module = Module(folder / "training_model.onnx", state)
    accepted = []
    for place in range(0, len(good) * 8, 7):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        try:
            module.graph(bytes(bad))
            accepted.append(place // 8)
        except OnnxTrainError:
            pass
    # A graph without metadata of ours is taken with any checkpoint; there, nothing else is hurt.
    start = good.index(b"onnxtrain\x12") - 6
    assert set(accepted) <= set(range(start, good.index(b'"}', start)))
    assert len(accepted) < 40


def test_the_generation_goes_through_training(folders, tmp_path) -> None:
    old, new = folders
    session = TrainingSession(old)
    session.step(X)
    session.save_checkpoint(tmp_path / "saved")
    CheckpointState.save_checkpoint(session.state, tmp_path / "without", False)
    (tmp_path / "bytes").write_bytes(session.state.to_bytes(True))
    for name in ("saved", "without", "bytes"):
        resumed = TrainingSession.from_folder(old, checkpoint=tmp_path / name)
        assert resumed.state.generation == session.state.generation
        with pytest.raises(CheckpointError, match="generation"):
            TrainingSession.from_folder(new, checkpoint=tmp_path / name)
    # Those who know what they do take it along.
    state = CheckpointState.load_checkpoint(tmp_path / "saved")
    state.generation = None
    taken = TrainingSession.from_folder(new, checkpoint=state)
    taken.step(X)
    assert taken.optimizer.step_count == 2
    taken.save_checkpoint(tmp_path / "free")
    assert CheckpointState.load_checkpoint(tmp_path / "free").generation is None
    TrainingSession.from_folder(new, checkpoint=tmp_path / "free")
    with pytest.raises(ArgumentError, match="None"):
        state.generation = "0" * 32


def test_a_nominal_checkpoint_has_it(folders) -> None:
    old, new = folders
    session = TrainingSession.from_folder(old, checkpoint=old / "nominal_checkpoint")
    assert session.state.generation == TrainingSession(old).state.generation
    with pytest.raises(CheckpointError, match="generation"):
        TrainingSession.from_folder(new, checkpoint=old / "nominal_checkpoint")


def test_files_of_earlier_versions_are_taken(folders, tmp_path) -> None:
    """Neither their graphs nor their checkpoints have a generation."""
    old, new = folders
    content = read_checkpoint(new / "checkpoint")
    content.properties.clear()
    write_checkpoint(tmp_path / "checkpoint", content, sort=False)
    TrainingSession.from_folder(old, checkpoint=tmp_path / "checkpoint").step(X)
    graphs = [without_generation(new / f"{stem}.onnx") for stem in GRAPHS]
    TrainingSession(old / "checkpoint", *graphs).step(X)


def test_equal_input_gives_equal_files(folders, tmp_path) -> None:
    old, _ = folders
    onnxtrain.prepare(scaled(1.0), tmp_path, loss=None, nominal_checkpoint=True)
    for file in old.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_what_a_new_generation_lacks_is_removed(folders, tmp_path) -> None:
    folder = shutil.copytree(folders[1], tmp_path / "folder")
    for name in ("trained", "notes.txt", "other_checkpoint"):
        (folder / name).touch()
    onnxtrain.prepare(linear(), folder, loss=None, optimizer=None)
    expected = {"checkpoint", "training_model.onnx", "eval_model.onnx"}
    bystanders = {"trained", "notes.txt", "other_checkpoint"}
    assert {file.name for file in folder.iterdir()} == expected | bystanders
    TrainingSession(folder).train_step(X)


def test_a_prefix_that_names_a_folder(tmp_path) -> None:
    made = onnxtrain.prepare(linear(), tmp_path, loss=None, prefix="inner/m_")
    assert "inner/m_checkpoint" in made.files
    assert all((tmp_path / name).is_file() for name in made.files)
    TrainingSession.from_folder(tmp_path, "inner/m_").step(X)
    assert not [file for file in tmp_path.rglob(".*")]


def with_frozen(scale: float) -> onnx.ModelProto:
    """y = (x table) w, with a frozen table that is in the checkpoint alone."""
    table = np.full((3, 30), scale, np.float32)
    return model(
        [
            helper.make_node("MatMul", ["x", "table"], ["h"]),
            helper.make_node("MatMul", ["h", "w"], ["y"]),
            helper.make_node("ReduceMean", ["y"], ["loss"], keepdims=0),
        ],
        [value("x", ["batch", 3])],
        [value("loss", []), value("y", ["batch", 2])],
        {"table": table, "w": np.full((30, 2), 0.5, np.float32)},
    )


def test_frozen_weights_come_from_the_checkpoint_by_name(tmp_path) -> None:
    """A trained state that is saved over the folder's checkpoint has another layout."""
    onnxtrain.prepare(with_frozen(3.0), tmp_path / "a", loss=None, train="w")
    onnxtrain.prepare(with_frozen(5.0), tmp_path / "b", loss=None, train="w")
    session = TrainingSession(tmp_path / "a")
    expected = session.eval_step(X)
    session.add_property("note", "x" * 1000)
    session.save_checkpoint(tmp_path / "a" / "checkpoint")
    again = TrainingSession(tmp_path / "a")
    for made, wanted in zip(again.eval_step(X), expected, strict=True):
        np.testing.assert_array_equal(made, wanted)
    shutil.copy(tmp_path / "b" / "checkpoint", tmp_path / "a" / "checkpoint")
    with pytest.raises(CheckpointError, match="generation"):
        TrainingSession(tmp_path / "a")


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"id": "x", "files": {}}', '{"id": 3, "files": []}', "[" * 10**5],
)
def test_a_damaged_record(folders, tmp_path, text) -> None:
    content = read_checkpoint(folders[0] / "checkpoint")
    content.properties[f"__onnxtrain__.{PROPERTY}"] = text
    write_checkpoint(tmp_path / "c", content)
    with pytest.raises(CheckpointError, match="damaged record of the graphs"):
        CheckpointState.load_checkpoint(tmp_path / "c")
