"""Writers of one file at once, litter of the dead, and processes that stop: nothing is lost."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_checkpoint_store as checkpoints
import test_export_store as exports

from onnxtrain.errors import CheckpointError, OnnxTrainError
from onnxtrain.federated.files import replace_file
from onnxtrain.format import folder_lock
from onnxtrain.format.replace_file import NewFiles, leftovers_of, temporary_for

MARK = "0123456789abcdef"


def _save_often(folder: str, kind: str, number: int, count: int) -> None:
    for round in range(count):
        scale = float(10 * number + round % 5)
        if kind == "checkpoint":
            # Now and then without external data, as a model that shrinks.
            threshold = checkpoints.INLINE if round % 7 == 6 else checkpoints.EXTERNAL
            checkpoints.save(Path(folder, "c"), scale, threshold)
        else:
            exports.save(Path(folder, "m.onnx"), scale, 2**40 if round % 7 == 6 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_bursts_of_writers_and_a_reader(tmp_path, kind) -> None:
    """With external data, which two files hold: what is read is always of one writer."""
    _save_often(str(tmp_path), kind, 0, 1)
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_save_often, args=(str(tmp_path), kind, number, 40))
        for number in range(1, 4)
    ]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if kind == "checkpoint":
            seen.add(checkpoints.scale_of(tmp_path / "c") // 10)
        else:
            time.sleep(0.01)  # onnxruntime reads two files, without knowing of our lock
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    name, scale_of = {
        "checkpoint": ("c", checkpoints.scale_of),
        "export": ("m.onnx", exports.scale_of),
    }[kind]
    assert scale_of(tmp_path / name) // 10 in (1, 2, 3)
    assert len(seen) > 1 or kind == "export"
    assert set(os.listdir(tmp_path)) <= {name, f"{name}.data"}


LEAVE = {
    "checkpoint": (checkpoints.save, "c", [f".c.{MARK}.tmp", f"c.data.{MARK}"]),
    "export": (exports.save, "m.onnx", [f".m.onnx.{MARK}.tmp", f"m.onnx.data.{MARK}"]),
    "state": (lambda path, _: replace_file(path, b"state"), "s.npz", [f".s.npz.{MARK}.tmp"]),
}


@pytest.mark.parametrize("kind", LEAVE)
def test_a_full_disk_frees_itself(tmp_path, monkeypatch, kind) -> None:
    """Litter is removed although nothing can be written."""
    save, name, leftovers = LEAVE[kind]
    for litter in leftovers:
        (tmp_path / litter).write_bytes(bytes(1000))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        with pytest.raises(OnnxTrainError, match="No space left"):
            save(tmp_path / name, 1.0)
    assert os.listdir(tmp_path) == []
    save(tmp_path / name, 1.0)
    assert set(os.listdir(tmp_path)) <= {name, f"{name}.data"}


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_files_of_a_live_writer_stay(tmp_path) -> None:
    path = tmp_path / "s.npz"
    temporary = temporary_for(path)
    with NewFiles(tmp_path, leftovers_of(path)) as new:
        new.write(temporary, lambda file: file.write(b"slow"), path)
        replace_file(path, b"fast")
        assert temporary.read_bytes() == b"slow"
        with new.committing():
            os.replace(temporary, path)
    assert path.read_bytes() == b"slow" and os.listdir(tmp_path) == [path.name]


WRITE_AND_WAIT = """
import sys, time
from pathlib import Path
from onnxtrain.format.replace_file import NewFiles, leftovers_of, temporary_for
path = Path(sys.argv[1])
with NewFiles(path.parent, leftovers_of(path)) as new:
    new.write(temporary_for(path), lambda file: file.write(b"x"), path)
    if len(sys.argv) > 2:
        with new.committing():
            print("ready", flush=True)
            time.sleep(60)
    print("ready", flush=True)
    time.sleep(60)
"""


def started(path: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITE_AND_WAIT, str(path), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


@pytest.mark.skipif(os.name == "nt", reason="needs SIGSTOP")
def test_a_stopped_process(tmp_path, monkeypatch) -> None:
    """While it writes it is in nobody's way; while it commits others wait, but not for ever."""
    path = tmp_path / "c"
    writing = started(path)
    try:
        writing.send_signal(signal.SIGSTOP)
        checkpoints.save(path, 1.0)
        assert len(os.listdir(tmp_path)) == 3  # the stopped one may go on
    finally:
        end(writing)
    checkpoints.save(path, 2.0)
    assert sorted(os.listdir(tmp_path)) == ["c", "c.data"]
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.2)
    committing = started(path, "commit")
    try:
        committing.send_signal(signal.SIGSTOP)
        with pytest.raises(CheckpointError, match=r"cannot write .*it may be stopped"):
            checkpoints.save(path, 3.0)
        assert checkpoints.scale_of(path) == 2
    finally:
        end(committing)
    checkpoints.save(path, 3.0)
    assert checkpoints.scale_of(path) == 3 and sorted(os.listdir(tmp_path)) == ["c", "c.data"]


def test_litter_that_is_no_file_is_left_alone(tmp_path) -> None:
    """A pipe would keep whoever opens it waiting; a link leads elsewhere."""
    (tmp_path / f".c.{MARK}.tmp").mkdir()
    other = tmp_path / "other"
    other.touch()
    (tmp_path / f"c.data.{MARK}").symlink_to(other)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / ".c.fedcba9876543210.tmp")
    before = set(os.listdir(tmp_path))
    checkpoints.save(tmp_path / "c", 1.0)
    assert set(os.listdir(tmp_path)) == before | {"c", "c.data"}


def test_a_checkpoint_that_cannot_be_opened_keeps_its_data(tmp_path, monkeypatch) -> None:
    """With too many open files, the state of an interrupted save is not taken for litter."""
    checkpoints.save(tmp_path / "c", 1.0)
    identifier = (tmp_path / "c.data").read_bytes()[-16:].decode()
    (tmp_path / "c.data").rename(tmp_path / f"c.data.{identifier}")
    assert checkpoints.scale_of(tmp_path / "c") == 1
    from onnxtrain.format.checkpoint import file, store

    def refused(path: Path) -> None:
        with store.translated("read", path):
            raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(file.disk, "open_file", refused)
        with pytest.raises(CheckpointError, match="Too many open files"):
            checkpoints.save(tmp_path / "c", 2.0)
    assert checkpoints.scale_of(tmp_path / "c") == 1


def test_locks_are_released_however_a_save_ends(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _no_space)
        with pytest.raises(CheckpointError):
            checkpoints.save(tmp_path / "c", 1.0)
    open_before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for scale in (1.0, 2.0):
        checkpoints.save(tmp_path / "c", scale)
    if open_before:
        assert len(os.listdir("/proc/self/fd")) == open_before
