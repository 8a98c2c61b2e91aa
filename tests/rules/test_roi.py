"""Specs of rules/roi.py."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxtrain
from gradcheck import Spec, check_spec, ids, run

# Inside, half outside, far outside, smaller than a pixel, and one that is inside out.
ROIS = np.array(
    [[0.7, 0.8, 5.3, 4.1], [-2.2, 1.6, 3.4, 9.7], [20.1, 20.2, 30.3, 30.4], [2.1, 3.2, 2.4, 3.3],
     [4.3, 4.1, 1.2, 0.9]], np.float32,
)  # fmt: skip
REGIONS = np.array(
    [[0.71, 0.83, 5.32, 4.14], [1.27, 1.66, 3.41, 3.72], [20.1, 20.2, 30.3, 30.4]], np.float32
)
IMAGES = np.array([1, 0, 1, 1, 0], np.int64)


def aligned(id: str, mode: str, transformation: str, ratio: int, **more: float) -> Spec:
    attrs = {
        "mode": mode, "coordinate_transformation_mode": transformation, "sampling_ratio": ratio,
        "output_height": 2, "output_width": 3, **more,
    }  # fmt: skip
    linear = mode == "avg"
    return Spec(
        "RoiAlign", [(2, 3, 5, 6), ROIS, IMAGES], attrs, id=id, wrt=[0],
        apart=0.0 if linear else 0.02, eps=1.0 if linear else 1e-3, rtol=1e-4 if linear else 1e-2,
    )  # fmt: skip


SPECS = [
    aligned(f"{mode}-{transformation}-{ratio}", mode, transformation, ratio)
    for mode in ("avg", "max")
    for transformation in ("half_pixel", "output_half_pixel")
    for ratio in (0, 1, 2)
] + [
    aligned("scaled", "avg", "half_pixel", 0, spatial_scale=0.5),
    Spec("RoiAlign", [(1, 2, 5, 6), ROIS, IMAGES * 0], {"output_height": 2, "output_width": 2},
         id="one-image", wrt=[0], eps=1.0, rtol=1e-4),
    Spec("RoiAlign", [(1, 2, 5, 6), ROIS, IMAGES * 0], id="defaults", wrt=[0], eps=1.0,
         rtol=1e-4),
    # regions none of whose samples lie on a pixel, or on the border of the image
    *[
        Spec("RoiAlign", [(2, 3, 5, 6), REGIONS, np.array([1, 0, 1])],
             {"mode": mode, "sampling_ratio": ratio, "output_height": 2, "output_width": 3},
             id=f"regions-{mode}-{ratio}", wrt=[1], apart=0.02, eps=1e-3, opset=18)
        for mode in ("avg", "max")
        for ratio in (0, 2)
    ],
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


def model_of(mode: str, regions: int | str) -> onnx.ModelProto:
    node = helper.make_node(
        "RoiAlign", ["x", "rois", "batch"], ["y"], mode=mode, sampling_ratio=1,
        coordinate_transformation_mode="output_half_pixel",
    )  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 3, 3]),
        helper.make_tensor_value_info("rois", TensorProto.FLOAT, [regions, 4]),
        helper.make_tensor_value_info("batch", TensorProto.INT64, [regions]),
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "roi_align", inputs, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_ties_of_the_maximum_share_equally() -> None:
    """Of one sample amid four equal pixels each corner has a quarter of the weight, and wins."""
    feeds = {
        "x": np.ones((1, 1, 3, 3), np.float32),
        "rois": np.array([[0, 0, 1, 1]], np.float32),
        "batch": np.zeros(1, np.int64),
        "y_grad": np.full((1, 1, 1, 1), 16, np.float32),
    }
    _, dx = run(onnxtrain.gradient(model_of("max", 1), "x"), feeds)
    np.testing.assert_array_equal(dx[0, 0], [[1, 1, 0], [1, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_no_regions_give_no_gradient(mode: str) -> None:
    feeds = {
        "x": np.ones((1, 1, 3, 3), np.float32),
        "rois": np.zeros((0, 4), np.float32),
        "batch": np.zeros(0, np.int64),
        "y_grad": np.zeros((0, 1, 1, 1), np.float32),
    }
    _, dx = run(onnxtrain.gradient(model_of(mode, "regions"), "x"), feeds)
    np.testing.assert_array_equal(dx, np.zeros((1, 1, 3, 3)))
