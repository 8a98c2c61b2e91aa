"""Optimizers as plain ONNX graphs, gradient clipping and parameter groups.

An optimizer is called in a context, as other blocks are, and makes a model of its own; or it writes
its updates into a graph that has the gradients (`Optimizer.write`).
"""

from onnxtrain.offline.optimizers.clip import ClipGradNorm, ClipGradValue, GradientClip
from onnxtrain.offline.optimizers.groups import ParameterGroup
from onnxtrain.offline.optimizers.in_place import late_readers
from onnxtrain.offline.optimizers.optimizer import (
    Optimizer,
    State,
    write_optimizer,
    write_update,
)
from onnxtrain.offline.optimizers.proximal import add_proximal
from onnxtrain.offline.optimizers.rules import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from onnxtrain.offline.optimizers.writing import Slot, Updated

BY_NAME = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
    "lion": Lion,
}

__all__ = [
    "BY_NAME",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ClipGradNorm",
    "ClipGradValue",
    "GradientClip",
    "Lion",
    "Optimizer",
    "ParameterGroup",
    "RMSprop",
    "Slot",
    "State",
    "Updated",
    "add_proximal",
    "late_readers",
    "write_optimizer",
    "write_update",
]
