"""The training API of `onnxruntime.training.api`, under the same names.

Each name is imported on first use: a program that only reads checkpoints needs no onnxruntime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxtrain.device.module import Module
    from onnxtrain.device.optimizer import Optimizer
    from onnxtrain.device.parameters import Parameter, Parameters, Properties
    from onnxtrain.device.schedulers import (
        ConstantLRScheduler,
        CosineLRScheduler,
        ExponentialLRScheduler,
        LinearLRScheduler,
        MultiStepLRScheduler,
        OneCycleLRScheduler,
        PlateauLRScheduler,
        StepLRScheduler,
    )
    from onnxtrain.device.session import TrainingSession
    from onnxtrain.device.state import CheckpointState

__all__ = [
    "CheckpointState",
    "ConstantLRScheduler",
    "CosineLRScheduler",
    "ExponentialLRScheduler",
    "LinearLRScheduler",
    "Module",
    "MultiStepLRScheduler",
    "OneCycleLRScheduler",
    "Optimizer",
    "Parameter",
    "Parameters",
    "PlateauLRScheduler",
    "Properties",
    "StepLRScheduler",
    "TrainingSession",
]

# The modules of the names; schedulers are in `schedulers`.
_HOMES = {
    "CheckpointState": "state",
    "Module": "module",
    "Optimizer": "optimizer",
    "Parameter": "parameters",
    "Parameters": "parameters",
    "Properties": "parameters",
    "TrainingSession": "session",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'onnxtrain.api' has no attribute {name!r}")
    home = _HOMES.get(name, "schedulers")
    value = getattr(import_module(f"onnxtrain.device.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
