"""`python -m onnxtrain.compat script.py`: run a script with onnxtrain as `onnxruntime.training`."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

from onnxtrain.compat import install

_USAGE = """usage: python -m onnxtrain.compat script.py [argument ...]
       python -m onnxtrain.compat -m module [argument ...]"""


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module as Python would, after `install()`."""
    options = list(arguments)
    if options[:1] == ["--"]:
        del options[0]
    if not options or options[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if options else 2)
    install()
    sys.excepthook = _without_our_frames(sys.excepthook)
    if options[0] == "-m":
        if len(options) < 2:
            raise SystemExit(_USAGE)
        sys.argv[:] = options[1:]
        runpy.run_module(options[1], run_name="__main__", alter_sys=True)
    elif options[0].startswith("-"):
        raise SystemExit(f"unknown option {options[0]!r}\n{_USAGE}")
    else:
        _run_script(options)


def _run_script(arguments: list[str]) -> None:
    """Execute a file as the module `__main__`, which stays until the process ends."""
    path = os.path.abspath(arguments[0])
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise SystemExit(f"onnxtrain.compat: cannot open the script {path!r}: {error}") from None
    sys.argv[:] = arguments
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", path),
    )
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _without_our_frames(hook: _Hook) -> _Hook:
    """Show the traceback of an error from the first line of the script on."""
    ours = {__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>"}

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rest = trace
        while rest is not None and rest.tb_frame.f_code.co_filename in ours:
            rest = rest.tb_next
        if rest is None and not isinstance(error, SyntaxError | ImportError):
            rest = trace  # an error of our own
        hook(kind, error.with_traceback(rest), rest)

    return show


if __name__ == "__main__":
    main(sys.argv[1:])
