"""Losses, by the names of torch and ONNX Runtime's training API, and by short ones.

Each takes what the model computes and what it should have computed: by their names as a block
(`MSE()("output", "target")`), or as values of a graph (`MSE().write(op, output, target)`).
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
from onnxtrain.offline.losses.loss import ElementwiseLoss, Loss
from onnxtrain.offline.losses.next_token import NextTokenLoss

BCEWithLogits = BCEWithLogitsLoss
CrossEntropy = CrossEntropyLoss
Huber = HuberLoss
KLDiv = KLDivLoss
L1 = L1Loss
MSE = MSELoss
NLL = NLLLoss
NextToken = NextTokenLoss
SmoothL1 = SmoothL1Loss

BY_NAME: dict[str, type[Loss]] = {
    "bce": BCEWithLogits,
    "cross_entropy": CrossEntropy,
    "huber": Huber,
    "kl": KLDiv,
    "kl_div": KLDiv,
    "l1": L1,
    "mse": MSE,
    "next_token": NextToken,
    "nll": NLL,
    "smooth_l1": SmoothL1,
}

__all__ = [
    "BY_NAME",
    "L1",
    "MSE",
    "NLL",
    "BCEWithLogits",
    "BCEWithLogitsLoss",
    "CrossEntropy",
    "CrossEntropyLoss",
    "ElementwiseLoss",
    "FunctionLoss",
    "Huber",
    "HuberLoss",
    "KLDiv",
    "KLDivLoss",
    "L1Loss",
    "Loss",
    "MSELoss",
    "ModelLoss",
    "NLLLoss",
    "NextToken",
    "NextTokenLoss",
    "SmoothL1",
    "SmoothL1Loss",
]
