"""Operators without a rule, expanded by the function body that the ONNX standard gives them."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.autodiff.engine import ActivePath


def expand_by_definition(model: ir.Model, path: Callable[[], ActivePath]) -> None:
    """Expand the active nodes that have no rule but a function body, until none is left."""
