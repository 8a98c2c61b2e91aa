"""Losses.

Each is called with the name of what the model computes and, if that is not to be the default, the
name of what it should have computed.
"""

from onnxtrain.offline.losses.classes import CrossEntropyLoss, NLLLoss
from onnxtrain.offline.losses.custom import FunctionLoss, ModelLoss
from onnxtrain.offline.losses.elementwise import (
    BCEWithLogitsLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    SmoothL1Loss,
)

BY_NAME = {
    "cross_entropy": CrossEntropyLoss,
    "nll": NLLLoss,
    "mse": MSELoss,
    "l1": L1Loss,
    "huber": HuberLoss,
    "smooth_l1": SmoothL1Loss,
    "bce": BCEWithLogitsLoss,
    "kl_div": KLDivLoss,
}

__all__ = [
    "BY_NAME",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "FunctionLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "ModelLoss",
    "NLLLoss",
    "SmoothL1Loss",
]
