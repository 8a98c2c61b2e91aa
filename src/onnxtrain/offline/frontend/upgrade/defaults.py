"""Initializers that are listed as inputs too: constants by habit, or defaults to override."""

from __future__ import annotations

import onnx_ir as ir

_DEFAULTS_AS_INPUTS_UNTIL = 4  # IR version from which an initializer need not be an input

# Where operators read the shape of their result.
_SHAPE_INPUTS = {
    1: "CenterCropPad Col2Im CumSum Expand OneHot Pad ReduceL1 ReduceL2 ReduceLogSum "
    "ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Reshape "
    "Resize Slice Split Squeeze Tile TopK Trilu Unsqueeze Upsample",
    0: "ConstantOfShape",
    2: "Col2Im MaxUnpool Resize Slice",
    3: "Pad Resize Slice",
    4: "Slice",
}
_READS_SHAPE = frozenset((op, index) for index, ops in _SHAPE_INPUTS.items() for op in ops.split())


def release_initializers(model: ir.Model) -> None:
    """Take initializers that are meant as constants out of the inputs.

    Up to IR version 3 every initializer was an input as well. Later, an input with an initializer
    is one that the caller may override; most are listed out of habit, though, and one that decides
    a shape (a target of Reshape, the axes of a sum) would leave open what gradients have to know.
    Such a one cannot be given any more; a runtime refuses the attempt.
    """
    old = model.ir_version < _DEFAULTS_AS_INPUTS_UNTIL
    inputs = model.graph.inputs
    inputs[:] = [v for v in inputs if not v.is_initializer() or not (old or _decides_shapes(v))]
    model.ir_version = max(model.ir_version, _DEFAULTS_AS_INPUTS_UNTIL)


def _decides_shapes(value: ir.Value) -> bool:
    """Tell whether nodes use a value for nothing but the shape of their result."""
    return bool(value.uses()) and all(
        node.domain == "" and (node.op_type, index) in _READS_SHAPE for node, index in value.uses()
    )
