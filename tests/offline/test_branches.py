"""Ifs that are decided before run time: models in the text format of onnx."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxtrain
from gradcheck import check_gradient, run

# As the torchscript exporter writes squeeze(1): Squeeze where that axis has size one.
SQUEEZE = """
<ir_version: 10, opset_import: ["" : 18]>
model (float[2,{size},3] x) => (float[{out}] y)
    <int64 one = {{1}}, int64[1] axis = {{1}}> {{
    s = Shape(x)
    d = Gather(s, one)
    c = Equal(d, one)
    z = If (c) <
        then_branch = yes () => (float[2,3] p) {{ p = Squeeze(x, axis) }},
        else_branch = no () => (float[2,m,3] q) {{ q = Identity(x) }}>
    y = Mul(z, z)
}}
"""


def squeezed(size: object, out: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(SQUEEZE.format(size=size, out=out))


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize(("size", "shape"), [(1, (2, 3)), (4, (2, 4, 3))])
def test_a_shape_decides(size: int, shape: tuple[int, ...]) -> None:
    extended = onnxtrain.gradient(squeezed(size, ",".join(map(str, shape))), "x")
    assert "If" not in operators(extended)
    x = np.linspace(-1, 1, 6 * size, dtype=np.float32).reshape(2, size, 3)
    y, dx = run(extended, {"x": x, "y_grad": np.ones(shape, np.float32)})
    np.testing.assert_array_equal(y, (x * x).reshape(shape))
    np.testing.assert_array_equal(dx, 2 * x)


def test_a_symbolic_shape_decides_nothing() -> None:
    extended = onnxtrain.gradient(squeezed("n", "a,b"), "x")
    assert "If" in operators(extended)


def test_what_follows_needs_a_rank_that_one_branch_gives() -> None:
    text = SQUEEZE.replace("y = Mul(z, z)", "y = Gemm(z, w)").replace(
        "float[2,{size},3] x", "float[2,{size},3] x, float[3,4] w"
    )
    model = onnx.parser.parse_model(text.format(size="n", out="2,4"))
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 1, 3)), "w": rng.standard_normal((3, 4))}
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    assert "If" not in operators(check_gradient(model, single, ["x", "w"], "y"))


def test_the_names_of_its_outputs_survive() -> None:
    extended = onnxtrain.gradient(squeezed(1, "2,3"), ["z", "x"])
    x = np.full((2, 1, 3), 3.0, np.float32)
    y, dz, dx = run(extended, {"x": x, "y_grad": np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(y, np.full((2, 3), 9.0))
    np.testing.assert_array_equal(dz, np.full((2, 3), 6.0))
    np.testing.assert_array_equal(dx, np.full((2, 1, 3), 6.0))


def test_a_branch_that_is_not_taken_may_ask_for_what_is_not_there() -> None:
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 18]>
    model (float[2,3] x, bool c) => (float[2,3] y) <int64 one = {1}, int64 far = {5}> {
        y = If (c) <
            then_branch = yes () => (float[2,3] p) { p = Exp(x) },
            else_branch = no () => (float[2,3] p) {
                s = Shape(x)
                d = Gather(s, far)
                e = Equal(d, one)
                p = If (e) <
                    then_branch = inner_yes () => (float[2,3] q) { q = Sin(x) },
                    else_branch = inner_no () => (float[2,3] q) { q = Cos(x) }>
            }>
    }
    """)
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    check_gradient(model, {"x": x, "c": np.array(True)}, ["x"], "y")
