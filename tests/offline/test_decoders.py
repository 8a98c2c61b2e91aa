"""Language models with a cache of keys and values, as exported for generation, are trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.offline.passes import chunked_loss, weight_pieces
from onnxtrain.offline.passes.decoder_inputs import read_whole_sequences
from onnxtrain.offline.passes.remat import plan

torch = pytest.importorskip("torch", reason="torch is the oracle")

import decoders  # noqa: E402  (needs torch)

RATE = 1e-2


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let five tokens of a small vocabulary be a chunk."""
    monkeypatch.setattr(chunked_loss, "LEAST_CLASSES", 2)
    monkeypatch.setattr(chunked_loss, "CHUNK_ELEMENTS", 5 * decoders.VOCABULARY)
    monkeypatch.setattr(weight_pieces, "PIECE_ELEMENTS", 1000)  # a third of the last layer


def labels_of(batch):
    """Mark what nothing predicts: padding, and the first token of each sequence."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    before = np.concatenate([np.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    return np.where((mask == before) & (mask > 0), ids, -100)


def gradients_by_torch(weights, batch):
    w = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in weights.items()}
    ids, mask = (torch.from_numpy(batch[n]) for n in ("input_ids", "attention_mask"))
    scores = decoders.logits(w, ids, mask)
    loss = decoders.next_token_loss(scores, torch.from_numpy(labels_of(batch)))
    loss.backward()
    return loss.item(), {n: t.grad.numpy() for n, t in w.items() if t.grad is not None}


def step(folder: Path, batch) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss, and the gradients as a step of plain SGD shows them."""
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(RATE)
    names = [name for name, parameter in session.state.parameters if parameter.requires_grad]
    before = {n: session.get_parameter(n).copy() for n in names}
    loss = session.step(**batch)
    return float(loss), {n: (before[n] - session.get_parameter(n)) / RATE for n in names}


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_a_builder_s_model_are_torch_s(tmp_path: Path, packed: bool) -> None:
    made = decoders.Builder(decoders.weights(), packed=packed)
    onnxtrain.prepare(made.model(), tmp_path, loss="next_token", optimizer="sgd")
    batch = decoders.batch()
    loss, found = step(tmp_path, {**batch, "labels": labels_of(batch)})
    expected, by_torch = gradients_by_torch(decoders.weights(), batch)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name in ("model.layers.0.gate", "model.layers.1.o", "head"):
        np.testing.assert_allclose(
            found[f"{name}.MatMul.weight"], by_torch[name], rtol=1e-3, atol=1e-4
        )


def test_scores_of_a_vocabulary_never_exist_whole(tmp_path: Path, small_chunks: None) -> None:
    made = decoders.Builder(decoders.weights())
    onnxtrain.prepare(made.model(), tmp_path, loss="next_token", optimizer="sgd", freeze="head*")
    batch = decoders.batch()
    loss, found = step(tmp_path, {**batch, "labels": labels_of(batch)})
    expected, by_torch = gradients_by_torch(decoders.weights(), batch)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name in ("model.layers.0.gate", "model.layers.1.o"):
        np.testing.assert_allclose(
            found[f"{name}.MatMul.weight"], by_torch[name], rtol=1e-3, atol=1e-4
        )
    for graph in ("step_model", "training_model", "eval_model"):
        model = onnx.load(tmp_path / f"{graph}.onnx")
        kinds = [node.op_type for node in model.graph.node]
        assert kinds.count("Scan") == 1
        assert "SoftmaxCrossEntropyLoss" not in kinds


def test_labels_may_be_the_tokens_themselves(tmp_path: Path, small_chunks: None) -> None:
    of = ["logits", "input_ids", "attention_mask"]
    made = decoders.Builder(decoders.weights())
    onnxtrain.prepare(made.model(), tmp_path, loss="next_token", of=of, train="norm*")
    batch = decoders.batch()
    expected, _ = gradients_by_torch(decoders.weights(), batch)
    with onnxtrain.TrainingSession(tmp_path) as session:
        assert session.input_names() == ["input_ids", "attention_mask"]
        assert float(session.eval_step(**batch)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_models_train_beside_their_weights(
    tmp_path: Path, small_chunks: None, bits: int
) -> None:
    made = decoders.Builder(decoders.weights(), bits=bits, packed=False)
    model = made.model()
    names = [f"model.layers.{i}.norm{j}" for i in range(2) for j in (1, 2)]
    onnxtrain.prepare(model, tmp_path, loss="next_token", optimizer="sgd", train="*norm*")
    batch = decoders.batch()
    loss, found = step(tmp_path, {**batch, "labels": labels_of(batch)})
    expected, by_torch = gradients_by_torch(made.w, batch)
    assert loss == pytest.approx(expected, rel=1e-3)
    for name in names[1:]:
        np.testing.assert_allclose(found[f"{name}.weight"], by_torch[name], rtol=0.02, atol=2e-3)


def run(model: onnx.ModelProto, feeds):
    session = ort.InferenceSession(model.SerializeToString())
    return session.run(["logits"], feeds)[0]


def test_a_cache_that_is_joined_by_concat_is_empty() -> None:
    model = decoders.plain_model()
    ids = np.arange(10).reshape(2, 5)
    none = np.zeros((2, 2, 0, 4), np.float32)
    places = np.tile(np.arange(5), (2, 1))
    expected = run(
        model, {"input_ids": ids, "position_ids": places, "past_key": none, "past_value": none}
    )
    whole = read_whole_sequences(model)
    assert [info.name for info in whole.proto.graph.input] == ["input_ids"]
    assert [info.name for info in whole.proto.graph.output] == ["logits"]
    assert "2 inputs hold keys and values" in whole.notes[0]
    np.testing.assert_allclose(run(whole.proto, {"input_ids": ids}), expected, atol=1e-5)


def test_a_model_without_a_cache_stays_as_it_is() -> None:
    model = decoders.plain_model()
    for info in [i for i in model.graph.input if i.name.startswith("past")]:
        info.type.tensor_type.shape.dim[2].dim_value = 3  # a state of a fixed size
    assert read_whole_sequences(model).proto is model


def test_whole_blocks_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "LAYERS", 9)
    monkeypatch.setattr(plan, "_MANY", 100)
    model, batch = decoders.Builder(decoders.weights()).model(), decoders.batch()
    given = {**batch, "labels": labels_of(batch)}
    results = []
    for budget in (None, 0.5):
        made = onnxtrain.prepare(
            model, tmp_path / str(budget), loss="next_token", optimizer="sgd", train="*norm*",
            memory_budget=budget, sizes={"batch_size": 8, "sequence_length": 64}, verify=False,
        )  # fmt: skip
        results.append(step(tmp_path / str(budget), given))
    assert made.memory is not None and made.memory.peak < made.memory.without
    assert made.memory.copies > 0
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for name, gradient in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bits", [0, 4])
def test_what_definitions_bring_does_not_train(tmp_path: Path, bits: int) -> None:
    """Neither tables of angles, nor epsilons and scales of attention, nor quantization scales."""
    model = decoders.Builder(decoders.weights(), bits).model()
    made = onnxtrain.prepare(model, tmp_path / "all", loss="next_token")
    assert all(name.endswith("weight") for name in made.trainable)
    if bits:
        others = {name for name in made.trainable if "norm" not in name}
        assert others <= {"model.embed_tokens.weight"}
