"""Values that are not finite, and that the model selects away: gradients stay finite.

Zero times an infinite derivative is NaN. The derivative of what the model computes is zero there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

import onnxtrain
from finite_differences import engine, miss
from gradcheck import vjp
from onnxtrain.offline.training_graph import build_training_graphs

Array = np.ndarray[Any, Any]
INF, NAN = np.inf, np.nan

# Each is a graph from x (and more inputs) to y, the inputs, and dx for a cotangent of ones.
PATTERNS = {
    "softmax-of-a-masked-row": (
        "p = Softmax(x) n = IsNaN(p) y = Where(n, zero, p)",
        {"x": [[-INF, -INF], [1, 2]]},
        [[0, 0], [0, 0]],
    ),
    "log-softmax-of-a-masked-row": (
        "p = LogSoftmax(x) n = IsNaN(p) y = Where(n, zero, p)",
        {"x": [[-INF, -INF], [0, 0]]},
        [[0, 0], [0, 0]],
    ),
    "log-of-softmax-picked": (
        "p = Softmax(x) l = Log(p) i = Constant<value_ints=[1, 0]>() "
        "y = NegativeLogLikelihoodLoss<reduction='sum'>(l, i)",
        {"x": [[-200, 200], [0, 0]]},
        [[0, 0], [-0.5, 0.5]],
    ),
    "log-sum-exp-of-nothing": (
        "a = Constant<value_ints=[1]>() l = ReduceLogSumExp<keepdims=0>(x, a) n = IsInf(l) "
        "y = Where(n, zero, l)",
        {"x": [[-INF, -INF], [0, 0]]},
        [[0, 0], [0.5, 0.5]],
    ),
    "division-by-zero": (
        "n = Equal(x, zero) d = Div(one, x) y = Where(n, zero, d)",
        {"x": [0, 2, -1]},
        [0, -0.25, -1],
    ),
    "divisor-replaced": (
        "n = Equal(x, zero) s = Where(n, one, x) d = Div(x, s) y = Where(n, zero, d)",
        {"x": [0, 2, -1]},
        [0, 0, 0],
    ),
    "reciprocal": (
        "n = Equal(x, zero) d = Reciprocal(x) y = Where(n, zero, d)",
        {"x": [0, 2, -1]},
        [0, -0.25, -1],
    ),
    "root-at-zero": (
        "n = Equal(x, zero) r = Sqrt(x) y = Where(n, zero, r)",
        {"x": [0, 4, 1]},
        [0, 0.25, 0.5],
    ),
    "root-of-a-negative-number": (
        "n = Less(x, zero) r = Sqrt(x) y = Where(n, x, r)",
        {"x": [-3, 4, 1]},
        [1, 0.25, 0.5],
    ),
    "root-times-zero": (
        "r = Sqrt(x) y = Mul(r, x2)",
        {"x": [0, 4, 1], "x2": [0, 0, 2]},
        [0, 0, 1],
    ),
    "logarithm-at-zero": (
        "n = Greater(x, zero) l = Log(x) y = Where(n, l, zero)",
        {"x": [0, 4, -1]},
        [0, 0.25, 0],
    ),
    "logarithm-clipped": (
        "l = Log(x) low = Constant<value_float=-100.0>() y = Clip(l, low)",
        {"x": [0, 4, 0.5]},
        [0, 0.25, 2],
    ),
    "logarithm-sliced-away": (
        "l = Log(x) a = Constant<value_ints=[1]>() b = Constant<value_ints=[3]>() "
        "y = Slice(l, a, b)",
        {"x": [0, 4, 0.5]},
        [0, 0.25, 2],
    ),
    "power-at-zero": (
        "e = Constant<value_float=0.5>() n = Equal(x, zero) r = Pow(x, e) y = Where(n, zero, r)",
        {"x": [0, 4, 1]},
        [0, 0.25, 0.5],
    ),
    "softplus-that-overflows": (
        "t = Constant<value_float=20.0>() n = Greater(x, t) e = Exp(x) s = Add(e, one) l = Log(s) "
        "y = Where(n, x, l)",
        {"x": [0, 1000, 500]},
        [0.5, 1, 1],
    ),
    "sigmoid-that-overflows": (
        "m = Neg(x) e = Exp(m) s = Add(e, one) y = Div(one, s)",
        {"x": [0, -1000, 1000]},
        [0.25, 0, 0],
    ),
    "missing-targets": (
        "n = IsNaN(x2) d = Sub(x, x2) e = Mul(d, d) y = Where(n, zero, e)",
        {"x": [1, 2, 3], "x2": [NAN, 1, NAN]},
        [0, 2, 0],
    ),
    "missing-targets-of-a-mask": (
        "d = Sub(x, x2) e = Abs(d) m = Cast<to=9>(x3) y = Where(m, e, zero)",
        {"x": [1, 2, 3], "x2": [NAN, 1, INF], "x3": [0, 1, 0]},
        [0, 1, 0],
    ),
    "infinite-factor": (
        "h = Mul(x, x2) m = Cast<to=9>(x3) y = Where(m, h, zero)",
        {"x": [1, 2, 3], "x2": [INF, 5, -INF], "x3": [0, 1, 0]},
        [0, 5, 0],
    ),
    "product-with-a-row-of-nan": (
        "n = Equal(x, zero) r = Div(one, x) w = Constant<value=float[1, 1] {3}>() "
        "h = MatMul(r, w) y = Where(n, zero, h)",
        {"x": [[0], [2], [-1]]},
        [[0], [-0.75], [-3]],
    ),
    "unit-vector-of-zero": (
        "q = Mul(x, x) a = Constant<value_ints=[1]>() s = ReduceSum(q, a) r = Sqrt(s) "
        "u = Div(x, r) n = Equal(r, zero) y = Where(n, x, u)",
        {"x": [[0, 0], [0, 3]]},
        [[1, 1], [1 / 3, 0]],
    ),
}  # fmt: skip


def model_of(body: str, inputs: dict[str, Any], opset: int = 18) -> onnx.ModelProto:
    arrays = {name: np.array(value, np.float32) for name, value in inputs.items()}
    declared = ", ".join(
        f"float[{', '.join(map(str, array.shape))}] {name}" for name, array in arrays.items()
    )
    body = body.replace("'sum'", '"sum"')
    parts = "\n".join(part.strip() for part in body.replace(") ", ")\n").splitlines())
    text = f"""
        <ir_version: 10, opset_import: ["" : {opset}]>
        agraph ({declared}) => (float[] y)
        <float zero = {{0}}, float one = {{1}}> {{
            {parts}
        }}
    """
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_selected_away_has_no_gradient(name: str) -> None:
    body, inputs, expected = PATTERNS[name]
    feeds = {k: np.array(v, np.float32) for k, v in inputs.items()}
    model = model_of(body, inputs)
    y = engine(model, feeds)(feeds, "y")
    assert np.isfinite(y).all()
    (found,) = vjp(model, feeds, ["x"], np.ones_like(y))
    np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PATTERNS)
def test_second_derivatives_are_finite_too(name: str) -> None:
    body, inputs, _ = PATTERNS[name]
    feeds = {k: np.array(v, np.float32) for k, v in inputs.items()}
    model = model_of(body, inputs)
    feeds["y_grad"] = np.ones_like(engine(model, feeds)(feeds, "y"))
    first = onnxtrain.gradient(model, ["x"])
    wrt = ["x"] if name != "infinite-factor" else []  # it is linear
    wrt += [v.name for v in first.graph.input if v.name == "y_grad"]
    second = onnxtrain.gradient(first, wrt, of="x_grad")
    seed = next(v.name for v in second.graph.input if v.name not in feeds)
    feeds[seed] = np.ones_like(feeds["x"])
    run = engine(second, feeds)
    for output in [v.name for v in second.graph.output][len(first.graph.output) :]:
        assert np.isfinite(run(feeds, output)).all()


def test_a_cotangent_of_zero_is_kept_for_second_derivatives() -> None:
    """At a minimum the cotangent is zero by chance: the derivative by it is not."""
    model = model_of("l = Log(x) d = Sub(l, x2) y = Mul(d, d)", {"x": [2, 3], "x2": [0, 0]})
    first = onnxtrain.gradient(model, ["x"])
    second = onnxtrain.gradient(first, ["x"], of="x_grad")
    x = np.array([2, 3], np.float32)
    ones = np.ones_like(x)
    feeds = {"x": x, "x2": np.log(x), "y_grad": ones, "x_grad_grad": ones}
    name = [v.name for v in second.graph.output][-1]
    np.testing.assert_allclose(engine(second, feeds)(feeds, name), 2 / x**2, rtol=1e-4)


class Attention(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class MaskedLogSoftmax(torch.nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        found = F.log_softmax(x.masked_fill(~mask, float("-inf")), -1)
        return torch.where(mask, found, torch.zeros_like(found))


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("network", [Attention, MaskedLogSoftmax])
@pytest.mark.filterwarnings("ignore")  # of the exporters
def test_rows_that_torch_masks(network: Any, dynamo: bool, tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    mask = np.tril(np.ones((4, 4), bool))
    shapes = {"q": (1, 2, 4, 3), "k": (1, 2, 4, 3), "v": (1, 2, 4, 3)}
    if network is MaskedLogSoftmax:
        shapes = {"x": (4, 4)}
    mask[1 if not dynamo or network is MaskedLogSoftmax else 0, :] = False
    if dynamo and network is Attention:
        mask[0, 0] = True  # it writes the least number for -inf: a row of these is no row of NaN
    feeds: dict[str, Any] = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()
    }
    given = (*(torch.tensor(a) for a in feeds.values()), torch.tensor(mask))
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        network(), given, path, dynamo=dynamo, input_names=[*feeds, "mask"], output_names=["y"]
    )
    model = onnx.load(path)
    feeds["mask"] = mask
    run = engine(model, feeds)
    y = run(feeds, "y")
    ct = rng.standard_normal(y.shape).astype(np.float32)
    found = dict(zip(shapes, vjp(model, feeds, list(shapes), ct, of="y"), strict=True))
    assert all(np.isfinite(gradient).all() for gradient in found.values())
    assert miss(run, feeds, "y", found, ct, y) <= 1


def test_weights_behind_a_masked_softmax_train() -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        agraph (float[n, 3] x, float[n, 3] mask) => (float loss)
        <float[3, 3] w = {1, 0, 0, 0, 1, 0, 0, 0, 1}, float zero = {0}, float least = {-inf}> {
            h = MatMul(x, w)
            b = Cast<to=9>(mask)
            s = Where(b, h, least)
            p = Softmax(s)
            q = IsNaN(p)
            a = Where(q, zero, p)
            z = Mul(a, x)
            loss = ReduceSum<keepdims=0>(z)
        }
    """
    graphs = build_training_graphs(onnx.parser.parse_model(text), ["loss"], ["w"])
    session = ort.InferenceSession(graphs.training.SerializeToString())
    feeds = {
        "x": np.float32([[1, 2, 3], [4, 5, 6]]),
        "mask": np.float32([[0, 0, 0], [1, 1, 0]]),
        "w": np.eye(3, dtype=np.float32),
        "w_grad.accumulation.buffer": np.zeros((3, 3), np.float32),
        "lazy_reset_grad": np.array([True]),
    }
    (gradient,) = session.run(["w_grad.accumulation.out"], feeds)
    p = np.exp([4, 5]) / np.exp([4, 5]).sum()
    slope = p[0] * p[1]
    expected = np.outer([4, 5, 6], [-slope, slope, 0])
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
