"""Products with quantized weights stay in the forward pass; gradients expand them when due."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from fusing import Array, Case, bits, f, feeds_of, one_node, run
from optimized import inputs_behind, load_optimized

ROWS, BLOCK = 6, 16


def product(bits_: int, columns: int, *more: Array | None) -> Case:
    """MatMulNBits with constant weights; `more` are zero points, group indices and bias."""
    blocks = -(-columns // BLOCK)
    inputs = [f(2, 3, columns), bits(ROWS, blocks, BLOCK * bits_ // 8), f(ROWS, blocks), *more]
    attrs = {"bits": bits_, "block_size": BLOCK, "K": columns, "N": ROWS}
    constants = [i for i in range(1, len(inputs)) if inputs[i] is not None]
    return Case("MatMulNBits", inputs, attrs, constants=constants)


def unpacked(packed: Array, count: int, bits_: int) -> Array:
    shifts = np.arange(0, 8, bits_)
    numbers = (packed.reshape(ROWS, -1, 1) >> shifts) & (2**bits_ - 1)
    return numbers.reshape(ROWS, -1)[:, :count]


def weights_of(case: Case) -> torch.Tensor:
    """The matrix that a node stands for, by the definition of the operator."""
    packed, scales, zero, *_ = [*case.inputs[1:], None]
    bits_, columns = case.attrs["bits"], case.attrs["K"]
    blocks = scales.shape[1]
    zeros: Array | int = 2 ** (bits_ - 1)
    if zero is not None:
        zeros = unpacked(zero, blocks, bits_) if zero.dtype == np.uint8 else zero
        zeros = zeros[..., None]
    numbers = unpacked(packed, blocks * BLOCK, bits_).reshape(ROWS, blocks, BLOCK)
    weights = (numbers.astype(np.float64) - zeros) * scales[..., None]
    return torch.tensor(weights.reshape(ROWS, -1)[:, :columns])


PRODUCTS = {
    **{f"{b} bits, {k} columns": product(b, k) for b in (2, 4, 8) for k in (32, 40)},
    "zero points": product(4, 40, bits(ROWS, 2)),
    "zero points of 2 bits": product(2, 40, bits(ROWS, 1)),
    "zero points of 8 bits": product(8, 40, bits(ROWS, 3)),
    "float zero points": product(4, 40, f(ROWS, 3)),
    "float zero points, no padding": product(2, 32, f(ROWS, 2)),
    "bias": product(4, 32, None, None, f(ROWS)),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)
def test_gradients_of_a_product(case: Case, symbolic: bool) -> None:
    has_bias = len(case.inputs) > 5
    wrt = ["x0", "x5"] if has_bias else ["x0"]
    model = onnxtrain.gradient(one_node(case, symbolic, typed=True), wrt, of="y")
    assert [n.op_type for n in model.graph.node if n.domain] == ["MatMulNBits"]
    assert model.opset_import[0].version == 18
    x = torch.tensor(case.inputs[0], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(case.inputs[5] if has_bias else np.zeros(ROWS), requires_grad=True)
    seed = f(2, 3, ROWS)
    y = x @ weights_of(case).T + bias
    y.backward(torch.tensor(seed))
    found = run(model, {**feeds_of(case), "y_grad": seed})
    np.testing.assert_allclose(found[0], y.detach(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], x.grad, rtol=1e-4, atol=1e-4)
    if has_bias:
        np.testing.assert_allclose(found[2], bias.grad, rtol=1e-5, atol=1e-5)


def test_scales_that_are_named_have_a_gradient() -> None:
    case = product(4, 40)
    model = onnxtrain.gradient(one_node(case, typed=True), "x2", of="y")
    assert not [n.op_type for n in model.graph.node if n.domain]
    scales, seed = torch.tensor(case.inputs[2], requires_grad=True), f(2, 3, ROWS)
    levels = unpacked(case.inputs[1], 48, 4).reshape(ROWS, 3, BLOCK) - 8.0
    weights = (torch.tensor(levels) * scales[..., None]).reshape(ROWS, -1)[:, :40]
    (torch.tensor(case.inputs[0], dtype=torch.float64) @ weights.T).backward(torch.tensor(seed))
    np.testing.assert_allclose(
        run(model, {**feeds_of(case), "y_grad": seed})[1], scales.grad, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("batch", ["batch", 4], ids=["symbolic", "static"])
def test_onnxruntime_does_not_expand_weights_when_it_loads(
    tmp_path: Path, batch: int | str
) -> None:
    made = onnxtrain.prepare(
        language_model(batch), tmp_path, train=["*.bias"], loss="cross_entropy", optimizer="sgd"
    )
    for name in ("step_model", "training_model"):
        optimized, nodes = load_optimized(made.directory / f"{name}.onnx", tmp_path / "seen.onnx")
        floats = [t for t in optimized.graph.initializer if t.data_type == TensorProto.FLOAT]
        assert max(np.prod(t.dims) for t in floats) <= WIDTH * WIDTH // BLOCK  # the scales
        makers = {o: n for n in nodes for o in n.output}
        expansions = [n for n in nodes if n.op_type == "DequantizeLinear"]
        assert len(expansions) == 2
        for node in expansions:
            assert "labels" in inputs_behind(node, makers)  # no gradient without them


WIDTH, WORDS = 64, 12


def language_model(batch: int | str) -> onnx.ModelProto:
    """Embedding, norm and products in the forms in which builders for onnxruntime write them."""
    rng = np.random.default_rng(3)

    def packed(rows: int) -> Array:
        return rng.integers(0, 256, (rows, WIDTH // BLOCK, BLOCK // 2), np.uint8)

    def scales(rows: int) -> Array:
        return (rng.random((rows, WIDTH // BLOCK)) * 0.05).astype(np.float32)

    attrs = {"domain": "com.microsoft", "bits": 4, "block_size": BLOCK}
    nodes = [
        helper.make_node("GatherBlockQuantized", ["table", "ids", "table.scales"], ["e"],
                         gather_axis=0, quantize_axis=1, **attrs),
        helper.make_node("SimplifiedLayerNormalization", ["e", "norm"], ["n"], axis=-1,
                         epsilon=1e-5, stash_type=1),
        helper.make_node("MatMulNBits", ["n", "q", "q.scales"], ["h"], N=WIDTH, K=WIDTH, **attrs),
        helper.make_node("Add", ["h", "q.bias"], ["hb"]),
        helper.make_node("SkipSimplifiedLayerNormalization", ["hb", "e", "norm"], ["s"],
                         domain="com.microsoft", epsilon=1e-5),
        helper.make_node("MatMulNBits", ["s", "head", "head.scales", "", "", "head.bias"],
                         ["logits"], N=WORDS, K=WIDTH, **attrs),
    ]  # fmt: skip
    tensors = {
        "table": packed(WORDS).reshape(WORDS, WIDTH // 2), "table.scales": scales(WORDS),
        "norm": np.ones(WIDTH, np.float32), "q": packed(WIDTH), "q.scales": scales(WIDTH),
        "q.bias": np.zeros(WIDTH, np.float32), "head": packed(WORDS),
        "head.scales": scales(WORDS), "head.bias": np.zeros(WORDS, np.float32),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [batch])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, WORDS])],
        [numpy_helper.from_array(a, n) for n, a in tensors.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def test_biases_around_quantized_layers_train(tmp_path: Path) -> None:
    model = language_model("batch")
    report = onnxtrain.inspect(model)
    assert {"q.bias", "head.bias", "norm"} <= set(report.weights)
    assert not {"q.scales", "head.scales", "table.scales"} & set(report.weights)
    made = onnxtrain.prepare(model, tmp_path, train=["*.bias"])
    for name in ("step_model", "training_model", "eval_model"):
        written = onnx.load(made.directory / f"{name}.onnx", load_external_data=False)
        bodies = {function.name: function.node for function in written.functions}
        nodes = [m for n in written.graph.node for m in bodies.get(n.op_type, [n])]
        kept = [n.op_type for n in nodes if n.domain == "com.microsoft"]
        assert sorted(kept) == ["GatherBlockQuantized", "MatMulNBits", "MatMulNBits"]
    session = onnxtrain.TrainingSession(tmp_path)
    session.set_learning_rate(0.1)
    words = np.arange(WORDS)
    losses = [float(session.step(words, (words + 1) % WORDS)[0]) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]


def test_scales_train_where_they_are_named(tmp_path: Path) -> None:
    made = onnxtrain.prepare(language_model("batch"), tmp_path, train=["head.scales"])
    assert set(made.trainable) == {"head.scales"}
    session = onnxtrain.TrainingSession(tmp_path)
    session.set_learning_rate(0.01)
    words = np.arange(WORDS)
    first, *_, last = (float(session.step(words, words)[0]) for _ in range(20))
    assert last < 0.9 * first
