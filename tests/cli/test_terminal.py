"""Names and texts out of files cannot move the cursor, ring, or pretend to be other lines."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain.cli import main
from onnxtrain.cli.console import Console, plain_table
from onnxtrain.cli.demo.network import network
from onnxtrain.device.loop.progress import Bar, Lines
from onnxtrain.format.checkpoint.content import CheckpointContent
from onnxtrain.format.checkpoint.file import write_checkpoint

NASTY = "a\tb\x1b[2J\x1b]0;title\x07\x9b31m\u202eb\r\nverdict  fine"


def is_safe(text: str) -> bool:
    return not set(text) & set("\x1b\x07\x9b\u202e\r")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A checkpoint and a model whose names are made to confuse a terminal."""
    monkeypatch.chdir(tmp_path)
    weight = np.ones(3, np.float32)
    content = CheckpointContent(trainable={NASTY: weight}, properties={NASTY: NASTY, "n": 1})
    write_checkpoint("c", content)
    model = network()
    old = model.graph.initializer[0].name
    model.graph.initializer[0].name = NASTY
    model.graph.input[0].name, first = NASTY + "in", model.graph.input[0].name
    for node in model.graph.node:
        node.name = NASTY + node.name
        for place, name in enumerate(node.input):
            node.input[place] = {old: NASTY, first: NASTY + "in"}.get(name, name)
    onnx.save(model, "m.onnx")
    return tmp_path


COMMANDS = (
    "doctor",
    "checkpoint show c",
    "inspect m.onnx --all",
    "gradient m.onnx -o g.onnx --wrt x",
    "prepare m.onnx -o out",
    "eval out --data c",
    "predict m.onnx c",
    f"checkpoint show {NASTY.split()[0]}",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, folder, capsys) -> None:
    main(command.split())
    shown = capsys.readouterr()
    assert shown.out + shown.err
    assert is_safe(shown.out + shown.err)


@pytest.mark.parametrize("command", ["checkpoint show c", "inspect m.onnx"])
def test_a_name_of_several_lines_stays_on_one(command, folder, capsys) -> None:
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("verdict  fine") for line in lines)
    assert any("\\x1b[2J" in line and "\\r\\nverdict" in line for line in lines)


@pytest.mark.skipif(os.name != "posix", reason="there are no pseudo-terminals")
def test_a_terminal_with_its_table(folder) -> None:
    """There rich draws the table, if it is installed."""
    leader, follower = pty.openpty()
    program = "import sys; from onnxtrain.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "checkpoint", "show", "c"],
        stdout=follower, stderr=subprocess.PIPE, timeout=60, check=False,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )  # fmt: skip
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert done.returncode == 0, done.stderr
    assert is_safe(shown.replace("\r\n", "\n"))
    assert "\\x1b[2J" in shown


def test_a_file_name_that_is_not_utf8(folder) -> None:
    """It is shown escaped, whatever the encoding of the terminal is."""
    name = os.fsdecode(b"\xff\xfe.npz")
    try:
        Path(name).write_bytes(b"no archive")
    except OSError:
        pytest.skip("this file system has no such names")
    Path("größer").write_bytes(b"no checkpoint")
    program = "import sys; from onnxtrain.cli import main; sys.exit(main(sys.argv[1:]))"
    for arguments in (["predict", "m.onnx", name], ["checkpoint", "show", "größer"]):
        for encoding in ("ascii", "utf-8"):
            done = subprocess.run(
                [sys.executable, "-c", program, *arguments],
                capture_output=True, timeout=60, env={**os.environ, "PYTHONIOENCODING": encoding},
            )  # fmt: skip
            assert done.returncode == 2, done.stderr
            assert b"Traceback" not in done.stderr
            done.stderr.decode(encoding)


def test_progress_tables_and_notes(capsys) -> None:
    for display in (Lines(), Bar(width=60)):
        display.say(NASTY)
    console = Console()
    console.note(NASTY)
    console.complain(NASTY)
    console.result({}, NASTY)
    shown = capsys.readouterr()
    assert is_safe(shown.out + shown.err)
    assert plain_table((NASTY,), [(NASTY,)]).count("\n") == 1
