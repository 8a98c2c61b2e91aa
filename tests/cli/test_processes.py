"""The command in a process of its own: pipes, Ctrl-C, and a machine without extras."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.device.session import TrainingSession

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden"
COMMAND = [sys.executable, "-m", "onnxtrain"]
# Nothing but the base dependencies can be imported.
BARE = """
import sys
for name in ("onnx", "onnx_ir", "google.protobuf", "rich", "matplotlib", "PIL", "sklearn", "torch"):
    sys.modules[name] = None
from onnxtrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(GOLDEN / "mlp", tmp_path / "artifacts")
    x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", input=x, labels=x[:, :3].argmax(axis=1))
    return tmp_path


def bare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, *arguments], cwd=folder, capture_output=True, text=True
    )


def test_the_device_needs_no_extra(folder) -> None:
    for arguments in (
        "train artifacts --data data.npz --eval data.npz --epochs 2 --schedule cosine",
        "eval artifacts --data data.npz --metric confusion",
        "export artifacts -o model.onnx",
        "checkpoint show artifacts",
        "completion bash",
        "doctor artifacts",
    ):
        done = bare(folder, *arguments.split())
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [("inspect model.onnx", "offline"), ("prepare model.onnx -o out", "offline"),
     ("gradient model.onnx --wrt x -o g.onnx", "offline"), ("ops", "offline"),
     ("train artifacts --data data.npz --plot a.png", "cli"),
     ("demo", "cli")],
)  # fmt: skip
def test_what_needs_an_extra_says_which(folder, arguments, extra) -> None:
    (folder / "model.onnx").write_bytes(b"")
    done = bare(folder, *arguments.split())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"onnxtrain[{extra}]" in done.stderr


def test_a_reader_that_goes_away_is_no_error(folder) -> None:
    with subprocess.Popen(
        [*COMMAND, "ops", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such shell")
@pytest.mark.parametrize(
    ("command", "code"),
    [("checkpoint show artifacts >&-", 0), ("checkpoint show artifacts >&- 2>&-", 0),
     ("checkpoint show missing 2>&-", 2), ("train artifacts --data data.npz 2>&- <&-", 0)],
)  # fmt: skip
def test_streams_may_be_closed(folder, command, code) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m onnxtrain {command}', sys.executable],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_full_disk_below_standard_output(folder, form) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "checkpoint", "show", "artifacts", *form.split()],
            cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "onnxtrain checkpoint: No space left on device\n"


@pytest.fixture
def control_c():
    """Let processes that are started take Ctrl-C; where tests run in the background, it is ignored.

    Not by `preexec_fn`: that runs between fork and exec, where a process with threads may hang.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def finish(process):
    """Read what a process wrote until its end; one that does not end is killed, and it fails."""
    try:
        return process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()  # `with Popen` would wait for it
        raise


@pytest.mark.usefixtures("control_c")
@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
def test_ctrl_c_is_not_lost_while_packages_are_imported(folder) -> None:
    """Some are made of C code, in which the exception that Python makes of it gets lost."""
    command = "train artifacts --data data.npz --epochs 1000000 --restart -q".split()
    for delay in (0.15, 0.3, 0.45, 0.6):
        with subprocess.Popen([*COMMAND, *command], cwd=folder, stderr=subprocess.PIPE) as process:
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            finish(process)
        # Python itself ends by the signal, or with 1, before its first line of ours.
        assert process.returncode in (130, 1, -signal.SIGINT)


@pytest.mark.usefixtures("control_c")
@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
def test_ctrl_c_leaves_a_run_to_go_on_with(folder) -> None:
    arguments = ["train", "artifacts", "--data", "data.npz", "--epochs", "100000", "--json"]
    with subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        saved = folder / "artifacts" / "trained"
        while not saved.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, errors = finish(process)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    history = json.loads(output)
    assert history["interrupted"]
    steps = len(history["losses"])
    session = TrainingSession.from_folder(folder / "artifacts", checkpoint=saved)
    assert session.optimizer is not None
    assert session.optimizer.step_count == steps > 0
    epochs = str(len(history["epochs"]) + 1)
    resumed = bare(folder, *arguments[:4], "--epochs", epochs, "--resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["losses"][:steps] == history["losses"]
