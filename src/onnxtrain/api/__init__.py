"""What runs on the device: numpy, onnxruntime and the standard library, and nothing else.

Each name is imported when it is first used: a program that only reads checkpoints needs no
onnxruntime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxtrain.api.checkpoint import CheckpointState
    from onnxtrain.api.module import Module
    from onnxtrain.api.optimizer import Optimizer
    from onnxtrain.api.parameters import Parameter, Parameters, Properties
    from onnxtrain.api.plateau import PlateauLRScheduler
    from onnxtrain.api.schedulers import (
        ConstantLRScheduler,
        CosineLRScheduler,
        ExponentialLRScheduler,
        LinearLRScheduler,
        MultiStepLRScheduler,
        OneCycleLRScheduler,
        StepLRScheduler,
    )
    from onnxtrain.api.session import TrainingSession

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

_HOMES = {
    "CheckpointState": "checkpoint",
    "ConstantLRScheduler": "schedulers",
    "CosineLRScheduler": "schedulers",
    "ExponentialLRScheduler": "schedulers",
    "LinearLRScheduler": "schedulers",
    "Module": "module",
    "MultiStepLRScheduler": "schedulers",
    "OneCycleLRScheduler": "schedulers",
    "Optimizer": "optimizer",
    "Parameter": "parameters",
    "Parameters": "parameters",
    "PlateauLRScheduler": "plateau",
    "Properties": "parameters",
    "StepLRScheduler": "schedulers",
    "TrainingSession": "session",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxtrain.api' has no attribute {name!r}")
    value = getattr(import_module(f"onnxtrain.api.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
