"""Attention is found in the forms that the standard and torch's exporter give it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from native.harness import assert_near, gradient_with_functions, kinds_of, run_both

torch = pytest.importorskip("torch")
F = torch.nn.functional

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
FOUR = [[2, 4, 7, 8], [2, 4, 9, 8], [2, 4, 9, 6]]
GROUPED = [[2, 4, 7, 8], [2, 2, 9, 8], [2, 2, 9, 6]]
FLAT = [[2, 7, 32], [2, 9, 32], [2, 9, 32]]
FLAT_GROUPED = [[2, 7, 32], [2, 9, 16], [2, 9, 16]]


def compare(model: onnx.ModelProto, wrt: Sequence[str]) -> onnx.ModelProto:
    made = gradient_with_functions(model, list(wrt))
    rng = np.random.default_rng(3)
    feeds: dict[str, Any] = {}
    for info in made.graph.input:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        flags = info.type.tensor_type.elem_type == BOOL
        made_up = rng.random(shape) < 0.5 if flags else rng.standard_normal(shape)
        feeds[info.name] = made_up if flags else made_up.astype(np.float32)
        if flags:
            feeds[info.name][1] = False  # a query that sees no key
    assert {"AttentionGrad"} <= kinds_of(made)
    plain, native = run_both(made, feeds)
    assert_near(plain, native, 32)
    assert all(np.isfinite(n).all() for n in native)
    return made


@pytest.mark.parametrize(
    ("shapes", "mask", "attributes"),
    [
        (FOUR, None, {}),
        (FOUR, None, {"is_causal": 1}),
        (FOUR, FLOAT, {"scale": 0.1}),
        (FOUR, BOOL, {}),
        (GROUPED, None, {}),
        (GROUPED, FLOAT, {}),
        (GROUPED, BOOL, {"is_causal": 1}),
        (FLAT, None, {"q_num_heads": 4, "kv_num_heads": 4}),
        (FLAT_GROUPED, None, {"q_num_heads": 4, "kv_num_heads": 2}),
    ],
)
def test_the_operator_of_the_standard(
    shapes: list[list[int]], mask: int | None, attributes: dict[str, Any]
) -> None:
    inputs: list[tuple[str, int, list[int]]] = [
        (n, FLOAT, s) for n, s in zip("qkv", shapes, strict=True)
    ]
    if mask is not None:
        inputs.append(("m", mask, [7, 9]))
    width = shapes[2][-1] if len(shapes[0]) == 4 else 32
    graph = helper.make_graph(
        [
            helper.make_node("Attention", [n for n, _, _ in inputs], ["o"], **attributes),
            helper.make_node("MatMul", ["o", "w"], ["y"]),
        ],
        "attention",
        [
            *(helper.make_tensor_value_info(n, t, s) for n, t, s in inputs),
            helper.make_tensor_value_info("w", FLOAT, [width, 3]),
        ],
        [helper.make_tensor_value_info("y", FLOAT, [*shapes[0][:-1], 3])],
    )
    opset = [helper.make_opsetid("", 23)]
    made = compare(helper.make_model(graph, opset_imports=opset, ir_version=10), ["q", "k", "v"])
    assert sum(n.op_type == "Transpose" for n in made.graph.node) <= 1  # of w


class Layer(torch.nn.Module):  # type: ignore[misc]
    """Self attention as one writes it in torch."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.project, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: Any, m: Any) -> Any:
        parts = self.project(x).split(32, -1)
        q, k, v = (y.view(2, 7, 4, 8).transpose(1, 2) for y in parts)
        if self.form == "by hand":
            scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(m > 1, -1e9)
            mixed = scores.softmax(-1) @ v
        else:
            masks = {"none": None, "causal": None, "added": m, "flags": m > -1}
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=masks[self.form], is_causal=self.form == "causal"
            )
        return self.out(mixed.transpose(1, 2).reshape(2, 7, 32))


@pytest.mark.parametrize("form", ["none", "causal", "added", "flags", "by hand"])
def test_layers_of_torch(form: str) -> None:
    layer, file = Layer(form), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            layer, (torch.zeros(2, 7, 32), torch.zeros(7, 7)), file, dynamo=False, opset_version=18,
            training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
            input_names=["x", "m"], output_names=["y"],
        )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    made = compare(model, ["project.weight", "project.bias"])
    expected = {"AttentionOrZero" if form == "flags" else "Attention", "AttentionGrad"}
    assert expected <= kinds_of(made)
