"""The elementary blocks, under upstream's name."""

from onnxtrain.offline.blocks.operators import *  # noqa: F403
from onnxtrain.offline.blocks.operators import __all__ as __all__
