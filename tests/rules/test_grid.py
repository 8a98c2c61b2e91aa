"""Specs of rules/grid.py."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnxtrain
from gradcheck import Spec, check_spec, ids, run

MODES = ("linear", "nearest", "cubic")
PADDINGS = ("zeros", "border", "reflection")


def points(*shape: int, seed: int) -> np.ndarray:
    """Points in and around the image, away from where the interpolation has kinks.

    In images of 3 to 5 pixels a side, pixel centres and edges lie at multiples of 1/60.
    """
    rng = np.random.default_rng(seed)
    return ((rng.integers(-95, 95, shape) + rng.uniform(0.3, 0.7, shape)) / 60).astype(np.float32)


def sampled(id: str, mode: str, padding: str, corners: int, shape=(2, 3, 4, 5), opset=20) -> Spec:
    rank = len(shape) - 2
    grid = points(2, 3, *[2] * (rank - 1), rank, seed=len(id))
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    return Spec(
        "GridSample", [shape, grid], attrs, id=id, opset=opset, eps=1e-3, rtol=1e-2,
        # the reference evaluator lacks the older names and rounds to float32: see torch, below
        second_opinion=False,
    )  # fmt: skip


SPECS = [
    *[
        sampled(f"{mode}-{padding}-{corners}", mode, padding, corners)
        for mode in MODES for padding in PADDINGS for corners in (0, 1)
    ],
    *[
        sampled(f"3d-{mode}-{padding}", mode, padding, 1, shape=(2, 3, 3, 4, 5))
        for mode in MODES[:2] for padding in PADDINGS
    ],
    *[
        sampled(f"opset18-{mode}", mode, "zeros", 0, opset=18)
        for mode in ("bilinear", "nearest", "bicubic")
    ],
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


def grid_sample_model(rank: int, mode: str, padding: str, corners: int) -> onnx.ModelProto:
    node = helper.make_node(
        "GridSample", ["x", "grid"], ["y"], mode=mode, padding_mode=padding, align_corners=corners
    )
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * (rank + 2))
        for n in ("x", "grid")
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "grid_sample", inputs, [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


# A grid whose points lie on pixel centres, on the border and far outside, beside common ones.
SPECIAL = np.array([-1, -0.5, 0, 0.25, 1, -1.5, 1.5, -7.3, 9.1, 0.31])


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("rank", "mode"), [*[(2, m) for m in MODES], (3, "linear"), (3, "nearest")]
)
def test_equals_torch(rank: int, mode: str, padding: str, corners: int) -> None:
    rng = np.random.default_rng(3)
    shape = (1, 2, 3, 4, 5)[: rank + 2]
    x = rng.standard_normal(shape).astype(np.float32)
    columns = [rng.permutation(SPECIAL) for _ in range(rank)]
    if mode == "nearest":  # torch rounds after reflecting, onnxruntime before: keep off ties
        columns = [c + 0.013 for c in columns]
    grid = np.stack(columns, axis=-1).reshape(1, *[1] * (rank - 1), len(SPECIAL), rank)
    grid = grid.astype(np.float32)
    extended = onnxtrain.gradient(grid_sample_model(rank, mode, padding, corners), ["x", "grid"])
    tx, tgrid = (torch.tensor(a, requires_grad=True) for a in (x, grid))
    ty = torch.nn.functional.grid_sample(
        tx, tgrid, {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode), padding,
        bool(corners),
    )  # fmt: skip
    ct = rng.standard_normal(ty.shape).astype(np.float32)
    ty.backward(torch.tensor(ct))
    y, dx, dgrid = run(extended, {"x": x, "grid": grid, "y_grad": ct})
    np.testing.assert_allclose(y, ty.detach().numpy(), atol=2e-5)
    np.testing.assert_allclose(dx, tx.grad.numpy(), atol=2e-5)
    np.testing.assert_allclose(dgrid, tgrid.grad.numpy(), atol=2e-5)
