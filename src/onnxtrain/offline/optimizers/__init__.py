"""Optimizers as plain ONNX graphs, gradient clipping and parameter groups.

Called as a block, an optimizer makes a model of its own; `write_update` writes it into a graph that
computes the gradients. A new one is a subclass of `Optimizer` with a `formula`: see `rules.py`.
"""

from onnxtrain.offline.optimizers.clip import ClipGradNorm, ClipGradValue, GradientClip
from onnxtrain.offline.optimizers.in_place import late_readers
from onnxtrain.offline.optimizers.mezo import MeZO, needs_gradient
from onnxtrain.offline.optimizers.optimizer import Optimizer, State
from onnxtrain.offline.optimizers.optimizer_graphs import write_optimizer, write_update
from onnxtrain.offline.optimizers.proximal import add_proximal
from onnxtrain.offline.optimizers.rules import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from onnxtrain.offline.optimizers.update_context import ParameterGroup
from onnxtrain.offline.optimizers.update_writer import Slot, Updated

BY_NAME: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
    "lion": Lion,
    "mezo": MeZO,
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
    "MeZO",
    "Optimizer",
    "ParameterGroup",
    "RMSprop",
    "Slot",
    "State",
    "Updated",
    "add_proximal",
    "late_readers",
    "needs_gradient",
    "write_optimizer",
    "write_update",
]
