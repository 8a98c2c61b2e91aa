"""Completion, asked for as a shell asks for it, on a terminal where it needs one."""

import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pty = pytest.importorskip("pty", reason="only Unix has terminals of this kind")
COMMAND = [sys.executable, "-m", "onnxtrain"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with scripts for all shells and some files."""
    for shell in ("bash", "zsh", "fish"):
        script = subprocess.run(
            [*COMMAND, "completion", shell], capture_output=True, text=True, check=True
        ).stdout
        (tmp_path / f"script.{shell}").write_text(script)
    for name in ("digits.npz", "my model.onnx"):
        (tmp_path / name).touch()
    return tmp_path


def find(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"there is no {shell}")
    return path


# ---- bash ----------------------------------------------------------------------------------------


def offered(folder: Path, *words: str) -> list[str]:
    """Return what bash offers after these words; the last of them is not complete."""
    listed = " ".join(f"'{word}'" for word in words)
    ask = (
        f"source script.bash\nCOMP_WORDS=({listed})\nCOMP_CWORD={len(words) - 1}\n"
        "_onnxtrain\nprintf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        [find("bash"), "--norc", "-c", ask], capture_output=True, text=True, cwd=folder, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_offers_commands_options_words_and_files(folder) -> None:
    commands = offered(folder, "onnxtrain", "")
    assert {"train", "inspect", "completion", "--version"} <= set(commands)
    assert "digits.npz" not in commands
    assert {"--data", "--resume", "digits.npz"} <= set(offered(folder, "onnxtrain", "train", ""))
    assert offered(folder, "onnxtrain", "train", "x", "--schedule", "")[:2] == ["linear", "cosine"]
    assert offered(folder, "onnxtrain", "train", "x", "--schedule", "c") == ["cosine", "constant"]
    assert offered(folder, "onnxtrain", "train", "x", "--data", "d") == ["digits.npz"]
    assert offered(folder, "onnxtrain", "prepare", "my") == ["my model.onnx"]
    assert offered(folder, "onnxtrain", "checkpoint", "s") == ["show"]
    assert "--json" in offered(folder, "onnxtrain", "checkpoint", "show", "-")
    assert offered(folder, "onnxtrain", "completion", "b") == ["bash"]


def typed(program: list[str], folder: Path, setup: str, keys: str, wanted: str) -> str:
    """Type into a shell on a terminal; return what it shows, as soon as that has what is wanted."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        environment = {**os.environ, "TERM": "dumb", "PS1": "$ ", "HOME": str(folder)}
        os.execve(program[0], program, environment)
    shown = ""
    try:
        os.write(terminal, f"{setup}; echo rea''dy\n".encode())
        shown = read_until(terminal, "ready\r\n")
        os.write(terminal, keys.encode())
        shown = read_until(terminal, wanted)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return shown


def read_until(terminal: int, wanted: str) -> str:
    shown, end = "", time.monotonic() + 30
    while wanted not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.5)[0]:
            shown += os.read(terminal, 4096).decode()
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x07|[^\x08]\x08", "", shown)
    return shown


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("onnxtrain exp\t", "onnxtrain export "),
        ("onnxtrain train x --sched\tcos\t", "onnxtrain train x --schedule cosine "),
        ("onnxtrain train x --data dig\t", "onnxtrain train x --data digits.npz "),
        ("onnxtrain inspect my\t", "onnxtrain inspect my\\ model.onnx "),
        ("onnxtrain checkpoint s\t", "onnxtrain checkpoint show "),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_tab_key_completes_a_line(folder, shell, keys, line) -> None:
    options = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[shell]
    program = find(shell)
    shown = typed([program, *options], folder, f"source ./script.{shell}", keys, line)
    assert line in shown


def test_fish_offers_commands_options_words_and_files(folder) -> None:
    fish = find("fish")

    def completions(line: str) -> dict[str, str]:
        done = subprocess.run(
            [fish, "--no-config", "-c", f"source script.fish; complete -C '{line}'"],
            capture_output=True, text=True, cwd=folder, check=True,
            env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        pairs = (line.partition("\t") for line in done.stdout.splitlines())
        return {word: does for word, _, does in pairs}

    commands = completions("onnxtrain ")
    assert commands["train"] == "train from a folder of artifacts"
    assert "digits.npz" not in commands
    assert set(completions("onnxtrain train x --schedule c")) == {"cosine", "constant"}
    assert "--schedule" in completions("onnxtrain train --sch")
    assert set(completions("onnxtrain train x --data d")) == {"digits.npz"}
    assert set(completions("onnxtrain checkpoint ")) == {"show"}


def test_every_shell_has_all_commands(folder) -> None:
    for shell in ("bash", "zsh", "fish"):
        script = (folder / f"script.{shell}").read_text()
        for word in ("inspect", "prepare", "train", "eval", "export", "gradient", "ops", "demo"):
            assert word in script
