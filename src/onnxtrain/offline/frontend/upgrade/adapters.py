"""What changed in the operators between opset 7 and 18, and how a node follows the change.

`first_opsets` has the changes before that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.offline.frontend.upgrade.rewrite import (
    Adapter,
    Rewriter,
    adapter,
    is_used,
    set_attributes,
    set_input,
    set_inputs,
)
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.graph.op_facts import REDUCTIONS
from onnxtrain.offline.graph.shapes import constant_array, dims_of

# ---- attributes that became inputs ---------------------------------------------------------------


def to_inputs(*names: str) -> Adapter:
    """Return an adapter that moves attributes to the inputs from the second on."""

    def move(rewriter: Rewriter, node: ir.Node) -> None:
        for index, name in enumerate(names, start=1):
            rewriter.move_to_input(node, name, index)

    return move


adapter(9, "Upsample")(to_inputs("scales"))
adapter(10, "Slice")(to_inputs("starts", "ends", "axes"))
adapter(10, "TopK")(to_inputs("k"))
# Dropout does nothing from here on unless training is asked for. Before, the runtime was to know
# whether it trains; an exported model says that it does not.
adapter(12, "Dropout")(to_inputs("ratio"))
adapter(13, "Split")(to_inputs("split"))
# No axes at all still mean every one.
adapter(13, "ReduceSum", "Squeeze", "Unsqueeze")(to_inputs("axes"))
adapter(18, *(REDUCTIONS - {"ReduceSum"}))(to_inputs("axes"))


@adapter(18, "Split")
def split_evenly(rewriter: Rewriter, node: ir.Node) -> None:
    """Split without sizes has to say into how many parts."""
    if len(node.inputs) < 2 or node.inputs[1] is None:
        set_attributes(node, num_outputs=len(node.outputs))


@adapter(11, "Clip")
def clip_bounds(rewriter: Rewriter, node: ir.Node) -> None:
    """Clip takes its bounds as inputs, in the type of the data."""
    bounds = [node.attributes.pop(name, None) for name in ("min", "max")]
    if not any(bounds):
        return
    dtype = rewriter.dtype_of(node, node.inputs[0])
    for index, bound in enumerate(bounds, start=1):
        if bound is not None:
            set_input(node, index, rewriter.constant(node, bound.name, _number(bound.value, dtype)))


@adapter(11, "Pad")
def pad_widths(rewriter: Rewriter, node: ir.Node) -> None:
    """Pad takes the widths and the filling as inputs; zero is the default filling."""
    rewriter.move_to_input(node, "pads", 1)
    filling = node.attributes.pop("value", None)
    if filling is not None and filling.value != 0.0:
        dtype = rewriter.dtype_of(node, node.inputs[0])
        set_input(node, 2, rewriter.constant(node, "value", _number(filling.value, dtype)))


def _number(value: float, dtype: ir.DataType) -> np.ndarray[Any, Any]:
    """Return a scalar of a float type, where the largest float32 means the largest number."""
    limits = np.finfo(dtype.numpy())
    clamped = value if np.isinf(value) else np.clip(value, float(limits.min), float(limits.max))
    return np.array(clamped, dtype=dtype.numpy())


# ---- meanings that changed -----------------------------------------------------------------------


@adapter(13, "Softmax", "LogSoftmax", "Hardmax")
def softmax_over_one_axis(rewriter: Rewriter, node: ir.Node) -> None:
    """Before opset 13 the input was read as a matrix, split in front of `axis` (default: 1).

    From 13 on, the operator runs along `axis` alone. Where no more than one of the axes behind the
    split is longer than one, that axis is meant; else the input is really made a matrix.
    """
    x = node.inputs[0]
    assert x is not None
    axis = node.attributes.get_int("axis", 1)
    if axis == -1:
        return
    dims = dims_of(x)
    if dims is not None:
        behind = range(axis % max(len(dims), 1), len(dims))
        long = [i for i in behind if dims[i] != 1]
        if len(long) <= 1:
            set_attributes(node, axis=long[0] if long else len(dims) - 1)
            return
    matrix = rewriter.insert(node, "Flatten", [x], axis=axis)
    result = rewriter.insert(node, node.op_type, [matrix], axis=-1)
    shape = rewriter.insert(node, "Shape", [x])
    rewriter.become(node, "Reshape", [result, shape], allowzero=1)


@adapter(9, "BatchNormalization")
def batch_normalization_per_element(rewriter: Rewriter, node: ir.Node) -> None:
    """`spatial=0`, statistics for each element of a sample, became ordinary arithmetic."""
    spatial = node.attributes.pop("spatial", None)
    if spatial is None or spatial.value != 0:
        return
    if any(output.name for output in node.outputs[1:]):
        rewriter.refuse(
            node, "it is in training mode with spatial=0", "export the model in evaluation mode"
        )
    node.resize_outputs(1)
    x, scale, bias, mean, variance = node.inputs
    dtype = rewriter.dtype_of(node, x)
    epsilon = _number(node.attributes.get_float("epsilon", 1e-5), dtype)
    raised = rewriter.insert(node, "Add", [variance, rewriter.constant(node, "epsilon", epsilon)])
    deviation = rewriter.insert(node, "Sqrt", [raised])
    centred = rewriter.insert(node, "Sub", [x, mean])
    normal = rewriter.insert(node, "Div", [centred, deviation])
    scaled = rewriter.insert(node, "Mul", [normal, scale])
    rewriter.become(node, "Add", [scaled, bias])


@adapter(14, "BatchNormalization")
def batch_normalization_mode(rewriter: Rewriter, node: ir.Node) -> None:
    """Training mode, once told by the presence of further outputs, is an attribute."""
    if any(is_used(output) for output in node.outputs[3:]):
        rewriter.refuse(
            node,
            "its outputs saved_mean and saved_var, which newer opsets do not have, are used",
            "export the model without them",
        )
    training = any(output.name for output in node.outputs[1:])
    node.resize_outputs(3 if training else 1)
    if training:
        set_attributes(node, training_mode=1)


@adapter(10, "Dropout")
def dropout_mask_is_bool(rewriter: Rewriter, node: ir.Node) -> None:
    """The mask, once of the type of the data, is of booleans."""
    if len(node.outputs) < 2:
        return
    mask = node.outputs[1]
    node.resize_outputs(2)
    if not is_used(mask):
        node.resize_outputs(1)
        return
    rewriter.convert_output(node, 1, rewriter.dtype_of(node, node.inputs[0]))


@adapter(16, "RoiAlign")
def roi_align_coordinates(rewriter: Rewriter, node: ir.Node) -> None:
    """The default became half_pixel, which had not been there before."""
    set_attributes(node, coordinate_transformation_mode="output_half_pixel")


# ---- resizing ------------------------------------------------------------------------------------


@adapter(10, "Upsample")
def upsample_is_resize(rewriter: Rewriter, node: ir.Node) -> None:
    """Upsample gave way to Resize, which at first was the same."""
    node.op_type = "Resize"


@adapter(11, "Resize")
def resize_coordinates(rewriter: Rewriter, node: ir.Node) -> None:
    """Resize-10 knew one mapping of coordinates: x_original = x_resized / scale.

    Its nearest neighbour is the one below where an axis grows and the one above where it shrinks,
    as ONNX's own examples have it. One node of today can do one of the two, so an image that grows
    along one axis and shrinks along another is resized twice.
    """
    x, scales = node.inputs
    assert scales is not None
    mode = node.attributes.get_string("mode", "nearest")
    fixed = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    if mode != "nearest":
        rewriter.become(node, "Resize", [x, None, scales], **fixed)
        return
    known = constant_array(scales)
    if known is not None and (np.all(known >= 1) or np.all(known <= 1)):
        rounding = "floor" if np.all(known >= 1) else "ceil"
        rewriter.become(node, "Resize", [x, None, scales], **fixed, nearest_mode=rounding)
        return
    one = rewriter.constant(node, "one", np.ones((), np.float32))
    growth = rewriter.insert(node, "Max", [scales, one])
    larger = rewriter.insert(node, "Resize", [x, None, growth], **fixed, nearest_mode="floor")
    shrinkage = rewriter.insert(node, "Min", [scales, one])
    rewriter.become(node, "Resize", [larger, None, shrinkage], **fixed, nearest_mode="ceil")


# tf_half_pixel_for_nn lies half a pixel beyond half_pixel, so the roundings shift by one half.
_ROUNDING_FOR_HALF_PIXEL = {"floor": "round_prefer_ceil", "round_prefer_floor": "ceil"}


@adapter(13, "Resize")
def resize_inputs(rewriter: Rewriter, node: ir.Node) -> None:
    """Inputs that are not needed are left out, not empty; tf_half_pixel_for_nn is gone."""
    x, roi, scales, sizes = (*node.inputs, None, None)[:4]
    roi, scales, sizes = (None if _is_empty(v) else v for v in (roi, scales, sizes))
    set_inputs(node, [x, roi, None if sizes is not None else scales, sizes])
    if node.attributes.get_string("coordinate_transformation_mode", "") != "tf_half_pixel_for_nn":
        return
    rounding = node.attributes.get_string("nearest_mode", "round_prefer_floor")
    nearest = node.attributes.get_string("mode", "nearest") == "nearest"
    if not nearest or rounding not in _ROUNDING_FOR_HALF_PIXEL:
        rewriter.refuse(
            node,
            "the coordinates of tf_half_pixel_for_nn with this mode cannot be expressed any more",
            "export the model again, with the coordinates half_pixel",
        )
    set_attributes(
        node,
        coordinate_transformation_mode="half_pixel",
        nearest_mode=_ROUNDING_FOR_HALF_PIXEL[rounding],
    )


def _is_empty(value: ir.Value | None) -> bool:
    known = constant_array(value)
    return known is not None and known.size == 0


# ---- operators and types that are gone -----------------------------------------------------------


@adapter(11, "Scatter")
def scatter_is_scatter_elements(rewriter: Rewriter, node: ir.Node) -> None:
    """Scatter was renamed."""
    node.op_type = "ScatterElements"


@adapter(13, "Erf")
def erf_of_floats(rewriter: Rewriter, node: ir.Node) -> None:
    """Erf takes floats only."""
    x = node.inputs[0]
    if x is not None and x.dtype is not None and x.dtype.is_integer():
        rewriter.refuse(node, f"its input is of type {x.dtype}", "cast the input to a float type")


@adapter(9, "Scan")
def scan_with_batch_axis(rewriter: Rewriter, node: ir.Node) -> None:
    """Scan-8 ran over a batch axis as well: a Scan over the samples, each of which is scanned."""
    lengths, *inputs = node.inputs
    if lengths is not None:
        rewriter.refuse(
            node,
            "its samples have lengths of their own, and Scan has had no batch axis since opset 9",
            "export the model again with opset 9 or newer",
        )
    given = [v for v in inputs if v is not None]
    scanned = node.attributes.get_int("num_scan_inputs", 0)
    samples = [_part(rewriter, node, v) for v in given]
    inner = ir.node(
        "Scan", samples, {}, num_outputs=len(node.outputs),
        name=f"{label_of(node)}/sample",
    )  # fmt: skip
    directions = node.attributes.pop("directions", None)
    inner.attributes.add(node.attributes["body"])
    set_attributes(inner, num_scan_inputs=scanned)
    if directions is not None:
        inner.attributes.add(ir.AttrInt64s("scan_input_directions", directions.as_ints()))
    for old, new in zip(node.outputs, inner.outputs, strict=True):
        _part(rewriter, node, old, new)
    body = ir.Graph(samples, [*inner.outputs], nodes=[inner], name=f"{inner.name}_body")
    node.attributes.clear()
    set_attributes(node, body=body, num_scan_inputs=len(given))
    set_inputs(node, given)


def _part(
    rewriter: Rewriter, node: ir.Node, whole: ir.Value, part: ir.Value | None = None
) -> ir.Value:
    """Return one sample of a batch, named and typed."""
    part = part or ir.Value()
    part.name, part.type = rewriter.name(f"{label_of(node)}/{whole.name}"), whole.type
    dims = dims_of(whole)
    part.shape = None if dims is None else ir.Shape(dims[1:])
    return part
