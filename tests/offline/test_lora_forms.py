"""Low-rank factors beside each form of layer: slots compute base + (x·A)·B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.offline.lora import Lora
from onnxtrain.offline.passes.lora.add import add_lora
from onnxtrain.offline.writer.base_data import BaseData

DEPTH, WIDTH, RANK = 32, 48, 3
MICROSOFT = "com.microsoft"
RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return (RANDOM.standard_normal(shape) * 0.2).astype(np.float32)


def integers(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.integers(-100, 100, shape).astype(np.int8)


def node(op: str, inputs: str, output: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    names = ["" if name == "_" else name for name in inputs.split()]
    return helper.make_node(
        op, names, output.split(), f"node_{output}", domain=domain, **attributes
    )


@dataclass
class Form:
    """A model of one layer, of x to y, and how its update is computed from x."""

    name: str
    nodes: list[onnx.NodeProto]
    tensors: dict[str, np.ndarray[Any, Any]]
    x: tuple[int, ...] = (2, 5, DEPTH)
    update: Callable[..., Any] = lambda x, a, b: x @ a @ b
    widths: dict[str, int] = field(default_factory=lambda: {"layer": WIDTH})
    depth: int = DEPTH
    path: str = "layer"

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "layer", [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.x)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value, name) for name, value in self.tensors.items()],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 19), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


W = floats(DEPTH, WIDTH)
QUANTIZED = {
    "layer.weight": integers(DEPTH, WIDTH), "w_scale": np.float32(0.01), "w_zero": np.int8(0),
    "x_scale": np.float32(0.02), "x_zero": np.uint8(128), "y_scale": np.float32(0.05),
    "y_zero": np.uint8(120),
}  # fmt: skip
EXPAND_X = [
    node("QuantizeLinear", "x x_scale x_zero", "xq"),
    node("DequantizeLinear", "xq x_scale x_zero", "xd"),
]


def rounded(x: Any) -> Any:
    """Return x as its quantizer leaves it."""
    steps = np.clip(np.rint(x / np.float32(0.02)) + 128, 0, 255) - 128
    return (steps * np.float32(0.02)).astype(np.float32)


FORMS = [
    Form("MatMul", [node("MatMul", "x layer.weight", "y")], {"layer.weight": W}),
    Form(
        "MatMul-bias",
        [node("MatMul", "x layer.weight", "p"), node("Add", "layer.bias p", "y")],
        {"layer.weight": W, "layer.bias": floats(WIDTH)},
    ),
    Form(
        "MatMul-transposed",
        [node("Transpose", "layer.weight", "t", perm=[1, 0]), node("MatMul", "x t", "y")],
        {"layer.weight": W.T.copy()},
    ),
    Form(
        "MatMul-left", [node("MatMul", "layer.weight x", "y")], {"layer.weight": W.T.copy()},
        (2, DEPTH, 5), lambda x, a, b: b.T @ (a.T @ x),
    ),
    Form(
        "Gemm", [node("Gemm", "x layer.weight layer.bias", "y", alpha=0.5, beta=2.0)],
        {"layer.weight": W, "layer.bias": floats(WIDTH)}, (4, DEPTH),
    ),
    Form(
        "Gemm-transposed", [node("Gemm", "x layer.weight", "y", transA=1, transB=1)],
        {"layer.weight": W.T.copy()}, (DEPTH, 4), lambda x, a, b: x.T @ a @ b,
    ),
    Form(
        "FusedMatMul", [node("FusedMatMul", "x layer.weight", "y", MICROSOFT, transB=1)],
        {"layer.weight": W.T.copy()},
    ),
    Form(
        "MatMulNBits",
        [node("MatMulNBits", "x model.layers.0.attn.o_proj.MatMul.weight_Q4 s", "y", MICROSOFT,
              K=DEPTH, N=WIDTH, bits=4, block_size=32)],
        {"model.layers.0.attn.o_proj.MatMul.weight_Q4":
            RANDOM.integers(0, 256, (WIDTH, 1, 16)).astype(np.uint8),
         "s": np.full(WIDTH, 0.02, np.float32)},
        widths={"model.layers.0.self_attn.o_proj": WIDTH},
    ),
    Form(
        "QDQ",
        [*EXPAND_X, node("DequantizeLinear", "layer.weight w_scale w_zero", "w"),
         node("MatMul", "xd w", "p"), node("QuantizeLinear", "p y_scale y_zero", "q"),
         node("DequantizeLinear", "q y_scale y_zero", "y")],
        QUANTIZED, update=lambda x, a, b: rounded(x) @ a @ b,
    ),
    Form(
        "Cast-Mul",
        [node("Cast", "layer.weight", "c", to=1), node("Mul", "c w_scale", "w"),
         node("MatMul", "x w", "y")],
        {"layer.weight": integers(DEPTH, WIDTH), "w_scale": np.full(WIDTH, 0.01, np.float32)},
    ),
    Form(
        "MatMulInteger",
        [node("DynamicQuantizeLinear", "x", "xq xs xz"),
         node("MatMulInteger", "xq layer.weight xz w_zero", "i"), node("Cast", "i", "c", to=1),
         node("Mul", "xs w_scale", "s"), node("Mul", "c s", "p"), node("Add", "p layer.bias", "y")],
        {"layer.weight": integers(DEPTH, WIDTH), "w_scale": np.float32(0.01),
         "w_zero": np.int8(0), "layer.bias": floats(WIDTH)},
    ),
    Form(
        "DynamicQuantizeMatMul",
        [node("DynamicQuantizeMatMul", "x layer.weight w_scale", "y", MICROSOFT)],
        {"layer.weight": integers(DEPTH, WIDTH), "w_scale": np.float32(0.01)},
    ),
    Form(
        "MatMulIntegerToFloat",
        [node("DynamicQuantizeLinear", "x", "xq xs xz"),
         node("MatMulIntegerToFloat", "xq layer.weight xs w_scale xz", "y", MICROSOFT)],
        {"layer.weight": integers(DEPTH, WIDTH), "w_scale": np.float32(0.01)},
    ),
    Form(
        "QLinearMatMul",
        [node("QuantizeLinear", "x x_scale x_zero", "xq"),
         node("QLinearMatMul",
              "xq x_scale x_zero layer.weight w_scale w_zero y_scale y_zero", "q"),
         node("DequantizeLinear", "q y_scale y_zero", "y")],
        QUANTIZED,
    ),
    Form(
        "Conv-1x1", [node("Conv", "x layer.weight layer.bias", "y")],
        {"layer.weight": floats(WIDTH, DEPTH, 1, 1), "layer.bias": floats(WIDTH)},
        (2, DEPTH, 6, 7), lambda x, a, b: convolved(convolved(x, a), b),
    ),
    Form(
        "Conv-3x3",
        [node("Conv", "x layer.weight", "y", strides=[2, 1], pads=[1, 0, 1, 2], dilations=[1, 2])],
        {"layer.weight": floats(WIDTH, DEPTH, 3, 3)}, (2, DEPTH, 8, 9),
        lambda x, a, b: convolved(
            convolved(x, a, strides=[2, 1], pads=[1, 0, 1, 2], dilations=[1, 2]), b
        ),
    ),
    Form(
        "Attention",
        [node("Attention", "x layer.weight layer.bias", "y", MICROSOFT, num_heads=2)],
        {"layer.weight": floats(DEPTH, 3 * 16), "layer.bias": floats(3 * 16)},
        widths={"layer.query": 16, "layer.key": 16, "layer.value": 16},
        update=lambda x, *factors: attended(x, factors) - attended(x, ()),
    ),
]  # fmt: skip


def convolved(x: Any, w: Any, **attributes: Any) -> Any:
    form = Form("", [node("Conv", "x w", "y", **attributes)], {"w": w}, x.shape)
    return run(form.model().SerializeToString(), {"x": x})


def attended(x: Any, factors: Any) -> Any:
    form = next(form for form in FORMS if form.name == "Attention")
    tensors = dict(form.tensors)
    if factors:
        pairs = zip(factors[::2], factors[1::2], strict=True)
        tensors["layer.weight"] = tensors["layer.weight"] + np.concatenate(
            [a @ b for a, b in pairs], 1
        )
    return run(Form("", form.nodes, tensors).model().SerializeToString(), {"x": x})


def run(model: Any, feeds: dict[str, Any]) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(["y"], feeds)[0]


def factors_of(form: Form, rank: int) -> dict[str, Any]:
    made = {}
    for path, width in form.widths.items():
        shapes = (form.depth, rank), (rank, width)
        if form.name.startswith("Conv"):
            kernel = next(iter(form.tensors.values())).shape[2:]
            shapes = (rank, form.depth, *kernel), (width, rank, 1, 1)  # type: ignore[assignment]
        for letter, shape in zip("AB", shapes, strict=True):
            made[f"{path}.lora_{letter}.weight"] = floats(*shape)
    return made


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_slots_add_a_product_to_what_the_layer_computes(form: Form, tmp_path: Any) -> None:
    model = form.model()
    before = model.SerializeToString()
    adapted = add_lora(model, None, [Lora(rank=RANK)], ["y"])
    assert model.SerializeToString() == before
    assert [pair.layer for pair in adapted.pairs] == list(form.widths)
    file = tmp_path / "inference_model.onnx"
    adapted.slots.write(file, BaseData(tmp_path / "base.data"), {})
    x = floats(*form.x)
    base = run(before, {"x": x})
    np.testing.assert_allclose(run(file, {"x": x}), base, rtol=1e-5, atol=1e-5)
    for rank in (1, 8):
        factors = factors_of(form, rank)
        expected = base + form.update(x, *factors.values())
        found = run(file, {"x": x, **factors})
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_factors_to_train_are_scaled(form: Form) -> None:
    adapted = add_lora(form.model(), None, [Lora(rank=RANK, alpha=6)], ["y"])
    x = floats(*form.x)
    base = run(form.model().SerializeToString(), {"x": x})
    model = adapted.proto
    np.testing.assert_allclose(run(model.SerializeToString(), {"x": x}), base, rtol=1e-5, atol=1e-5)
    factors = factors_of(form, RANK)
    for tensor in model.graph.initializer:
        if tensor.name in factors:
            assert tuple(tensor.dims) == factors[tensor.name].shape
            tensor.CopyFrom(numpy_helper.from_array(factors[tensor.name], tensor.name))
    scaled = {n: v * np.float32(2 if ".lora_B" in n else 1) for n, v in factors.items()}
    expected = base + form.update(x, *scaled.values())
    np.testing.assert_allclose(
        run(model.SerializeToString(), {"x": x}), expected, rtol=2e-4, atol=2e-4
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_factors_of_each_form_train(form: Form, tmp_path: Path) -> None:
    made = onnxtrain.prepare(
        form.model(), tmp_path, train=Lora(rank=RANK, alpha=6, layers="*"), loss="mse",
        optimizer="sgd",
    )  # fmt: skip
    assert set(made.trainable) == set(factors_of(form, RANK))
    session = onnxtrain.TrainingSession(tmp_path)
    x = floats(*form.x)
    target = floats(*session.predict(x).shape)
    session.set_learning_rate(0.1)
    losses = [float(session.step(x, target)[0]) for _ in range(4)]
    assert losses[-1] < losses[0]
    slots = {
        name: parameter.data * np.float32(2 if ".lora_B" in name else 1)
        for name, parameter in session.state.parameters
    }
    found = run(tmp_path / "inference_model.onnx", {"x": x, **slots})
    np.testing.assert_allclose(session.predict(x), found, rtol=1e-3, atol=1e-3)
