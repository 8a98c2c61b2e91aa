"""The command `onnxtrain`: one function a subcommand.

Each imports what it needs when it runs, so that what a device needs (`train`, `eval`, `export`,
`checkpoint`) works with numpy and onnxruntime alone.

Exit codes: 0, all went well; 1, training or a graph failed; 2, something that was given is wrong,
in one line that says what to do; 130, interrupted.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from onnxtrain.cli.console import Console, one_line
from onnxtrain.cli.parser import make_parser
from onnxtrain.errors import MissingGradientError, NonFiniteError, OnnxTrainError, RunError

FAILED, WRONG, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
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


def _report(error: Exception, command: str, console: Console) -> int:
    """Say what is wrong, if it is something that a user can put right."""
    if isinstance(error, MissingGradientError):
        console.complain(f"onnxtrain {command}: {error}")
        return WRONG
    if isinstance(error, OnnxTrainError):
        console.complain(f"onnxtrain {command}: {one_line(_with_notes(error))}")
        return FAILED if isinstance(error, NonFiniteError | RunError) else WRONG
    if isinstance(error, ModuleNotFoundError):
        hint = _package_of(error.name or "")
        if hint:
            console.complain(f"onnxtrain {command}: {hint}")
            return WRONG
    if isinstance(error, OSError) and error.filename is not None:
        console.complain(f"onnxtrain {command}: {error.filename}: {error.strerror}")
        return WRONG
    raise error


def _with_notes(error: Exception) -> str:
    notes: list[Any] = getattr(error, "__notes__", [])
    return " ".join([str(error), *(f"({note})" for note in notes)])


def _package_of(module: str) -> str:
    """Say how to get a package that only some commands need."""
    extras = {
        "onnx": "offline", "onnx_ir": "offline", "matplotlib": "cli", "PIL": "cli",
        "sklearn": "demo",
    }  # fmt: skip
    extra = extras.get(module.partition(".")[0])
    return f"this needs the package {module}: pip install 'onnxtrain[{extra}]'" if extra else ""
