"""Whatever happens while a checkpoint is saved, a whole one can be read afterwards."""

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import GOLDEN, a_training_state, as_plain_data, without_checksum
from die_at_every_step import die_at_every_step

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint import store as checkpoint_store
from onnxtrain.format.checkpoint.content import CheckpointContent
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint

HERE = Path(__file__).resolve().parent
EXTERNAL, INLINE = 0, 2**40


def save(path: Path, scale: float, threshold: int = EXTERNAL) -> None:
    write_checkpoint(path, a_training_state(scale, 40), external_data_threshold=threshold)


def scale_of(path: Path) -> float:
    """Which of the states `save` wrote is in the file; it must be whole."""
    content = read_checkpoint(path)
    scale = float(content.trainable["b"][0])
    wanted = a_training_state(scale, 40)
    np.testing.assert_array_equal(content.trainable["w"], wanted.trainable["w"])
    np.testing.assert_array_equal(content.frozen["table"], wanted.frozen["table"])
    moments = content.optimizer_groups["group0"].states["w"]
    np.testing.assert_array_equal(moments[1], wanted.trainable["w"] * 3)
    return scale


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("before", [EXTERNAL, INLINE], ids=["external", "inline"])
@pytest.mark.parametrize("after", [EXTERNAL, INLINE], ids=["external", "inline"])
def test_a_crash_at_any_step_leaves_the_old_or_the_new(tmp_path, before, after) -> None:
    lines = die_at_every_step(__name__, tmp_path / "folder", "c", before, after)
    # First the old one, from some step on the new one, and nothing else in between.
    found = [line[0] for line in lines]
    assert found == sorted(found) and set(found) == {1.0, 2.0}
    assert all(line[1] == 3.0 for line in lines)
    expected = ["c", "c.data"] if after == EXTERNAL else ["c"]
    assert all(line[2] == expected for line in lines)
    assert len(lines) > (6 if after == EXTERNAL else 3)


SAVE_FOR_EVER = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_checkpoint_store as t
print("ready", flush=True)
for i in itertools.count(2):
    t.save(Path(sys.argv[2]), float(i), (t.EXTERNAL, t.INLINE)[i % 7 == 0])
"""


@pytest.mark.slow
def test_a_process_killed_at_random_moments(tmp_path) -> None:
    path = tmp_path / "c"
    save(path, 1.0)
    rng = random.Random(0)
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(HERE), str(path)], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(rng.uniform(0.01, 0.2))
        finally:
            process.kill()
            process.communicate()
        assert scale_of(path) > 1


def test_reading_while_another_saves(tmp_path) -> None:
    path = tmp_path / "c"
    save(path, 1.0)
    stop = threading.Event()

    def write() -> None:
        scale = 2.0
        while not stop.is_set():
            save(path, scale)
            scale += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        deadline = time.monotonic() + 1
        seen = 1.0
        while time.monotonic() < deadline:
            now = scale_of(path)
            assert now >= seen  # what was saved never goes back
            seen = now
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("threshold", [EXTERNAL, INLINE], ids=["external", "inline"])
@pytest.mark.parametrize("call", ["replace", "fsync", "open"])
def test_an_error_leaves_everything_as_it_was(tmp_path, monkeypatch, threshold, call) -> None:
    path = tmp_path / "c"
    save(path, 1.0, EXTERNAL)
    before = sorted(os.listdir(tmp_path))
    # Until a save is through, let each call in turn fail.
    for limit in range(1, 20):
        calls = 0
        original = getattr(os, call)

        def failing(*arguments, original=original, limit=limit, **keywords):
            nonlocal calls
            calls += 1
            if calls == limit:
                raise PermissionError(errno.EACCES, "Permission denied")
            return original(*arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                save(path, 2.0, threshold)
            except CheckpointError as error:
                assert "Permission denied" in str(error) and str(path) in str(error)
        scale = scale_of(path)
        if calls < limit:
            break
        if scale == 1:
            assert sorted(os.listdir(tmp_path)) == before
        save(path, 1.0, EXTERNAL)
        assert sorted(os.listdir(tmp_path)) == before
    else:
        pytest.fail("the call never stopped failing")
    assert scale == 2


DISK_FULL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_checkpoint_store as t
from onnxtrain.errors import CheckpointError
for limit in (0, 100, 1000, 1500):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        t.save(Path(sys.argv[2]), 2.0, int(sys.argv[3]))
    except CheckpointError as error:
        assert "disk is full" in str(error), error
    else:
        sys.exit("no error")
"""


