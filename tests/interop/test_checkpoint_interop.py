"""Checkpoints go both ways between onnxtrain and ONNX Runtime's own training package, 1.19.2.

That package lives in an environment of its own, which `make test` sets up.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.format.checkpoint.content import CheckpointContent, OptimizerGroup, merge_properties
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get(
    "ONNXTRAIN_UPSTREAM_PYTHON", str(HERE.parents[1] / ".venv-upstream" / "bin" / "python")
)
pytestmark = pytest.mark.skipif(
    not Path(PYTHON).exists(),
    reason=f"no environment with onnxruntime-training-cpu at {PYTHON}; `make test` sets it up",
)


def upstream(command: str, *arguments: object):
    """Run a command of `upstream_program.py` and return its answer."""
    result = subprocess.run(
        [PYTHON, str(HERE / "upstream_program.py"), command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """The folder with artifacts that ONNX Runtime made, and the weights of the model."""
    folder = tmp_path_factory.mktemp("artifacts")
    return folder, upstream("generate", folder)


@pytest.fixture(scope="module")
def trained(artifacts):
    """A checkpoint that ONNX Runtime saved after three steps, and what it said of it."""
    folder, _ = artifacts
    answer = upstream("train", folder, "checkpoint", 3, "trained")
    return folder / "trained", answer


def test_we_read_what_it_generates(artifacts) -> None:
    folder, weights = artifacts
    content = read_checkpoint(folder / "checkpoint")
    assert (list(content.trainable), list(content.frozen)) == (["w1", "b1", "w2"], ["scale"])
    for name, value in {**content.trainable, **content.frozen}.items():
        assert isinstance(value, np.ndarray) and value.tolist() == weights[name]
    nominal = read_checkpoint(folder / "nominal_checkpoint")
    assert nominal.nominal and list(nominal.trainable) == list(content.trainable)


def test_we_read_what_it_saves(trained) -> None:
    path, answer = trained
    content = read_checkpoint(path)
    for name, value in answer["trained"].items():
        assert content.trainable[name].tolist() == value
    assert content.properties == {
        "steps": 3,
        "last loss": float(np.float32(answer["losses"][-1])),
        "note": "trié",
    }
    group = content.optimizer_groups["group0"]
    assert group.step == 3
    assert {name: len(moments) for name, moments in group.states.items()} == {
        "b1": 2,
        "w1": 2,
        "w2": 2,
    }


@pytest.mark.parametrize("threshold", [2**40, 0], ids=["inline", "external"])
def test_it_resumes_from_what_we_save_as_from_its_own(trained, threshold) -> None:
    path, _ = trained
    content = read_checkpoint(path)
    content.properties = merge_properties(content.properties, {"learning_rate": 0.01})
    ours = f"ours-{threshold}"
    write_checkpoint(path.with_name(ours), content, external_data_threshold=threshold)
    own = upstream("train", path.parent, "trained", 4, f"{ours}.a")
    resumed = upstream("train", path.parent, ours, 4, f"{ours}.b")
    assert resumed == own
    a, b = (read_checkpoint(path.with_name(f"{ours}.{which}")) for which in "ab")
    assert a.optimizer_groups["group0"].step == b.optimizer_groups["group0"].step == 7
    for name, moments in a.optimizer_groups["group0"].states.items():
        for one, other in zip(moments, b.optimizer_groups["group0"].states[name], strict=True):
            assert one.tobytes() == other.tobytes()
    # What ONNX Runtime knows nothing of passes through it.
    assert b.properties["__onnxtrain__.learning_rate"] == float(np.float32(0.01))
    assert b.has_external_data == (threshold == 0)


@pytest.mark.parametrize("threshold", [2**40, 0], ids=["inline", "external"])
def test_every_type_and_many_tensors_pass_through_it(tmp_path, threshold) -> None:
    rng = np.random.default_rng(0)
    # It does not load float16 and what is narrower, nor complex numbers and strings.
    types = "f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 ?".split()
    frozen = {
        f"{name} {dims}": rng.integers(0, 2, dims).astype(name)
        for name in types
        for dims in [(), (1,), (3, 5), (0, 2), (9, 8)]
    }
    frozen |= {f"{i}." + "é" * (i % 50): np.full(i % 40, i, np.float32) for i in range(900)}
    content = CheckpointContent(
        trainable={"w": rng.standard_normal((4, 8)).astype(np.float32)},
        frozen=frozen,
        properties={"i": -(2**63), "f": 0.1, "s": "ü" * 100, "zero": 0, "none": 0.0, "empty": ""},
    )
    write_checkpoint(tmp_path / "ours", content, external_data_threshold=threshold)
    described = upstream("describe", tmp_path / "ours", *content.properties)
    assert described["properties"] == {**content.properties, "f": float(np.float32(0.1))}
    assert described["parameters"].keys() == frozen.keys() | {"w"}
    assert described["parameters"]["w"] == [True, content.trainable["w"].tolist()]
    assert described["parameters"]["f4 (9, 8)"] == [False, frozen["f4 (9, 8)"].tolist()]
    upstream("resave", tmp_path / "ours", tmp_path / "theirs")
    back = read_checkpoint(tmp_path / "theirs")
    assert back.has_external_data == (threshold == 0)
    assert back.properties == described["properties"]
    assert back.frozen.keys() == frozen.keys()
    for name, value in frozen.items():
        assert back.frozen[name].dtype == value.dtype and back.frozen[name].shape == value.shape
        assert back.frozen[name].tobytes() == value.tobytes(), name


def test_it_trains_from_our_nominal_checkpoint(artifacts) -> None:
    folder, _ = artifacts
    content = read_checkpoint(folder / "checkpoint")
    content.nominal = True
    write_checkpoint(folder / "our_nominal", content, sort=False)
    ours = upstream("train_nominal", folder, "our_nominal", "checkpoint")
    theirs = upstream("train_nominal", folder, "nominal_checkpoint", "checkpoint")
    assert ours == theirs and ours["loss"] == ours["full"]


def test_it_tells_a_missing_or_foreign_file(tmp_path) -> None:
    """After a crash between two renames it finds no data, which is an error, not other numbers."""
    content = CheckpointContent(
        trainable={"w": np.ones(100, np.float32)},
        optimizer_groups={"group0": OptimizerGroup()},
        has_external_data=True,
    )
    write_checkpoint(tmp_path / "c", content)
    assert upstream("refuse", tmp_path / "c")["error"] is None
    (tmp_path / "c.data").rename(tmp_path / "c.data.old")
    assert "c.data" in upstream("refuse", tmp_path / "c")["error"]
    assert read_checkpoint(tmp_path / "c").trainable["w"].sum() == 100
