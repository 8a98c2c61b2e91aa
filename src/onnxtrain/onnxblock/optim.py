"""The optimizers, under upstream's name."""

from onnxtrain.offline.optimizers import *  # noqa: F403
from onnxtrain.offline.optimizers import __all__ as __all__