@pytest.mark.parametrize("threshold", [EXTERNAL, INLINE], ids=["external", "inline"])
def test_a_full_disk(tmp_path, threshold) -> None:
    """A limit on the size of files stands for a full disk."""
    pytest.importorskip("resource", reason="limits on files are set by Unix alone")
    path = tmp_path / "c"
    save(path, 1.0, threshold)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    arguments = [str(HERE), str(path), str(threshold)]
    subprocess.run([sys.executable, "-c", DISK_FULL, *arguments], check=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_places_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in ("missing/c", "file/c", "folder"):
        with pytest.raises(CheckpointError, match="cannot write"):
            save(tmp_path / path, 1.0)
    with pytest.raises(CheckpointError, match="does not name a file"):
        write_checkpoint("", CheckpointContent())
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        (tmp_path / "folder").chmod(0o500)
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(tmp_path / "folder" / "c", 1.0)


def test_the_data_of_another_checkpoint_are_refused(tmp_path) -> None:
    save(tmp_path / "a", 1.0)
    save(tmp_path / "b", 2.0)
    shutil.copy(tmp_path / "b.data", tmp_path / "a.data")
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        read_checkpoint(tmp_path / "a")
    # Those that ONNX Runtime wrote bear no mark, nor does its checkpoint.
    shutil.copy(GOLDEN / "external", tmp_path / "b")
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        read_checkpoint(tmp_path / "b")


def test_data_that_onnx_runtime_has_written_anew_are_taken(tmp_path) -> None:
    """It keeps our property, which names the mark, and writes data without one."""
    path, data = tmp_path / "a", tmp_path / "a.data"
    save(path, 1.0)
    data.write_bytes(data.read_bytes()[: -checkpoint_store.FOOTER_SIZE])
    with pytest.raises(CheckpointError, match=r"a\.data is damaged: it has lost its end"):
        scale_of(path)
    path.write_bytes(without_checksum(path.read_bytes()))
    assert scale_of(path) == 1


def test_a_pair_can_be_moved_and_a_checkpoint_of_upstream_replaced(tmp_path) -> None:
    save(tmp_path / "a", 1.0)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "a", tmp_path / "elsewhere" / "b")
    shutil.move(tmp_path / "a.data", tmp_path / "elsewhere" / "b.data")
    assert scale_of(tmp_path / "elsewhere" / "b") == 1
    for name in ("external", "external.data"):
        shutil.copy(GOLDEN / name, tmp_path / name)
    content = read_checkpoint(tmp_path / "external")
    write_checkpoint(tmp_path / "external", content)
    assert as_plain_data(read_checkpoint(tmp_path / "external")) == as_plain_data(content)


def test_leftovers_of_killed_processes_are_removed_before_writing(tmp_path) -> None:
    leftovers = [".c.0123456789abcdef.tmp", "c.data.0123456789abcdef"]
    bystanders = ["c.data.mine", ".d.0123456789abcdef.tmp", "cXdata.0123456789abcdef"]
    for name in [*leftovers, *bystanders]:
        (tmp_path / name).touch()
    save(tmp_path / "c", 1.0)
    assert sorted(os.listdir(tmp_path)) == sorted([*bystanders, "c", "c.data"])


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_permissions_are_kept(tmp_path) -> None:
    save(tmp_path / "c", 1.0)
    (tmp_path / "c").chmod(0o640)
    (tmp_path / "c.data").chmod(0o604)
    save(tmp_path / "c", 2.0)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "c.data").stat().st_mode & 0o777 == 0o604
