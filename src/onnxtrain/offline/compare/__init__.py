"""Two models side by side: how good, how large and how fast each is, and where they differ."""

from onnxtrain.offline.compare.comparison import compare

__all__ = ["compare"]
