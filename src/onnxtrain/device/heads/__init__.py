"""Heads without steps: the last layer computed from features in closed form."""

from onnxtrain.device.heads.fit_head import HeadFit, fit_head

__all__ = ["HeadFit", "fit_head"]
