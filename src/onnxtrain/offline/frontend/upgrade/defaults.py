"""Initializers that are also listed as inputs: constants by habit, or defaults to override."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.graph.op_facts import SHAPE_INPUTS

_DEFAULTS_AS_INPUTS_UNTIL = 4  # IR version from which an initializer need not be an input


def release_initializers(model: ir.Model) -> None:
    """Take initializers that are meant as constants out of the inputs.

    Up to IR version 3 every initializer was an input as well. Since then, an input with an
    initializer is one that the caller may override. Most are listed out of habit, though, and one
    that decides a shape (a target of Reshape, the axes of a sum) would hide what gradients have to
    know: it is no input of the result, and a runtime refuses a value for it.
    """
    old = model.ir_version < _DEFAULTS_AS_INPUTS_UNTIL
    inputs = model.graph.inputs
    inputs[:] = [v for v in inputs if not v.is_initializer() or not (old or _decides_shapes(v))]
    model.ir_version = max(model.ir_version, _DEFAULTS_AS_INPUTS_UNTIL)


def _decides_shapes(value: ir.Value) -> bool:
    """Tell whether nodes use a value for nothing but the shape of their result."""
    return bool(value.uses()) and all(
        node.domain == "" and index in SHAPE_INPUTS.get(node.op_type, ())
        for node, index in value.uses()
    )
