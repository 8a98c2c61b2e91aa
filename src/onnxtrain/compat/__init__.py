"""Run scripts that were written for `onnxruntime.training` on onnxtrain, unchanged.

    python -m onnxtrain.compat script.py arguments ...       # a script that stays as it is
    onnxtrain.compat.install()                               # in a program of your own

Afterwards `onnxruntime.training.artifacts`, `.onnxblock` and `.api` are the modules of onnxtrain:
the same objects under a second name. They are imported on first use, so a device that uses
`onnxruntime.training.api` alone needs no `onnx`. Importing this module changes nothing.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

from onnxtrain.errors import NotProvidedError

_PACKAGE = "onnxruntime.training"
_PARTS = ("api", "artifacts", "onnxblock")
# Submodules of upstream that have another name here.
_RENAMED = {
    "api.checkpoint_state": "device.state",
    "api.lr_scheduler": "device.schedulers",
    "api.module": "device.module",
    "api.optimizer": "device.optimizer",
    "onnxblock.checkpoint_utils": "offline.blocks.checkpoint",
    "onnxblock.model_accessor": "offline.blocks.accessor",
    "onnxblock.onnxblock": "offline.blocks.block",
}
_ELSEWHERE = {
    "ORTModule": "it runs torch modules, for which torch itself is the successor",
    "amp": "it belongs to the training of torch modules",
    "experimental": "onnxtrain.gradient(model, wrt) gives the gradient of an ONNX model",
    "optim": "it has optimizers of torch modules; those of ONNX models are in onnxblock.optim",
    "ortmodule": "it runs torch modules, for which torch itself is the successor",
}


def is_ortmodule_available() -> bool:
    """Return False: onnxtrain does not run torch modules."""
    return False


class _Finder(MetaPathFinder):
    """Finds `onnxruntime.training` and its submodules before any other finder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _PACKAGE:
            return spec_from_loader(fullname, _PackageLoader(), is_package=True)
        if not fullname.startswith(f"{_PACKAGE}."):
            return None
        inner = fullname.removeprefix(f"{_PACKAGE}.")
        if inner.partition(".")[0] not in _PARTS:
            raise NotProvidedError(_not_provided(inner))
        return spec_from_loader(fullname, _AliasLoader(inner))


class _PackageLoader(Loader):
    """Makes the package `onnxruntime.training`, whose submodules are imported on first use."""

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "onnxtrain under the name of ONNX Runtime's training package."
        module.__all__ = [*_PARTS, "is_ortmodule_available"]  # type: ignore[attr-defined]
        module.is_ortmodule_available = is_ortmodule_available  # type: ignore[attr-defined]
        module.__getattr__ = _part  # type: ignore[method-assign]


class _AliasLoader(Loader):
    """Loads a module of onnxtrain under a second name."""

    def __init__(self, inner: str) -> None:
        self._inner = inner

    def exec_module(self, module: ModuleType) -> None:
        try:
            own = importlib.import_module(f"onnxtrain.{_RENAMED.get(self._inner, self._inner)}")
        except ModuleNotFoundError as missing:
            if missing.name and missing.name.startswith("onnxtrain."):
                raise NotProvidedError(_not_provided(self._inner)) from None
            raise
        # The import system returns what is here once the module has been executed.
        sys.modules[module.__name__] = own


def _part(name: str) -> Any:
    """Import a submodule when it is first used as an attribute."""
    if name in _PARTS:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    raise AttributeError(_not_provided(name))


def _not_provided(inner: str) -> str:
    reason = _ELSEWHERE.get(inner.partition(".")[0])
    return (
        f"onnxtrain stands in for {_PACKAGE} and has no {inner!r}"
        f"{f': {reason}' if reason else ''}. It has {', '.join(_PARTS)}"
    )


def install() -> None:
    """Let `onnxruntime.training` mean onnxtrain from now on.

    Where ONNX Runtime's own training package is installed, it is hidden, with a warning.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _hide_upstream()
    sys.meta_path.insert(0, _Finder())


def _hide_upstream() -> None:
    """Drop what has been imported of ONNX Runtime's own training package."""
    runtime = find_spec("onnxruntime")
    folders = runtime.submodule_search_locations if runtime is not None else None
    installed = PathFinder.find_spec(_PACKAGE, folders) if folders else None
    if installed is not None and installed.loader is not None:
        warnings.warn(
            f"ONNX Runtime's own {_PACKAGE} is installed, and onnxtrain.compat hides it: "
            "to use that one, do not call onnxtrain.compat.install()",
            stacklevel=3,
        )
    for name in [n for n in sys.modules if n == _PACKAGE or n.startswith(f"{_PACKAGE}.")]:
        del sys.modules[name]
    vars(sys.modules.get("onnxruntime", ModuleType(""))).pop("training", None)
