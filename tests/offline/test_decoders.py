"""Language models with a cache of keys and values, as exported for generation, are trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxtrain

torch = pytest.importorskip("torch")

import decoders  # noqa: E402  (needs torch)

RATE = 1e-2


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
