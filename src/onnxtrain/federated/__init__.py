"""Federated learning on Flower: clients and servers that train ONNX artifacts.

A client needs the device half and `flwr`; neither onnx nor torch. Each name is imported when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import NotProvidedError

if TYPE_CHECKING:
    from onnxtrain.federated.arrays import from_arrays, to_arrays
    from onnxtrain.federated.bundle import Bundle, open_artifacts, pack
    from onnxtrain.federated.checks import Checks
    from onnxtrain.federated.client import Client, client_app
    from onnxtrain.federated.compression import Compression
    from onnxtrain.federated.guard import Guarded
    from onnxtrain.federated.local import LocalGrid, run_locally
    from onnxtrain.federated.round_limits import RoundLimits
    from onnxtrain.federated.server import server_app

__all__ = [
    "Bundle",
    "Checks",
    "Client",
    "Compression",
    "Guarded",
    "LocalGrid",
    "RoundLimits",
    "client_app",
    "from_arrays",
    "open_artifacts",
    "pack",
    "run_locally",
    "server_app",
    "to_arrays",
]

_NAMES = {
    "arrays": ("from_arrays", "to_arrays"),
    "bundle": ("Bundle", "open_artifacts", "pack"),
    "checks": ("Checks",),
    "client": ("Client", "client_app"),
    "compression": ("Compression",),
    "guard": ("Guarded",),
    "round_limits": ("RoundLimits",),
    "local": ("LocalGrid", "run_locally"),
    "server": ("server_app",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxtrain.federated' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"onnxtrain.federated.{_HOMES[name]}"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "flwr":
            raise
        raise NotProvidedError(
            f"onnxtrain.federated.{name} needs the package flwr: pip install 'onnxtrain[flower]'"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
