"""The command `onnxtrain`: one function a subcommand.

Each imports what it needs when it runs, so that what a device needs (`train`, `eval`, `export`,
`checkpoint`) works with numpy and onnxruntime alone.

Exit codes: 0, all went well; 1, training or a graph failed; 2, something that was given is wrong,
in one line that says what to do; 130, interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnxtrain.cli.interrupt import INTERRUPTED, ends_at_once
from onnxtrain.errors import MissingGradientError, NonFiniteError, OnnxTrainError, RunError

if TYPE_CHECKING:
    from onnxtrain.cli.console import Console

FAILED, WRONG = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    _open_streams()
    with ends_at_once():
        from onnxtrain.cli.console import Console
        from onnxtrain.cli.parser import make_parser

        options = make_parser().parse_args(arguments)
    console = Console(options.json, options.quiet)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest, **more: console.note(f"note: {message}")
        warnings.simplefilter("default", UserWarning)
        try:
            code: int = options.run(options, console)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            # Whoever read our output has seen enough. What is still in the buffer goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except KeyboardInterrupt:
            console.complain("interrupted")
            return INTERRUPTED
        except Exception as error:
            return _report(error, options.command, console)


def _open_streams() -> None:
    """Let what would go to a stream that the caller has closed go nowhere.

    Names that the terminal has no characters for are escaped; they are no error.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(error: Exception, command: str, console: Console) -> int:
    """Say what is wrong, if it is something that a user can put right."""
    code = WRONG
    if isinstance(error, MissingGradientError):
        text = str(error)
    elif isinstance(error, OnnxTrainError):
        notes = [f"({note})" for note in getattr(error, "__notes__", [])]
        text = _one_line(" ".join([str(error), *notes]))
        in_data = isinstance(error, NonFiniteError) and error.in_data
        if isinstance(error, (NonFiniteError, RunError)) and not in_data:
            code = FAILED
    elif isinstance(error, ModuleNotFoundError) and _package_of(error.name or ""):
        text = _package_of(error.name or "")
    elif isinstance(error, OSError) and error.errno is not None:
        text = error.strerror or ""
        if error.filename is not None:
            text = f"{error.filename}: {text}"
            if isinstance(error, PermissionError):
                text += ": give another, or change who may use it"
    elif isinstance(error, MemoryError):
        said = f" ({_one_line(str(error))})" if str(error) else ""
        text = f"there is not enough memory{said}: ask for less"
    else:
        raise error
    console.complain(f"onnxtrain {command}: {text}")
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _package_of(module: str) -> str:
    """Say how to get a package that only some commands need."""
    extras = {
        "onnx": "offline", "onnx_ir": "offline", "matplotlib": "cli", "PIL": "cli",
        "sklearn": "demo",
    }  # fmt: skip
    extra = extras.get(module.partition(".")[0])
    return f"this needs the package {module}: pip install 'onnxtrain[{extra}]'" if extra else ""
