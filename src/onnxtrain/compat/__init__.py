"""Runs scripts that were written for `onnxruntime.training`, unchanged, on onnxtrain.

    import onnxtrain.compat                                  # at the top of a program, or
    python -m onnxtrain.compat script.py arguments ...       # for a script that stays as it is

From then on `onnxruntime.training.artifacts`, `.onnxblock` and `.api` are the modules of onnxtrain:
the same objects, so that a class is the same class by either name. Nothing is imported before a
script asks for it; a device that uses `onnxruntime.training.api` alone needs no `onnx`.

Where ONNX Runtime's own training package is installed, it is hidden, with a warning.
"""

from __future__ import annotations

import builtins
import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_loader
from types import ModuleType, TracebackType
from typing import Any

from onnxtrain.errors import NotProvidedError

_PACKAGE = "onnxruntime.training"
_PARTS = ("api", "artifacts", "onnxblock")
# Files that have another name here; what upstream's users import is in the modules above.
_RENAMED = {
    "api.checkpoint_state": "device.state",
    "api.lr_scheduler": "device.schedulers.rates",
    "api.module": "device.module",
    "api.optimizer": "device.optimizer",
    "onnxblock.checkpoint_utils": "offline.blocks.checkpoint",
    "onnxblock.model_accessor": "offline.blocks.accessor",
    "onnxblock.onnxblock": "onnxblock",
}
_ELSEWHERE = {
    "ORTModule": "it runs torch modules, for which torch itself is the successor",
    "amp": "it belongs to the training of torch modules",
    "experimental": "onnxtrain.gradient(model, wrt) gives the gradient of an ONNX model",
    "optim": "it has optimizers of torch modules; those of ONNX models are in onnxblock.optim",
    "ortmodule": "it runs torch modules, for which torch itself is the successor",
}
_USAGE = """usage: python -m onnxtrain.compat script.py [argument ...]
       python -m onnxtrain.compat -m module [argument ...]"""


def is_ortmodule_available() -> bool:
    """Say, as upstream's function of this name, whether torch modules can be run: they cannot."""
    return False


class _Finder(MetaPathFinder):
    """Finds `onnxruntime.training` and what is in it, before any other finder is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _PACKAGE:
            return spec_from_loader(fullname, _PackageLoader(), is_package=True)
        if not fullname.startswith(f"{_PACKAGE}."):
            return None
        return spec_from_loader(fullname, _AliasLoader(_own_name(fullname)))


class _PackageLoader(Loader):
    """Makes `onnxruntime.training` itself: a package whose parts come when they are asked for."""

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "onnxtrain under the name of ONNX Runtime's training package."
        module.__all__ = [*_PARTS, "is_ortmodule_available"]  # type: ignore[attr-defined]
        module.is_ortmodule_available = is_ortmodule_available  # type: ignore[attr-defined]
        module.__getattr__ = _part  # type: ignore[method-assign]


class _AliasLoader(Loader):
    """Lets a module of onnxtrain be found under a second name."""

    def __init__(self, own_name: str) -> None:
        self._own_name = own_name

    def exec_module(self, module: ModuleType) -> None:
        try:
            own = importlib.import_module(self._own_name)
        except ModuleNotFoundError as missing:
            raise _explained(missing, module.__name__) from None
        # The import system returns what is here once the module has been executed.
        sys.modules[module.__name__] = own


def _own_name(fullname: str) -> str:
    """Return the module of onnxtrain for a module of upstream."""
    inner = fullname.removeprefix(f"{_PACKAGE}.")
    if inner.partition(".")[0] not in _PARTS:
        raise NotProvidedError(_not_provided(inner))
    return f"onnxtrain.{_RENAMED.get(inner, inner)}"


def _part(name: str) -> Any:
    """Import a part of the package when it is first used as an attribute."""
    if name in _PARTS:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    raise AttributeError(_not_provided(name))


def _not_provided(inner: str) -> str:
    reason = _ELSEWHERE.get(inner.partition(".")[0])
    return (
        f"onnxtrain stands in for {_PACKAGE} and has no {inner!r}"
        f"{f': {reason}' if reason else ''}. It has {', '.join(_PARTS)}"
    )


def _explained(missing: ModuleNotFoundError, wanted: str) -> ImportError:
    if missing.name in ("onnx", "onnx_ir"):
        return NotProvidedError(
            f"{wanted} prepares models and needs the packages onnx and onnx_ir: "
            "pip install 'onnxtrain[offline]'"
        )
    if missing.name and missing.name.startswith("onnxtrain."):
        return NotProvidedError(_not_provided(wanted.removeprefix(f"{_PACKAGE}.")))
    return missing


def install() -> None:
    """Let `onnxruntime.training` be onnxtrain from now on; importing this module does it."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _hide_upstream()
    sys.meta_path.insert(0, _Finder())


def _hide_upstream() -> None:
    """Forget what has been imported of ONNX Runtime's own training package, if it is installed."""
    runtime = find_spec("onnxruntime")
    folders = runtime.submodule_search_locations if runtime is not None else None
    installed = PathFinder.find_spec(_PACKAGE, folders) if folders else None
    if installed is not None and installed.loader is not None:
        warnings.warn(
            f"ONNX Runtime's own {_PACKAGE} is installed, and onnxtrain.compat hides it: "
            "to use that one, do not import onnxtrain.compat",
            stacklevel=2,
        )
    for name in [n for n in sys.modules if n == _PACKAGE or n.startswith(f"{_PACKAGE}.")]:
        del sys.modules[name]
    vars(sys.modules.get("onnxruntime", ModuleType(""))).pop("training", None)


# ---- running a script ----------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Run a script or a module as Python would, with `onnxruntime.training` in place."""
    options = list(arguments)
    if options[:1] == ["--"]:
        del options[0]
    if not options or options[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if options else 2)
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


install()
