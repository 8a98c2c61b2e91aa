"""Attributes with a fixed set of values: any other value is an error in the model.

onnx does not check them. A gradient rule would take its last branch for an unknown value, and the
mistake would show only when a runtime loads the result.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import ModelError

_AUTO_PAD = "NOTSET SAME_UPPER SAME_LOWER VALID"
_DIRECTION = "forward reverse bidirectional"
_LOSS = "none sum mean"
_SCATTER = "none add mul max min"

_ENUMS: dict[str, dict[str, str]] = {
    **{
        op: {"auto_pad": _AUTO_PAD}
        for op in "AveragePool Conv ConvTranspose LpPool MaxPool".split()
    },
    **{op: {"direction": _DIRECTION} for op in "GRU LSTM RNN".split()},
    **{op: {"reduction": _SCATTER} for op in "ScatterElements ScatterND".split()},
    **{
        op: {"reduction": _LOSS}
        for op in "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss".split()
    },
    "DepthToSpace": {"mode": "DCR CRD"},
    "Gelu": {"approximate": "none tanh"},
    "GridSample": {
        "mode": "bilinear nearest bicubic linear cubic",
        "padding_mode": "zeros border reflection",
    },
    "Pad": {"mode": "constant reflect edge wrap"},
    "Resize": {
        "mode": "nearest linear cubic",
        "coordinate_transformation_mode": "half_pixel half_pixel_symmetric pytorch_half_pixel "
        "align_corners asymmetric tf_crop_and_resize tf_half_pixel_for_nn",
        "nearest_mode": "round_prefer_floor round_prefer_ceil floor ceil",
        "keep_aspect_ratio_policy": "stretch not_larger not_smaller",
    },
    "RoiAlign": {
        "mode": "avg max",
        "coordinate_transformation_mode": "half_pixel output_half_pixel",
    },
}


def check_enum_attributes(model: ir.Model) -> None:
    """Raise a ModelError that names the first node with an unknown value."""
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        for name, words in _ENUMS.get(node.op_type, {}).items():
            attribute = node.attributes.get(name)
            if attribute is None or attribute.value in words.split():
                continue
            raise ModelError(
                f"{node.op_type} (node {node.name!r}) has {name}={attribute.value!r}, which is "
                f"none of {', '.join(words.split())}"
            )
