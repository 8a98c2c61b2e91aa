"""Whatever happens while a model is exported, the old one or the new one is there afterwards."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from die_at_every_step import die_at_every_step
from onnx_bytes import FLOAT, graph, model, node, value

from onnxtrain.device.export.inference_model import export_model
from onnxtrain.device.export.layout import Chunks
from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.model.file import ModelFile

HERE = Path(__file__).resolve().parent


def save(path: Path, scale: float, threshold: int = 0) -> None:
    """A model with the weights `scale`."""
    values = {"p": np.full(32, scale, np.float32), "q": np.full(2, scale, np.float32)}
    inputs = [value(name, FLOAT, [len(array)]) for name, array in values.items()]
    body = graph([node("Concat", ["p", "q"], ["y"], axis=0)], inputs, [value("y", FLOAT, [34])])
    read = ModelFile.read(model(body))
    export_model(read, ["y"], values, path, external_data_threshold=threshold)


def scale_of(path: Path) -> float:
    """Which of the models `save` wrote is there; it must be whole."""
    assert all(file.stat().st_nlink == 1 for file in path.parent.iterdir())
    found = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {})[0]
    assert (found == found[0]).all()
    return float(found[0])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("before", [0, 2**40], ids=["external", "inside"])
@pytest.mark.parametrize("after", [0, 2**40], ids=["external", "inside"])
def test_a_crash_at_any_step_leaves_the_old_or_the_new(tmp_path, before, after) -> None:
    lines = die_at_every_step(__name__, tmp_path / "folder", "m.onnx", before, after)
    found = [line[0] for line in lines]
    assert found == sorted(found) and set(found) == {1.0, 2.0}
    assert all(line[1] == 3.0 for line in lines)
    assert len(lines) > (6 if after == 0 else 3)
    expected = ["m.onnx", "m.onnx.data"] if after == 0 else ["m.onnx"]
    assert [line[2] for line in lines if line[2] != expected] == []


@pytest.mark.parametrize("threshold", [0, 2**40], ids=["external", "inside"])
@pytest.mark.parametrize("call", ["replace", "fsync", "open", "link", "chmod", "unlink"])
def test_an_error_leaves_the_old_or_the_new(tmp_path, monkeypatch, threshold, call) -> None:
    path = tmp_path / "m.onnx"
    for limit in range(1, 20):
        for file in tmp_path.iterdir():
            file.unlink()
        save(path, 1.0)
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        calls = 0
        original = getattr(os, call)

        def failing(*arguments, original=original, limit=limit, **keywords):
            nonlocal calls
            calls += 1
            if calls == limit:
                raise OSError(errno.EACCES, "Permission denied")
            return original(*arguments, **keywords)

        failed = False
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                save(path, 2.0, threshold)
            except OnnxTrainError as error:
                failed = True
                assert "Permission denied" in str(error) and str(path) in str(error)
        if failed:
            assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
        assert scale_of(path) == (1.0 if failed else 2.0)
        if calls < limit:
            break
    else:
        pytest.fail("the call never stopped failing")


DISK_FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_export_store as t
from onnxtrain.errors import OnnxTrainError
for limit in (0, 100):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        t.save(Path(sys.argv[2]), 2.0, int(sys.argv[3]))
    except OnnxTrainError as error:
        assert "disk is full" in str(error) and "nothing was changed" in str(error), error
    else:
        sys.exit("no error")
"""


@pytest.mark.parametrize("threshold", [0, 2**40], ids=["external", "inside"])
def test_a_full_disk(tmp_path, threshold) -> None:
    """A limit on the size of files stands for a full disk."""
    pytest.importorskip("resource", reason="limits on files are set by Unix alone")
    path = tmp_path / "m.onnx"
    save(path, 1.0, threshold)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    arguments = [str(HERE), str(path), str(threshold)]
    subprocess.run([sys.executable, "-c", DISK_FULL, *arguments], check=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_leftovers_of_killed_processes_are_removed_before_writing(tmp_path) -> None:
    mark = "0123456789abcdef"
    leftovers = [f".m.onnx.{mark}.tmp", f".m.onnx.data.{mark}.tmp", f"m.onnx.data.{mark}"]
    bystanders = ["m.onnx.data.mine", f".n.onnx.{mark}.tmp", f"mXonnx.data.{mark}"]
    for name in [*leftovers, *bystanders]:
        (tmp_path / name).touch()
    save(tmp_path / "m.onnx", 1.0)
    assert sorted(os.listdir(tmp_path)) == sorted([*bystanders, "m.onnx", "m.onnx.data"])


def test_what_earlier_versions_left_is_readable_again(tmp_path) -> None:
    """They linked the data to their last name; killed then, they left two names of one file."""
    path, data = tmp_path / "m.onnx", tmp_path / "m.onnx.data"
    save(path, 1.0)
    staged = tmp_path / "m.onnx.data.0123456789abcdef"
    os.link(data, staged)  # killed before the last step
    hits = path.read_bytes()
    with pytest.raises(Exception, match="hard link"):
        onnx.load(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        with pytest.raises(OnnxTrainError):
            save(path, 2.0)
    assert scale_of(path) == 1 and onnx.load(path) is not None
    assert path.read_bytes() == hits and sorted(os.listdir(tmp_path)) == [path.name, data.name]


def _no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_data_that_the_model_refers_to_are_no_leftovers(tmp_path) -> None:
    """A disk without room for the second copy leaves the first name in use."""
    path, writes = tmp_path / "m.onnx", []
    write = Chunks.write

    def full(chunks, file):
        writes.append(file.name)
        if file.name.endswith(".tmp") and ".onnx.data." in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(chunks, file)

    for scale in (1.0, 2.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Chunks, "write", full)
            save(path, scale)
        first, second = sorted(os.listdir(tmp_path))
        assert first == "m.onnx" and second.startswith("m.onnx.data.")
        assert scale_of(path) == scale and onnx.load(path) is not None
    save(path, 3.0)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"] and scale_of(path) == 3
    save(path, 4.0, 2**40)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx"] and scale_of(path) == 4
