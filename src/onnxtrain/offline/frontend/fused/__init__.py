"""Fused operators of onnxruntime, written back as the plain operators that they stand for.

A model that onnxruntime's optimizer has saved contains operators of the domain com.microsoft: a
Conv with its activation, a whole attention layer in one node. They are implementation, not model;
`expand_fused` replaces each by the ai.onnx operators that it was made of, so that gradients need no
second set of rules and no emitted model depends on one runtime.

A form that is not covered stays in place. Off the path of the gradient it does no harm; on it, the
engine names it with the reason given in `refused.py`.
"""

from onnxtrain.offline.frontend.fused import (
    activations,
    attention,
    cached_attention,
    dense,
    norms,
    refused,
    renamed,
    rotary,
)
from onnxtrain.offline.frontend.fused.expand import adopt_unofficial, expand_fused

__all__ = [
    "activations",
    "adopt_unofficial",
    "attention",
    "cached_attention",
    "dense",
    "expand_fused",
    "norms",
    "refused",
    "renamed",
    "rotary",
]
