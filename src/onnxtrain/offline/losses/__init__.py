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

__all__ = [
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
