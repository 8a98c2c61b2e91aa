"""Training artifacts, under upstream's names."""

from onnxtrain.offline.artifacts import Artifacts
from onnxtrain.offline.generate_artifacts import LossType, OptimType, generate_artifacts

__all__ = ["Artifacts", "LossType", "OptimType", "generate_artifacts"]
