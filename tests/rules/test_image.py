"""Specs of rules/image.py."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from gradcheck import Spec, check_spec, ids, run


def int64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


SPECS = [
    Spec("DepthToSpace", [(2, 8, 3, 2)], {"blocksize": 2}, eps=1.0),
    Spec("DepthToSpace", [(2, 9, 1, 2)], {"blocksize": 3, "mode": "CRD"}, id="crd", eps=1.0),
    Spec("SpaceToDepth", [(2, 3, 4, 6)], {"blocksize": 2}, eps=1.0),
    Spec("Col2Im", [(2, 12, 12), int64(4, 5), int64(2, 2)], constants=(1, 2), eps=1.0),
    Spec("Col2Im", [(1, 12, 6), int64(5, 6), int64(2, 3)],
         {"strides": [2, 2], "dilations": [2, 1], "pads": [1, 0, 0, 1]},
         id="all-options", constants=(1, 2), eps=1.0),
    Spec("Col2Im", [(2, 6, 4), int64(6), int64(3)], id="1d", constants=(1, 2), eps=1.0),
    Spec("Col2Im", [(1, 8, 8), int64(3, 3, 3), int64(2, 2, 2)], id="3d", constants=(1, 2), eps=1.0),
    Spec("Col2Im", [(2, 6, 9), int64(2, 6), int64(1, 3)], {"pads": [0, 1, 1, 0], "strides": [1, 2]},
         id="run-time-shapes", eps=1.0),
    # the reference evaluator returns float32 for float64: torch is asked instead, below
    Spec("AffineGrid", [(2, 2, 3), int64(2, 3, 4, 5)], constants=(1,), opset=20, eps=1.0,
         second_opinion=False),
    Spec("AffineGrid", [(1, 2, 3), int64(1, 3, 4, 5)], {"align_corners": 1}, id="corners",
         constants=(1,), opset=20, eps=1.0, second_opinion=False),
    Spec("AffineGrid", [(2, 3, 4), int64(2, 3, 2, 4, 5)], id="3d", constants=(1,), opset=20,
         eps=1.0, second_opinion=False),
    # symbolic: the number of axes follows from the length of `size`, which has to be static
    Spec("AffineGrid", [(2, 2, 3), int64(2, 3, 4, 5)], id="run-time-size", opset=20, eps=1.0,
         symbolic=False, second_opinion=False),
    Spec("CenterCropPad", [(5, 6, 3, 4), int64(2, 3, 6, 7)], constants=(1,), eps=1.0),
    Spec("CenterCropPad", [(5, 6, 4), int64(8, 3)], {"axes": [-1, 0]}, id="axes", constants=(1,),
         eps=1.0),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


TORCH = {
    "pixel_shuffle": (
        "DepthToSpace", {"blocksize": 2, "mode": "CRD"}, [(2, 8, 3, 5)],
        lambda x: torch.nn.functional.pixel_shuffle(x, 2)),
    "fold": (
        "Col2Im", {"strides": [2, 1], "pads": [1, 2, 1, 2], "dilations": [1, 2]},
        [(2, 12, 28), int64(6, 7), int64(2, 3)],
        lambda x: torch.nn.functional.fold(x, (6, 7), (2, 3), (1, 2), (1, 2), (2, 1))),
    "affine_grid": (
        "AffineGrid", {"align_corners": 0}, [(2, 2, 3), int64(2, 1, 4, 5)],
        lambda x: torch.nn.functional.affine_grid(x, [2, 1, 4, 5], align_corners=False)),
    "affine_grid-corners-3d": (
        "AffineGrid", {"align_corners": 1}, [(2, 3, 4), int64(2, 1, 3, 4, 5)],
        lambda x: torch.nn.functional.affine_grid(x, [2, 1, 3, 4, 5], align_corners=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_equals_torch(name: str) -> None:
    op_type, attrs, (shape, *constants), function = TORCH[name]
    names = [f"c{i}" for i, _ in enumerate(constants)]
    graph = helper.make_graph(
        [helper.make_node(op_type, ["x", *names], ["y"], **attrs)], name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(c, n) for c, n in zip(constants, names, strict=True)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    rng = np.random.default_rng(5)
    x = rng.standard_normal(shape).astype(np.float32)
    tx = torch.tensor(x, requires_grad=True)
    ty = function(tx)
    ct = rng.standard_normal(ty.shape).astype(np.float32)
    ty.backward(torch.tensor(ct))
    y, dx = run(onnxtrain.gradient(model, "x"), {"x": x, "y_grad": ct})
    np.testing.assert_allclose(y, ty.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(dx, tx.grad.numpy(), atol=1e-5)
