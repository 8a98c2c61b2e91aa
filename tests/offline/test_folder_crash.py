"""Whatever happens while artifacts are written, the folder holds the old ones or the new ones."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import onnxtrain
from graphs import linear
from onnxtrain.cli import main
from onnxtrain.device.module import Module
from onnxtrain.device.session import TrainingSession
from onnxtrain.device.state import CheckpointState
from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.federated.bundle import open_artifacts
from onnxtrain.format import folder_lock
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint
from onnxtrain.format.committed_folder import COMMITTED
from onnxtrain.format.model.file import ModelFile
from onnxtrain.offline.writer.folder import Folder
from test_generations import scaled

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden" / "mlp" / "checkpoint"


@cache
def artifacts(scale: float, has_optimizer: bool) -> dict[str, bytes]:
    """The files that `prepare` writes, for weights times `scale`."""
    with tempfile.TemporaryDirectory() as folder:
        optimizer = "adamw" if has_optimizer else None
        onnxtrain.prepare(scaled(scale), folder, loss=None, optimizer=optimizer, verify=False)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def save(path: Path, scale: float, threshold: int = 0) -> None:
    """Write them as `prepare` does; a threshold leaves out the optimizer."""
    made = {number: artifacts(number, threshold == 0) for number in (1.0, 2.0, 3.0)}
    with Folder(path, "") as folder:
        for name, content in made[scale].items():
            folder.file(name).write_bytes(content)
        folder.publish()


def scale_of(path: Path) -> float:
    """Which of the artifacts are there; they must be whole."""
    session = TrainingSession(path)
    assert (session.optimizer is None) == (not (path / "step_model.onnx").exists())
    base = np.frombuffer(linear().graph.initializer[0].raw_data, np.float32)[0]
    return round(float(session.get_parameter("w").flat[0] / base), 3)


def die(folder: Path, *thresholds: int) -> list:
    program = HERE.parent / "device" / "die_at_every_step.py"
    result = subprocess.run(
        [sys.executable, str(program), Path(__file__).stem, str(folder), "out",
         *map(str, thresholds)],
        capture_output=True, text=True, timeout=500,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


FILES = [f"out/{name}" for name in sorted([
    "checkpoint", "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx",
    "step_model.onnx",
])]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (0, 1)])
def test_a_crash_at_any_step_leaves_the_old_or_the_new(tmp_path, before, after) -> None:
    lines = die(tmp_path / "folder", before, after)
    found = [line[0] for line in lines]
    assert found == sorted(found) and set(found) == {1.0, 2.0}
    assert all(line[1] == 3.0 for line in lines)
    without = {"out/optimizer_model.onnx", "out/step_model.onnx"} if after else set()
    expected = ["out", *(file for file in FILES if file not in without)]
    assert [line[2] for line in lines if line[2] != expected] == []
    assert len(lines) > 30


SAVE_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_folder_crash as t
t.save(Path(sys.argv[2]), 1.0)
print("ready", flush=True)
while True:
    for scale in (1.0, 2.0, 3.0):
        t.save(Path(sys.argv[2]), scale)
"""


