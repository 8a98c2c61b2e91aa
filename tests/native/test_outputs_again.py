"""Gelu and LayerNormalization before a linear layer: their gradients compute the outputs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run, run_both
from native.kernel_calls import call

Array = np.ndarray[Any, Any]
F = torch.nn.functional
SHAPES = [(4, 8), (2, 3, 5), (70, 33), (1, 1, 1), (3, 2000), (0, 4)]
LAYERS: dict[str, tuple[Any, set[str], Any]] = {
    "gelu": (
        helper.make_node("Gelu", ["x"], ["z"]),
        {"GeluOnce", "GeluGradAgain"},
        lambda x, *_: F.gelu(x),
    ),
    "tanh": (
        helper.make_node("Gelu", ["x"], ["z"], approximate="tanh"),
        {"GeluTanhOnce", "GeluTanhGradAgain"},
        lambda x, *_: F.gelu(x, approximate="tanh"),
    ),
    "norm": (
        helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["z"]),
        {"LayerNormOnce", "LayerNormGradAgain"},
        lambda x, scale, bias: F.layer_norm(x, x.shape[-1:], scale, bias),
    ),
    "norm_without_bias": (
        helper.make_node("LayerNormalization", ["x", "scale"], ["z"]),
        {"LayerNormOnce", "LayerNormGradAgain"},
        lambda x, scale: F.layer_norm(x, x.shape[-1:], scale),
    ),
}


def model_of(layer: Any, shape: tuple[int, ...], *more: Any, outputs: tuple[str, ...] = ("y",)):
    """y = tanh(z w), where the layer makes z of x."""
    product = helper.make_node("MatMul", ["z", "w"], ["product"])
    nodes = [layer, product, helper.make_node("Tanh", ["product"], ["y"]), *more]
    sizes = {"x": shape, **dict.fromkeys(layer.input[1:], shape[-1:]), "w": (shape[-1], 3)}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in sizes.items()]
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    graph = helper.make_graph(nodes, "graph", inputs, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def feeds_of(model: Any) -> dict[str, Array]:
    random, feeds = np.random.default_rng(0), {}
    for value in (*model.graph.input, model.graph.output[0]):
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        name = "y_grad" if value.name == "y" else value.name
        feeds[name] = random.normal(size=dims).astype(np.float32)
    feeds["w"] /= np.float32(max(1, len(feeds["w"])) ** 0.5)  # tanh has a slope there
    return feeds


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_like_the_function_and_torch(name: str, shape: tuple[int, ...]) -> None:
    layer, kinds, compute = LAYERS[name]
    model = model_of(layer, shape)
    feeds, names = feeds_of(model), [value.name for value in model.graph.input]
    made = gradient_with_functions(model, names)
    assert kinds_of(made) == {*kinds, "TanhGrad"}
    plain, native = run_both(made, feeds)
    if shape[-1] > 1 or name.startswith(("gelu", "tanh")):
        assert_near(plain, native, ulps=128)
    values = [torch.tensor(feeds[n], dtype=torch.float64, requires_grad=True) for n in names]
    y = torch.tanh(compute(*values[:-1]) @ values[-1])
    y.backward(torch.tensor(feeds["y_grad"], dtype=torch.float64))
    for found, wanted in zip(native, [y.detach(), *(v.grad for v in values)], strict=True):
        assert wanted is not None
        room = 1e-5 * (2 + float(wanted.abs().max() if wanted.numel() else 0.0))
        np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=room)


def test_the_output_does_not_go_from_pass_to_pass() -> None:
    layer, _, _ = LAYERS["gelu"]
    made = gradient_with_functions(model_of(layer, (4, 8)), ["x", "w"])
    product = next(n for n in made.graph.node if n.op_type == "Gemm" and "w_grad" in n.output)
    (gradient,) = (n for n in made.graph.node if n.op_type.startswith("GeluGradAgain"))
    assert gradient.output[1] in product.input


def test_an_output_that_others_read_is_kept() -> None:
    layer, _, _ = LAYERS["gelu"]
    tanh = helper.make_node("Tanh", ["z"], ["t"])
    for model in (
        model_of(layer, (4, 8), outputs=("y", "z")),
        model_of(layer, (4, 8), tanh, outputs=("y", "t")),
    ):
        made = gradient_with_functions(model, ["x", "w"], of="y")
        assert "GeluOnce" not in kinds_of(made)
        assert_near(*run_both(made, feeds_of(model)))


def test_without_a_gradient_of_the_weight_nothing_is_computed_again() -> None:
    for name in ("gelu", "norm"):
        made = gradient_with_functions(model_of(LAYERS[name][0], (4, 8)), ["x"])
        assert not any("Again" in kind for kind in kinds_of(made))


def test_same_numbers_whatever_the_threads() -> None:
    for name in ("gelu", "norm"):
        model = model_of(LAYERS[name][0], (3000, 65))
        made = gradient_with_functions(model, [value.name for value in model.graph.input])
        first, second = (run(made, feeds_of(model), native=True, threads=n) for n in (1, 2))
        np.testing.assert_array_equal(first[1], second[1])


def test_what_does_not_fit_is_an_error() -> None:
    x, three, four, rows = (np.ones(s, np.float32) for s in ((2, 4), (3,), (4,), (2, 1)))
    empty = np.zeros(0, np.float32)
    with pytest.raises(Exception, match="needs 6 inputs"):
        call("LayerNormGradAgain", [x, x, four, rows, rows], 4)
    with pytest.raises(Exception, match="4 outputs"):
        call("LayerNormGradAgain", [x, x, four, rows, rows, empty], 3)
    with pytest.raises(Exception, match="another size than the rows"):
        call("LayerNormGradAgain", [x, x, four, rows, rows, empty, three], 4, has_bias=1)
    with pytest.raises(Exception, match="different shapes"):
        call("GeluGradAgain", [x, four, empty], 2)
