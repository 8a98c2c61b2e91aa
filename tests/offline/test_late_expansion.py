"""Weights that a model expands from integers are expanded layer by layer, in both passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from optimized import inputs_behind, load_optimized

WIDTH, WORDS = 160, 200
RNG = np.random.default_rng(0)
Array = np.ndarray
Tensors = dict[str, Array]


def integers(rows: int, low: int = -127, high: int = 128, dtype: type = np.int8) -> Array:
    return RNG.integers(low, high, (rows, WIDTH)).astype(dtype)


def scales(*shape: int) -> Array:
    return (RNG.random(shape) * 1e-3 + 1e-4).astype(np.float32)


def cast_and_scale(name: str, rows: int, scale: Array) -> tuple[list, Tensors, Array]:
    q = integers(rows)
    nodes = [
        helper.make_node("Cast", [f"{name}.q"], [f"{name}.f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{name}.f", f"{name}.scale"], [name]),
    ]
    return nodes, {f"{name}.q": q, f"{name}.scale": scale}, q * scale


def dequantized(
    name: str, q: Array, scale: Array, zero: Array | None, spread: Array, **attrs: int
) -> tuple[list, Tensors, Array]:
    """DequantizeLinear; `spread` are scale and zero point for each element."""
    names = [f"{name}.q", f"{name}.scale", *([f"{name}.zero"] if zero is not None else [])]
    node = helper.make_node("DequantizeLinear", names, [name], **attrs)
    tensors = dict(zip(names, (q, scale, zero), strict=False))
    return [node], tensors, (q.astype(np.float32) - spread[1]) * spread[0]


def per_tensor(name: str, rows: int) -> tuple[list, Tensors, Array]:
    scale, zero = scales(), np.array(3, np.int8)
    return dequantized(name, integers(rows), scale, zero, (scale, 3))


def per_channel(name: str, rows: int) -> tuple[list, Tensors, Array]:
    scale = scales(WIDTH)
    zero = RNG.integers(0, 9, WIDTH).astype(np.uint8)
    q = integers(rows, 0, 256, np.uint8)
    return dequantized(name, q, scale, zero, (scale, zero.astype(np.float32)), axis=1)


def per_row(name: str, rows: int) -> tuple[list, Tensors, Array]:
    scale, zero = scales(rows), RNG.integers(0, 9, rows).astype(np.int8)
    spread = (scale[:, None], zero.astype(np.float32)[:, None])
    return dequantized(name, integers(rows), scale, zero, spread, axis=0)


def per_block(name: str, rows: int) -> tuple[list, Tensors, Array]:
    scale = scales(rows, WIDTH // 32)
    spread = (np.repeat(scale, 32, axis=1), 0)
    return dequantized(name, integers(rows), scale, None, spread, axis=1, block_size=32)


def four_bits(name: str, rows: int) -> tuple[list, Tensors, Array]:
    scale = scales(rows // 32, WIDTH) * 16
    q = integers(rows, -8, 8).astype(ml_dtypes.int4)
    spread = (np.repeat(scale, 32, axis=0), 0)
    return dequantized(name, q, scale, None, spread, axis=0, block_size=32)


FORMS: dict[str, Callable[[str, int], tuple[list, Tensors, Array]]] = {
    "Cast and Mul": lambda name, rows: cast_and_scale(name, rows, scales()),
    "Cast and Mul by column": lambda name, rows: cast_and_scale(name, rows, scales(WIDTH)),
    "Cast and Mul by row": lambda name, rows: cast_and_scale(name, rows, scales(rows, 1)),
    "tensor": per_tensor,
    "channel": per_channel,
    "row": per_row,
    "block": per_block,
    "4 bits": four_bits,
}


def network(form: str, is_table_quantized: bool) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """An embedding and two layers, with quantized weights and with the floats that these are."""
    made = {name: FORMS[form](name, WIDTH) for name in ("a", "b")}
    table = FORMS[form]("table", WORDS) if is_table_quantized else None
    floats = scales(WORDS, WIDTH) * 1e3
    layers = [
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("MatMul", ["e", "a"], ["h"]),
        helper.make_node("Add", ["h", "a.bias"], ["hb"]),
        helper.make_node("Relu", ["hb"], ["r"]),
        helper.make_node("Gemm", ["r", "b", "b.bias"], ["y"], transB=1),
    ]
    biases = {f"{name}.bias": scales(WIDTH) for name in "ab"}
    parts = [*made.values(), *([] if table is None else [table])]
    nodes = [node for part in parts for node in part[0]]
    tensors = {n: t for part in parts for n, t in part[1].items()}
    plain = {name: part[2] for name, part in made.items()}
    plain["table"] = floats if table is None else table[2]
    tensors |= {} if table is not None else {"table": floats}
    return model([*nodes, *layers], tensors | biases), model(layers, plain | biases)


def model(nodes: list, tensors: Tensors) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_expanded_when_they_are_due(form: str, tmp_path: Path) -> None:
    has_table = form not in ("4 bits", "block")
    losses = []
    for folder, given in zip("qf", network(form, has_table), strict=True):
        made = onnxtrain.prepare(
            given, tmp_path / folder, loss="mse", optimizer="sgd", train=["*.bias"]
        )
        session = onnxtrain.TrainingSession(made.directory)
        ids, target = np.arange(8), np.ones((8, WIDTH), np.float32)
        losses.append([float(session.step(ids, target)[0]) for _ in range(4)])
    # onnxruntime makes MatMulNBits of 4 bits, and quantizes data for it.
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4 if form == "4 bits" else 1e-5)
    assert losses[0][-1] < losses[0][0]
    optimized, nodes = load_optimized(tmp_path / "q" / "step_model.onnx", tmp_path / "seen.onnx")
    floats = [t for t in optimized.graph.initializer if t.data_type == TensorProto.FLOAT]
    largest = max(np.prod(t.dims) for t in floats)
    assert largest < (WIDTH * WIDTH if has_table else WORDS * WIDTH + 1)
    makers = {o: n for n in nodes for o in n.output}
    expansions = [n for n in nodes if n.op_type == "DequantizeLinear"]
    for node in expansions:
        assert inputs_behind(node, makers) & {"ids", "target"}, node.name


def test_a_quantized_product_before_all_that_trains_stays_one(tmp_path: Path) -> None:
    """onnxruntime makes a product of integers out of it."""
    nodes, tensors, _ = per_tensor("w", WIDTH)
    nodes += [
        helper.make_node("QuantizeLinear", ["ids", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("MatMul", ["xd", "w"], ["h"]),
        helper.make_node("QuantizeLinear", ["h", "s", "z"], ["hq"]),
        helper.make_node("DequantizeLinear", ["hq", "s", "z"], ["hd"]),
        helper.make_node("Add", ["hd", "bias"], ["y"]),
    ]
    tensors |= {"s": np.float32(0.02), "z": np.uint8(128), "bias": scales(WIDTH)}
    given = model(nodes, tensors | {"w.zero": np.array(0, np.int8)})
    given.graph.input[0].CopyFrom(
        helper.make_tensor_value_info("ids", TensorProto.FLOAT, ["batch", WIDTH])
    )
    onnxtrain.prepare(given, tmp_path / "q", loss="mse", train=["bias"])
    _, optimized = load_optimized(tmp_path / "q" / "step_model.onnx", tmp_path / "seen.onnx")
    assert "QLinearMatMul" in [n.op_type for n in optimized]
