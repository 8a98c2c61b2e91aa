"""What runs on the device: numpy, onnxruntime and the standard library, and nothing else."""

from onnxtrain.api.checkpoint import CheckpointState
from onnxtrain.api.module import Module
from onnxtrain.api.optimizer import Optimizer
from onnxtrain.api.parameters import Parameter, Parameters, Properties
from onnxtrain.api.schedulers import LinearLRScheduler
from onnxtrain.api.session import TrainingSession

__all__ = [
    "CheckpointState",
    "LinearLRScheduler",
    "Module",
    "Optimizer",
    "Parameter",
    "Parameters",
    "Properties",
    "TrainingSession",
]
