"""A training that is interrupted and resumed ends, to the bit, where it would have ended anyway."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import resume_program
from small_runs import assert_same, open_session, samples

from onnxtrain.api import CheckpointState
from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint.file import read_checkpoint

pytestmark = pytest.mark.slow

PROGRAM = Path(resume_program.__file__)
MODELS = ["mlp", "cnn", "head", "int8"]


@pytest.fixture(scope="module", params=MODELS)
def uninterrupted(request):
    """A model, and its state after 200 steps that were never saved, as the bytes of a file."""
    session, scheduler = resume_program.start(request.param)
    resume_program.train(session, scheduler, request.param)
    return request.param, session.state.to_bytes(include_optimizer_state=True)


def run_and_kill(arguments, chooser):
    """Run the program and kill it at a random moment; whether it came to its end."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        moment = chooser.randrange(40, 90)  # steps, then a part of one
        for count, line in enumerate(process.stdout):
            if count == moment:
                time.sleep(chooser.uniform(0, 0.004))
                process.kill()
                break
            if int(line) % resume_program.STRIDE == 0:
                process.stdin.write("\n")
        process.stdout.read()
        code = process.wait()
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.parametrize("every", [1, 7])
def test_killed_at_random_moments(uninterrupted, every, tmp_path) -> None:
    """With every=1, most of the time goes into saving, and most kills interrupt that."""
    model, expected = uninterrupted
    chooser = random.Random(f"{model} {every}")
    path = tmp_path / "c"
    kills = 0
    while not run_and_kill((model, path, every), chooser):
        kills += 1
        if path.exists():  # whole, and of one moment
            CheckpointState.load_checkpoint(path)
        assert kills < 60
    assert kills >= 2
    assert (tmp_path / "c.end").read_bytes() == expected
    left = {p.name for p in tmp_path.iterdir()} - {"c", "c.end"}
    assert all(name.startswith(".c.") and name.endswith(".tmp") for name in left)


@pytest.mark.parametrize("moments", [(1,), (50, 51, 120)])
def test_saved_and_opened_again(uninterrupted, moments) -> None:
    model, expected = uninterrupted
    session, scheduler = resume_program.start(model)

    class Stop(Exception):
        pass

    def after_step(step):
        if step in moments:
            raise Stop

    for _ in moments:
        with pytest.raises(Stop):
            resume_program.train(session, scheduler, model, after_step)
        session, scheduler = resume_program.start(model, session.state.to_bytes(True))
    resume_program.train(session, scheduler, model)
    assert session.state.to_bytes(include_optimizer_state=True) == expected


def test_resuming_within_an_accumulation_is_not_promised_but_starts_clean(tmp_path) -> None:
    """Gradients are not saved, as in upstream: what was accumulated is computed again."""
    session = open_session()
    session.train_step(*samples(seed=1))
    session.save_checkpoint(tmp_path / "c")
    again = open_session(checkpoint=tmp_path / "c")
    for one in (session, again):
        one.lazy_reset_grad()
        one.train_step(*samples(seed=1))
        one.optimizer_step()
    assert_same(session, again)


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, {folder!r})
from small_runs import open_session, samples
from onnxtrain.errors import CheckpointError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
session = open_session("cnn", {path!r})
session.step(*samples(model="cnn"))
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
try:
    session.save_checkpoint({path!r})
except CheckpointError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
session.step(*samples(model="cnn"))
session.save_checkpoint({path!r} + ".later")
"""


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
@pytest.mark.parametrize("external", [False, True])
def test_a_full_disk_leaves_the_old_checkpoint(share, external, tmp_path) -> None:
    session = open_session("cnn")
    session.step(*samples(model="cnn"))
    session.state._training._has_external_data = external
    path = tmp_path / "c"
    session.save_checkpoint(path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert len(before) == 1 + external
    limit = int(share * min(map(len, before.values())))
    code = FULL_DISK.format(folder=str(PROGRAM.parent), path=str(path), limit=limit)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "disk is full" in result.stdout and str(path) in result.stdout
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if ".later" not in p.name}
    assert after == before
    # The session that could not save trains on, and saves when there is room again.
    later = open_session("cnn", tmp_path / "c.later")
    assert later.optimizer.step_count == 3
    assert open_session("cnn", path).optimizer.step_count == 1


def test_a_checkpoint_with_external_data_resumes(tmp_path) -> None:
    session = open_session("cnn")
    session.step(*samples(model="cnn"))
    session.state._training._has_external_data = True
    session.save_checkpoint(tmp_path / "c")
    assert (tmp_path / "c.data").exists()
    again = open_session("cnn", tmp_path / "c")
    for _ in range(2):
        assert again.step(*samples(model="cnn"))[0] == session.step(*samples(model="cnn"))[0]
    again.save_checkpoint(tmp_path / "d")
    assert (tmp_path / "d.data").exists()  # external once, external again
    (tmp_path / "c.data").unlink()
    with pytest.raises(CheckpointError, match="external data"):
        open_session("cnn", tmp_path / "c")


def test_saving_over_the_file_that_was_loaded(tmp_path) -> None:
    """Frozen parameters are views of the file, which lives on until they are let go."""
    session = open_session("head")
    session.state._training._has_external_data = True
    path = tmp_path / "c"
    session.save_checkpoint(path)
    session = open_session("head", path)
    frozen = session.get_parameter("fc1.weight")
    for _ in range(3):
        session.step(*samples())
        session.save_checkpoint(path)
    path.unlink()
    (tmp_path / "c.data").unlink()
    assert np.array_equal(session.get_parameter("fc1.weight"), frozen)
    assert np.isfinite(session.eval_step(*samples())[0])


LOAD = """
import sys
from onnxtrain.api import CheckpointState

def peak():
    # Not ru_maxrss, which begins with the memory of the process that started this one.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line)

before = peak()
state = CheckpointState.load_checkpoint(sys.argv[1])
state.parameters["trained"].data[0] = 1  # training works with the memory that was read
assert state.parameters["table"].data.shape == (25_000_000,)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory has other units elsewhere")
@pytest.mark.parametrize("external", [False, True])
def test_a_large_checkpoint_is_in_memory_once(tmp_path, external) -> None:
    from onnxtrain.format.checkpoint.content import CheckpointContent
    from onnxtrain.format.checkpoint.file import write_checkpoint

    half = np.zeros(25_000_000, np.float32)
    content = CheckpointContent(trainable={"trained": half}, frozen={"table": half})
    content.has_external_data = external
    write_checkpoint(tmp_path / "c", content)
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "c")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert 200_000_000 < int(result.stdout) * 1024 < 220_000_000


def test_what_is_saved_is_what_the_file_holds(tmp_path) -> None:
    """Scheduler, learning rate and random state are there, beside parameters and moments."""
    session, scheduler = resume_program.start("cnn")
    for _ in range(3):
        session.step(*samples(model="cnn"))
        scheduler.step()
    session.save_checkpoint(tmp_path / "c")
    content = read_checkpoint(tmp_path / "c")
    assert content.optimizer_groups["group0"].step == 3
    again = CheckpointState(content)
    assert again._training.saved_learning_rate == session.get_learning_rate()
    assert again._training.saved_scheduler == {"kind": "cosine", "state": scheduler.state()}
    assert again._training.random.saved() == {"seed": 7, "draws": 3}
