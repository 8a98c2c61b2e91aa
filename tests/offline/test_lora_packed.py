"""Queries, keys and values from one product: a pair of factors for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

WIDTH, HEADS, SHARED, SIZE, TOKENS = 32, 4, 2, 8, 6
OUT = (HEADS + 2 * SHARED) * SIZE
SLOTS = {"q": HEADS * SIZE, "k": SHARED * SIZE, "v": SHARED * SIZE}
PATH = "model.layers.0.attn.qkv_proj.MatMul.weight"
RANDOM = np.random.default_rng(0)


def decoder(quantized: bool) -> onnx.ModelProto:
    """A product for queries, keys and values, and a grouped attention, as GenAI's builder does."""
    floats = RANDOM.standard_normal((WIDTH, OUT)).astype(np.float32) * 0.3
    tensors: dict[str, Any] = {
        PATH: floats, "head.weight": RANDOM.standard_normal((WIDTH, 3)).astype(np.float32),
        "lengths": np.full((2, 1), TOKENS - 1, np.int32), "total": np.array(TOKENS, np.int32),
    }  # fmt: skip
    product = helper.make_node("MatMul", ["x", PATH], ["qkv"], "/model/layers.0/attn/qkv_proj")
    if quantized:
        tensors[PATH + "_Q4"] = RANDOM.integers(0, 256, (OUT, 1, 16)).astype(np.uint8)
        tensors["scales"] = np.full(OUT, 0.05, np.float32)
        del tensors[PATH]
        product = helper.make_node(
            "MatMulNBits", ["x", PATH + "_Q4", "scales"], ["qkv"], domain="com.microsoft",
            K=WIDTH, N=OUT, bits=4, block_size=32,
        )  # fmt: skip
    empty = np.zeros((2, SHARED, 0, SIZE), np.float32)
    tensors |= {"past_key": empty, "past_value": empty}
    nodes = [
        product,
        helper.make_node(
            "GroupQueryAttention",
            ["qkv", "", "", "past_key", "past_value", "lengths", "total"], ["a", "pk", "pv"],
            domain="com.microsoft", num_heads=HEADS, kv_num_heads=SHARED,
        ),
        helper.make_node("MatMul", ["a", "head.weight"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "decoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, TOKENS, WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, TOKENS, 3])],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def run(model: Any, feeds: dict[str, Any]) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"]).run(["y"], feeds)[0]


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "int4"])
def test_each_projection_has_factors_of_its_own(quantized: bool, tmp_path: Path) -> None:
    model = decoder(quantized)
    made = onnxtrain.prepare(model, tmp_path, train="lora:rank=2,alpha=4", loss="mse")
    names = [
        f"model.layers.0.self_attn.{part}_proj.lora_{f}.weight" for part in SLOTS for f in "AB"
    ]
    assert list(made.trainable) == names
    x = RANDOM.standard_normal((2, TOKENS, WIDTH)).astype(np.float32)
    session = onnxtrain.TrainingSession(tmp_path)
    base = run(model.SerializeToString(), {"x": x})
    np.testing.assert_allclose(session.predict(x), base, rtol=1e-4, atol=1e-4)
    target = RANDOM.standard_normal(base.shape).astype(np.float32)
    session.set_learning_rate(0.02)
    losses = [float(session.step(x, target)[0]) for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    trained = {name: parameter.data.copy() for name, parameter in session.state.parameters}
    assert all(np.abs(trained[name]).max() > 0 for name in names)
    slots = {n: v * np.float32(2 if "lora_B" in n else 1) for n, v in trained.items()}
    found = run(tmp_path / "inference_model.onnx", {"x": x, **slots})
    np.testing.assert_allclose(found, session.predict(x), rtol=1e-4, atol=1e-4)
    if not quantized:
        deltas = [
            slots[f"model.layers.0.self_attn.{p}_proj.lora_A.weight"]
            @ slots[f"model.layers.0.self_attn.{p}_proj.lora_B.weight"]
            for p in SLOTS
        ]
        merged = onnx.ModelProto()
        merged.CopyFrom(model)
        tensor = next(t for t in merged.graph.initializer if t.name == PATH)
        whole = numpy_helper.to_array(tensor) + np.concatenate(deltas, 1)
        tensor.CopyFrom(numpy_helper.from_array(whole, PATH))
        expected = run(merged.SerializeToString(), {"x": x})
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "int4"])
def test_some_of_the_projections(quantized: bool, tmp_path: Path) -> None:
    """Queries and values alone, as PEFT has it for many models."""
    model = decoder(quantized)
    lora = onnxtrain.Lora(rank=3, alpha=3, layers=["q_proj", "v_proj"])
    made = onnxtrain.prepare(model, tmp_path, train=lora, loss="mse")
    places = [name.split(".")[4] for name in made.trainable]
    assert places == ["q_proj", "q_proj", "v_proj", "v_proj"]
    x = RANDOM.standard_normal((2, TOKENS, WIDTH)).astype(np.float32)
    session = onnxtrain.TrainingSession(tmp_path)
    base = run(model.SerializeToString(), {"x": x})
    np.testing.assert_allclose(run(tmp_path / "inference_model.onnx", {"x": x}), base, atol=1e-5)
    target = RANDOM.standard_normal(base.shape).astype(np.float32)
    session.set_learning_rate(0.02)
    losses = [float(session.step(x, target)[0]) for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    slots = {name: parameter.data.copy() for name, parameter in session.state.parameters}
    found = run(tmp_path / "inference_model.onnx", {"x": x, **slots})
    np.testing.assert_allclose(found, session.predict(x), rtol=1e-4, atol=1e-4)
