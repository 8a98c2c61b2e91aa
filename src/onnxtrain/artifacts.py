"""Training artifacts, under upstream's name."""

from onnxtrain.offline.prepare import Artifacts, LossType, OptimType, generate_artifacts

__all__ = ["Artifacts", "LossType", "OptimType", "generate_artifacts"]
