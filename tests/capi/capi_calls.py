"""How the tests call the device half in C++, and Python for comparison."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from onnxtrain.errors import OnnxTrainError


def killed_again_and_again(program: Path, lines: str, longest: float) -> Iterator[None]:
    """Let the program read lines and kill it in the midst of them, twelve times."""
    chooser = random.Random(0)
    for _ in range(12):
        process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        with process.stdin as given:
            given.write(lines.encode())
            given.flush()
            time.sleep(chooser.uniform(0.02, longest))
            process.send_signal(signal.SIGKILL)
        process.wait()
        yield


class Calls:
    """The program, running: each call is a line, and so is its answer."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def __call__(self, *words: object) -> tuple[bool, str]:
        """Whether a call succeeded, and its result or the sentence of its error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\t".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the program ended in {words}"
        outcome, _, text = answer.rstrip("\n").partition("\t")
        return outcome == "ok", text.replace("\x1e", "\n")

    def result(self, *words: object) -> str:
        """The result of a call that has to succeed."""
        succeeded, text = self(*words)
        assert succeeded, text
        return text

    def close(self) -> int:
        """End the program, and return its exit status."""
        self._process.communicate()
        return self._process.returncode


def error_of(function: Callable[..., Any], *given: object) -> str | None:
    """What Python says about the same; None if it succeeds."""
    try:
        function(*given)
    except OnnxTrainError as error:
        return str(error)
    return None
