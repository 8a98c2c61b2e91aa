"""Fused operators of onnxruntime, written back as the plain operators that they stand for.

A model that onnxruntime's optimizer has saved contains operators of the domain com.microsoft: a
Conv with its activation, a whole attention layer in one node. `expand_fused` replaces each by the
ai.onnx operators that it was made of, so that gradients need no second set of rules and no written
model depends on one runtime.

A form that is not covered stays. Off the gradient path it does no harm; on it, the error has the
reason given in `domain.py`.
"""

from importlib import import_module
from pkgutil import iter_modules

from onnxtrain.offline.frontend.fused.expand import expand_fused, expand_trained

__all__ = ["expand_fused", "expand_trained"]

for _module in iter_modules(__path__):  # each registers its definitions
    import_module(f"{__name__}.{_module.name}")