def writer(path: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(HERE), str(path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    return process


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_readers_and_writers_at_once_and_a_kill(tmp_path) -> None:
    """A reader finds one generation each time, whoever writes or dies."""
    save(tmp_path, 1.0)
    writers = [writer(tmp_path) for _ in range(2)]
    seen = set()
    try:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            seen.add(scale_of(tmp_path))
            graphs = open_artifacts(tmp_path).graphs.values()
            assert len({ModelFile.read(graph).metadata.generation for graph in graphs}) == 1
    finally:
        for process in writers:
            end(process)
    assert seen == {1.0, 2.0, 3.0}
    assert scale_of(tmp_path) in (1.0, 2.0, 3.0)
    assert sorted(os.listdir(tmp_path)) == sorted(artifacts(1.0, True))


@pytest.mark.slow
def test_a_process_killed_at_random_moments(tmp_path) -> None:
    save(tmp_path, 1.0)
    rng = random.Random(0)
    for _ in range(2):
        process = writer(tmp_path)
        time.sleep(rng.uniform(0.0, 0.05))
        end(process)
        assert scale_of(tmp_path) in (1.0, 2.0, 3.0)
        assert sorted(os.listdir(tmp_path)) == sorted(artifacts(1.0, True))


def test_an_error_after_the_commit_loses_nothing(tmp_path, monkeypatch) -> None:
    """The new artifacts are whole, wherever they are; the next program puts them into place."""
    save(tmp_path, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", _no_space)
        with pytest.raises(OnnxTrainError, match="goes on with it"):
            save(tmp_path, 2.0)
    assert (tmp_path / COMMITTED).is_dir()
    assert scale_of(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == sorted(artifacts(2.0, True))


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def unfinished(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a folder as a process does that dies right after the commit."""
    save(path, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", _no_space)
        with pytest.raises(OnnxTrainError):
            save(path, 2.0)


def paths_of(folder: Path) -> list[Path]:
    names = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx")
    return [folder / name for name in ("checkpoint", *names)]


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: TrainingSession(folder),
        lambda folder: TrainingSession.from_folder(folder),
        lambda folder: TrainingSession(*paths_of(folder)),
        lambda folder: open_artifacts(folder).session(),
        lambda folder: Module(
            folder / "training_model.onnx",
            CheckpointState.load_checkpoint(folder / "checkpoint"),
        ),
        lambda folder: main(["checkpoint", "show", str(folder)]),
        lambda folder: save(folder, 2.0),
        lambda folder: write_checkpoint(folder / "saved", read_checkpoint(GOLDEN)),
    ],
    ids=["session", "folder", "files", "bundle", "module", "cli", "prepare", "save"],
)
def test_whoever_comes_next_finishes_it(tmp_path, monkeypatch, read, capsys) -> None:
    unfinished(tmp_path, monkeypatch)
    read(tmp_path)
    assert sorted({*os.listdir(tmp_path)} - {"saved"}) == sorted(artifacts(2.0, True))
    assert scale_of(tmp_path) == 2


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_finished(tmp_path, monkeypatch) -> None:
    unfinished(tmp_path, monkeypatch)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ModelError, match="cannot be done now"):
            TrainingSession(tmp_path)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    "listed",
    ["", "[]", "{}", '{"files": ["../x"], "remove": []}', '{"files": [], "remove": ["notes.txt"]}',
     '{"files": ["a/checkpoint"], "remove": []}', '{"files": [3], "remove": []}'],
)  # fmt: skip
def test_a_list_that_is_not_ours_moves_and_removes_nothing(tmp_path, listed) -> None:
    save(tmp_path, 1.0)
    (tmp_path / "notes.txt").touch()
    (tmp_path / COMMITTED).mkdir()
    (tmp_path / COMMITTED / "files.json").write_text(listed)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ModelError, match="damaged"):
        TrainingSession(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_the_place_of_a_committed_folder_is_refused(tmp_path) -> None:
    save(tmp_path / "out", 1.0)
    save(tmp_path / "other", 2.0)
    (tmp_path / "out" / COMMITTED).symlink_to(tmp_path / "other")
    with pytest.raises(ModelError, match="is not a folder"):
        TrainingSession(tmp_path / "out")


# ---- litter --------------------------------------------------------------------------------------


def test_the_folder_of_a_dead_process_is_removed_and_that_of_a_live_one_is_not(tmp_path) -> None:
    save(tmp_path, 1.0)
    dead, old = tmp_path / ".onnxtrain-0123456789abcdef", tmp_path / ".onnxtrain-ab_12xyz"
    for folder in (dead, old):
        folder.mkdir()
        (folder / "checkpoint").write_bytes(bytes(100))
    (dead / "owner").touch()
    bystander = tmp_path / ".onnxtrain-mine"
    bystander.mkdir()
    with Folder(tmp_path, "") as live:
        live.file("checkpoint").write_bytes(b"x")
        assert not dead.exists() and not old.exists() and bystander.exists()
        save(tmp_path, 2.0)
        TrainingSession(tmp_path)
        assert live.file("checkpoint").read_bytes() == b"x"
    assert sorted(os.listdir(tmp_path)) == sorted([bystander.name, *artifacts(2.0, True)])


def test_litter_is_removed_before_a_full_disk_is_written_to(tmp_path) -> None:
    """The first thing that the next process does frees the space."""
    save(tmp_path, 1.0)
    litter = tmp_path / ".onnxtrain-0123456789abcdef"
    litter.mkdir()
    (litter / "checkpoint").write_bytes(bytes(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", _no_space)
        with pytest.raises(OnnxTrainError, match=r"No space left.*nothing was changed"):
            save(tmp_path, 2.0)
    assert scale_of(tmp_path) == 1
    assert sorted(os.listdir(tmp_path)) == sorted(artifacts(1.0, True))


# ---- a stopped process ---------------------------------------------------------------------------


HOLD = """
import sys, time
from pathlib import Path
from onnxtrain.format.folder_lock import changing
with changing(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs SIGSTOP")
def test_a_stopped_writer_does_not_block_others_for_ever(tmp_path, monkeypatch) -> None:
    save(tmp_path, 1.0)
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.3)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(OnnxTrainError, match="locked for 0 seconds; it may be stopped"):
            save(tmp_path, 2.0)
        assert scale_of(tmp_path) == 1  # readers need not wait
    finally:
        end(holder)
    save(tmp_path, 2.0)
    assert scale_of(tmp_path) == 2


def test_threads_of_one_process_take_turns(tmp_path) -> None:
    save(tmp_path, 1.0)
    failures = []

    def work(scale: float) -> None:
        try:
            for _ in range(5):
                save(tmp_path, scale)
                scale_of(tmp_path)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(os.listdir(tmp_path)) == sorted(artifacts(1.0, True))


def test_a_file_system_without_locks(tmp_path, monkeypatch) -> None:
    """Writing works as well; what is left behind is told by its age."""
    monkeypatch.setattr(folder_lock, "_take", _no_locks)
    save(tmp_path, 1.0)
    litter = tmp_path / ".onnxtrain-0123456789abcdef"
    litter.mkdir()
    save(tmp_path, 2.0)
    assert litter.exists() and scale_of(tmp_path) == 2
    os.utime(litter, (0, 0))
    save(tmp_path, 3.0)
    assert not litter.exists() and scale_of(tmp_path) == 3


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOTSUP, "Operation not supported")
