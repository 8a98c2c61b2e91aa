"""Specs of rules/resize.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from gradcheck import Spec, check_gradient, check_spec, ids, run


def resized(
    id: str,
    shape: tuple[int, ...],
    scales: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
    roi: Sequence[float] | None = None,
    **attrs: Any,
) -> Spec:
    """A Spec of Resize; it is linear, so a step of one is exact."""
    inputs = [
        shape,
        None if roi is None else np.array(roi, np.float32),
        None if scales is None else np.array(scales, np.float32),
        *([] if sizes is None else [np.array(sizes, np.int64)]),
    ]
    opinion, run_time = attrs.pop("second_opinion", True), attrs.pop("run_time", False)
    return Spec(
        "Resize", inputs, attrs, id=id, constants=() if run_time else (1, 2, 3), wrt=[0], opset=19,
        eps=1.0, rtol=1e-4, second_opinion=opinion, single=(2,),
        symbolic=not run_time,  # a vector of unknown length leaves the rank of the result open
    )  # fmt: skip


SPECS = [
    # whole factors
    resized("nearest-x2", (2, 3, 3, 4), (1, 1, 2, 2),
            coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    resized("nearest-x2x3-half", (2, 3, 3, 4), (1, 1, 2, 3)),
    resized("nearest-1d-x3", (2, 3, 5), (1, 1, 3), nearest_mode="round_prefer_ceil"),
    resized("nearest-3d", (1, 2, 3, 2, 2), (1, 1, 2, 1, 3)),
    resized("nearest-batch-too", (2, 3), (2, 3)),
    resized("nearest-x2-sizes", (2, 3, 3, 4), sizes=(2, 3, 6, 8)),
    resized("nearest-x2-not-blocks", (2, 3, 3, 4), (1, 1, 2, 2),
            coordinate_transformation_mode="asymmetric", nearest_mode="ceil"),
    resized("same", (2, 3), (1, 1)),
    resized("linear-x2", (2, 3, 3, 4), (1, 1, 2, 2), mode="linear"),
    resized("linear-x3x1-torch", (2, 3, 3, 4), (1, 1, 3, 1), mode="linear",
            coordinate_transformation_mode="pytorch_half_pixel"),
    resized("linear-x4x5", (1, 2, 3, 1), (1, 1, 4, 5), mode="linear"),
    resized("linear-1d-x2", (2, 3, 4), (1, 1, 2), mode="linear",
            coordinate_transformation_mode="half_pixel_symmetric"),
    resized("linear-x2-corners", (2, 3, 3, 4), (1, 1, 2, 2), mode="linear",
            coordinate_transformation_mode="align_corners"),
    # any factor, every coordinate transformation
    *[
        resized(f"{mode}-{coordinates}-{'up' if up else 'down'}", (2, 2, 5, 6),
                (1, 1, 1.7, 2.3) if up else (1, 1, 0.6, 0.7),
                roi=(0, 0, -0.2, 0.1, 1, 1, 0.9, 1.3) if "crop" in coordinates else None,
                mode=mode, coordinate_transformation_mode=coordinates)
        for mode in ("nearest", "linear", "cubic")
        for coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric",
                            "half_pixel_symmetric", "tf_crop_and_resize")
        for up in (True, False)
    ],
    *[
        resized(f"nearest-{nearest}", (2, 2, 5, 6), (1, 1, 1.5, 0.75), nearest_mode=nearest)
        for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    ],
    resized("nearest-sizes", (2, 2, 5, 6), sizes=(2, 2, 7, 4)),
    resized("nearest-channels", (2, 2, 5, 6), (1.5, 2, 1, 1)),
    resized("nearest-1d", (7,), (1.7,)),
    resized("crop-extrapolated", (1, 1, 4, 4), sizes=(1, 1, 5, 6), mode="linear",
            roi=(0, 0, -0.3, 0.2, 1, 1, 1.2, 1.6), extrapolation_value=10.0,
            coordinate_transformation_mode="tf_crop_and_resize"),
    resized("crop-sequence", (2, 3, 8), sizes=(2, 3, 5), roi=(0, 0, 0.6, 1, 1, -0.1),
            coordinate_transformation_mode="tf_crop_and_resize"),
    resized("linear-channels-last", (2, 5, 6, 3), (1, 1.7, 0.7, 1), mode="linear"),
    resized("linear-2d", (5, 6), (1.7, 0.7), mode="linear"),
    resized("linear-1d", (2, 3, 7), (1, 1, 1.6), mode="linear"),
    resized("linear-3d", (2, 2, 3, 4, 5), (1, 1, 1.7, 0.8, 1.5), mode="linear"),
    resized("linear-3d-x2", (2, 2, 3, 4, 5), (1, 1, 2, 2, 2), mode="linear"),
    resized("cubic-coefficient", (2, 2, 5, 6), (1, 1, 1.7, 0.7), mode="cubic", cubic_coeff_a=-0.5),
    resized("cubic-exclude-outside", (2, 2, 5, 6), (1, 1, 1.7, 0.7), mode="cubic",
            exclude_outside=1),
    resized("linear-antialias", (2, 2, 5, 6), (1, 1, 0.6, 0.45), mode="linear", antialias=1),
    resized("linear-antialias-x2", (2, 2, 5, 6), (1, 1, 2, 2), mode="linear", antialias=1),
    resized("cubic-antialias", (2, 2, 7, 8), (1, 1, 0.6, 0.7), mode="cubic", antialias=1),
    resized("cubic-antialias-exclude", (2, 2, 7, 8), (1, 1, 0.6, 0.7), mode="cubic",
            antialias=1, exclude_outside=1),
    # axes and policies
    resized("axes", (2, 2, 5, 6), (0.7, 1.7), mode="linear", axes=[3, 2]),
    # the reference evaluator does not take negative axes
    resized("axes-negative-sizes", (2, 2, 5, 6), sizes=(9, 4), mode="linear", axes=[-1, -2],
            second_opinion=False),
    resized("axes-crop", (2, 2, 5, 6), sizes=(9, 4), mode="linear", axes=[2, 3],
            roi=(0.1, -0.2, 0.8, 1.1), coordinate_transformation_mode="tf_crop_and_resize"),
    *[
        resized(f"{mode}-{policy}", (2, 1, 5, 7), sizes=(8, 9), mode=mode, axes=[2, 3],
                keep_aspect_ratio_policy=policy)
        for mode in ("nearest", "linear", "cubic")
        for policy in ("not_larger", "not_smaller")
    ],
    resized("crop-not-larger", (2, 1, 5, 7), sizes=(8, 9), mode="linear", axes=[2, 3],
            roi=(0.1, -0.2, 0.8, 1.1), coordinate_transformation_mode="tf_crop_and_resize",
            keep_aspect_ratio_policy="not_larger"),
    # sizes, scales and regions that are known at run time only
    resized("run-time-scales", (2, 2, 5, 6), (1, 1, 1.7, 0.7), mode="linear", run_time=True),
    resized("run-time-scales-x2", (2, 2, 5, 6), (1, 1, 2, 2), run_time=True),
    resized("run-time-sizes", (2, 2, 5, 6), sizes=(2, 2, 8, 4), mode="cubic", run_time=True),
    resized("run-time-sizes-same", (2, 2, 5, 6), sizes=(2, 2, 5, 6), run_time=True),
    resized("run-time-sizes-axes", (2, 2, 5, 6), sizes=(4, 8), axes=[3, 2], mode="linear",
            run_time=True),
    resized("run-time-sequence", (2, 2, 7), (1, 1, 1.7), mode="linear", run_time=True),
    resized("run-time-crop", (2, 2, 5, 6), sizes=(2, 2, 8, 4), mode="linear", run_time=True,
            roi=(0, 0, -0.2, 0.1, 1, 1, 0.9, 1.3),
            coordinate_transformation_mode="tf_crop_and_resize"),
    resized("run-time-policy", (2, 1, 5, 7), sizes=(8, 9), mode="linear", axes=[2, 3],
            keep_aspect_ratio_policy="not_larger", run_time=True),
    # long axes
    resized("long-nearest", (1, 2, 1500), (1, 1, 1.3)),
    resized("long-linear", (1, 2, 1500), (1, 1, 1.3), mode="linear"),
    resized("long-linear-2d", (1, 1, 1100, 2), (1, 1, 0.75, 1.5), mode="linear"),
]  # fmt: skip


def region(id: str, roi: Sequence[float], sizes: Sequence[int], **attrs: Any) -> Spec:
    """A Spec of the gradient with respect to the region; no result lies on a pixel."""
    crops = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear", **attrs}
    inputs = [(2, 2, 5, 6), np.array(roi, np.float32), None, np.array(sizes, np.int64)]
    return Spec(
        "Resize", inputs, crops, id=id, constants=(2, 3), wrt=[1], opset=19, eps=1e-3,
        second_opinion=False,  # it takes float32 regions only
    )  # fmt: skip


INSIDE, HALF_OUTSIDE = (0.13, 0.17, 0.81, 0.89), (-0.23, 0.17, 0.81, 1.29)
SPECS += [
    region("region", (0.01, 0.02, 0.13, 0.17, 0.97, 0.96, 0.81, 0.89), (2, 2, 4, 7)),
    region("region-axes", INSIDE, (4, 7), axes=[3, 2]),
    region("region-half-outside", HALF_OUTSIDE, (4, 7), axes=[2, 3], extrapolation_value=3.0),
    region("region-one-pixel", INSIDE, (1, 1), axes=[2, 3]),
    region("region-cubic", INSIDE, (4, 7), mode="cubic", axes=[2, 3]),
    region("region-cubic-half-outside", HALF_OUTSIDE, (4, 7), mode="cubic", axes=[2, 3],
           exclude_outside=1),
    region("region-nearest", INSIDE, (4, 7), mode="nearest", axes=[2, 3]),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


TORCH = {
    "nearest": ({"mode": "nearest"},
                {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    "nearest-exact": ({"mode": "nearest-exact"}, {"nearest_mode": "round_prefer_ceil"}),
    "bilinear": ({"mode": "bilinear"},
                 {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    "bilinear-corners": ({"mode": "bilinear", "align_corners": True},
                         {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    "bicubic": ({"mode": "bicubic"},
                {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    "bicubic-corners": ({"mode": "bicubic", "align_corners": True},
                        {"mode": "cubic", "coordinate_transformation_mode": "align_corners"}),
    "bilinear-antialias": ({"mode": "bilinear", "antialias": True},
                           {"mode": "linear", "antialias": 1, "exclude_outside": 1}),
    "bicubic-antialias": ({"mode": "bicubic", "antialias": True},
                          {"mode": "cubic", "antialias": 1, "exclude_outside": 1,
                           "cubic_coeff_a": -0.5}),
}  # fmt: skip


@pytest.mark.parametrize("size", [(12, 14), (18, 28), (24, 21), (4, 5), (13, 3)], ids=str)
@pytest.mark.parametrize("name", TORCH)
def test_equals_torch(name: str, size: tuple[int, int]) -> None:
    options, attrs = TORCH[name]
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 3, 6, 7)).astype(np.float32)
    ct = rng.standard_normal((2, 3, *size)).astype(np.float32)
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], **attrs)
    graph = helper.make_graph(
        [node], "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 6, 7])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array((2, 3, *size)), "sizes")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    y, dx = run(onnxtrain.gradient(model, "x"), {"x": x, "y_grad": ct})
    tx = torch.tensor(x, requires_grad=True)
    ty = torch.nn.functional.interpolate(tx, size, **options)
    ty.backward(torch.tensor(ct))
    np.testing.assert_allclose(y, ty.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(dx, tx.grad.numpy(), atol=2e-5)


def test_grows_to_the_size_of_another_image() -> None:
    """As in a U-Net of images of any size: the sizes come from the shape of a skip connection."""
    image = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, "h", "w"]),
        helper.make_tensor_value_info("skip", TensorProto.FLOAT, ["n", 2, "H", "W"]),
    ]
    nodes = [
        helper.make_node("Shape", ["x"], ["unchanged"], start=0, end=2),
        helper.make_node("Shape", ["skip"], ["size"], start=2, end=4),
        helper.make_node("Concat", ["unchanged", "size"], ["sizes"], axis=0),
        helper.make_node("Resize", ["x", "", "", "sizes"], ["large"], mode="linear"),
        helper.make_node("Mul", ["large", "skip"], ["y"]),
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, "H", "W"])
    model = helper.make_model(
        helper.make_graph(nodes, "decoder", image, [y]),
        opset_imports=[helper.make_opsetid("", 18)], ir_version=8,
    )  # fmt: skip
    rng = np.random.default_rng(2)
    for size in ((8, 10), (4, 5), (7, 13)):
        feeds = {
            "x": rng.standard_normal((3, 2, 4, 5)).astype(np.float32),
            "skip": rng.standard_normal((3, 2, *size)).astype(np.float32),
        }
        extended = check_gradient(model, feeds, ["x", "skip"], of="y", eps=1.0, rtol=1e-4)
    # The number of channels is known to stay: nothing is decided at run time for it.
    assert sum(node.op_type == "If" for node in extended.graph.node) <= 3


def test_enlarging_by_whole_factors_needs_no_matrix() -> None:
    """The fast forms hold for images of any size, as long as scales and channels are known."""
    expected = {
        "nearest": ["AveragePool", "Mul"],
        "linear": ["Pad", "Conv"],
    }
    for mode, operators in expected.items():
        node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode=mode)
        graph = helper.make_graph(
            [node], "resize",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        x = np.random.default_rng(4).standard_normal((2, 3, 4, 5)).astype(np.float32)
        extended = check_gradient(model, {"x": x}, ["x"], of="y", eps=1.0, rtol=1e-4)
        assert [n.op_type for n in extended.graph.node] == ["Resize", *operators]


def test_the_gradient_of_a_slice_comes_with_wide_pads() -> None:
    """onnxruntime makes one operator of Pad and a pooling, and fails where pads are wide."""
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["large"], mode="nearest"),
        helper.make_node("Slice", ["large", "start", "end", "axes"], ["part"]),
        helper.make_node("Identity", ["part"], ["y"]),
    ]
    constants = {
        "scales": np.array([1, 1, 2, 2], np.float32),
        "start": np.array([2, 0]), "end": np.array([6, 6]), "axes": np.array([2, 3]),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes, "sliced",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = np.random.default_rng(5).standard_normal((1, 2, 4, 4)).astype(np.float32)
    check_gradient(model, {"x": x}, ["x"], of="y", eps=1.0, rtol=1e-4)
