"""The gradient rules, one file per family; importing this package registers them all."""

from onnxtrain.autodiff.rules import (
    activation,
    attention,
    control,
    conv,
    elementwise,
    image,
    index,
    linalg,
    loss,
    norm,
    pool,
    quant,
    reduce,
    rnn,
    shape,
    zero,
)

__all__ = [
    "activation",
    "attention",
    "control",
    "conv",
    "elementwise",
    "image",
    "index",
    "linalg",
    "loss",
    "norm",
    "pool",
    "quant",
    "reduce",
    "rnn",
    "shape",
    "zero",
]
