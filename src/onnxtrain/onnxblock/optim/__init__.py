"""Optimizers as plain ONNX graphs, gradient clipping and parameter groups.

An optimizer is called in a context, as other blocks are, and makes a model of its own; or it writes
its updates into a graph that has the gradients (`Optimizer.write`).
"""

from onnxtrain.onnxblock.optim.clip import ClipGradNorm, ClipGradValue, GradientClip
from onnxtrain.onnxblock.optim.groups import ParameterGroup
from onnxtrain.onnxblock.optim.inplace import late_readers
from onnxtrain.onnxblock.optim.optimizer import (
    Optimizer,
    State,
    write_optimizer,
    write_update,
)
from onnxtrain.onnxblock.optim.proximal import add_proximal
from onnxtrain.onnxblock.optim.rules import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from onnxtrain.onnxblock.optim.writing import Slot, Updated

__all__ = [
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
