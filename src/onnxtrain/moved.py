"""Other names of modules: short ones, and old ones that still import with a warning."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from onnxtrain.errors import NotProvidedError

SHORT = {
    "onnxtrain.losses": "onnxtrain.offline.losses",
    "onnxtrain.metrics": "onnxtrain.device.loop.metrics",
    "onnxtrain.optim": "onnxtrain.offline.optimizers",
    "onnxtrain.schedules": "onnxtrain.device.schedules",
}
# The modules inside of a package move with it, unless they have a line of their own.
MOVED = {
    "onnxtrain.api.checkpoint": "onnxtrain.device.state",
    "onnxtrain.api.fit": "onnxtrain.device.loop",
    "onnxtrain.api.graph": "onnxtrain.device.run.session_settings",
    "onnxtrain.api.history": "onnxtrain.device.loop.history",
    "onnxtrain.api.metrics": "onnxtrain.device.loop.metrics",
    "onnxtrain.api.module": "onnxtrain.device.module",
    "onnxtrain.api.optimizer": "onnxtrain.device.optimizer",
    "onnxtrain.api.parameters": "onnxtrain.device.parameters",
    "onnxtrain.api.progress": "onnxtrain.device.loop.progress",
    "onnxtrain.api.random_state": "onnxtrain.device.random_state",
    "onnxtrain.api.schedulers": "onnxtrain.device.schedulers",
    "onnxtrain.api.session": "onnxtrain.device.session",
    "onnxtrain.autodiff": "onnxtrain.offline.autodiff",
    "onnxtrain.autodiff.gradient": "onnxtrain.offline.gradient",
    "onnxtrain.autodiff.ops": "onnxtrain.offline.graph.ops",
    "onnxtrain.demo": "onnxtrain.cli.demo",
    "onnxtrain.flower": "onnxtrain.federated",
    "onnxtrain.flower.keeping": "onnxtrain.federated.client_state",
    "onnxtrain.flower.silence": "onnxtrain.federated.stragglers",
    "onnxtrain.inspection": "onnxtrain.offline.inspect",
    "onnxtrain.memory": "onnxtrain.offline.memory",
    "onnxtrain.new_head": "onnxtrain.offline.passes.replace_classifier",
    "onnxtrain.plots": "onnxtrain.cli.plot",
    "onnxtrain.training_graph": "onnxtrain.offline.training_graph",
}
_WORKSTATION = ("onnxtrain.offline", "onnxtrain.artifacts", "onnxtrain.onnxblock")


def _target(name: str) -> str | None:
    """Return the module that another name stands for."""
    if name in SHORT or name in MOVED:
        return SHORT.get(name) or MOVED[name]
    parent, _, child = name.rpartition(".")
    package = _target(parent) if parent.startswith("onnxtrain.") else None
    return None if package is None else f"{package}.{child}"


class Finder:
    """Finds modules under their other names, and says what those of the workstation need.

    It has no base class: `importlib.abc` takes longer to import than all that is needed of it.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module by one of its other names."""
        if not name.startswith("onnxtrain."):
            return None
        if name in _WORKSTATION and not (find_spec("onnx") and find_spec("onnx_ir")):
            raise NotProvidedError(
                f"{name} prepares models and needs the packages onnx and onnx_ir: "
                "pip install 'onnxtrain[offline]'"
            )
        return None if _target(name) is None else ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module itself in the place of its other name."""
        name = module.__name__
        target = _target(name)
        assert target is not None
        if name not in SHORT:
            warnings.warn(f"{name} has moved to {target}", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(target)


def install() -> None:
    """Let imports know the other names."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
