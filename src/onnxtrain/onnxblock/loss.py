"""The losses, under upstream's name."""

from onnxtrain.offline.losses import *  # noqa: F403
from onnxtrain.offline.losses import __all__ as __all__
