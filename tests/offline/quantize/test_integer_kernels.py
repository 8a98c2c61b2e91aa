"""Exported models run on integers, and compute what was trained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import by_hand
import pytest
from deploying import compare_with_trained, deploy, float_operators

# What onnxruntime has no kernel of integers for, by network.
IN_FLOATS = {
    "squeeze_excite": {"HardSigmoid": 2, "Mul": 1, "GlobalAveragePool": 1},
    "attention": {"Softmax": 1, "SkipLayerNormalization": 2, "Gelu": 1},
}


@pytest.mark.parametrize("activations", ["uint8", "int8"])
@pytest.mark.parametrize("name", by_hand.NETWORKS)
def test_all_products_run_on_integers(name: str, activations: str, tmp_path: Path) -> None:
    model = by_hand.NETWORKS[name]()
    feeds = by_hand.feeds(model)
    path = deploy(model, tmp_path, feeds, f"int8:activations={activations}")
    left = float_operators(path)
    assert left == Counter(IN_FLOATS.get(name, {})), f"{name} computes in floats: {dict(left)}"
    away = compare_with_trained(path, feeds)
    wrong = {value: part for value, part in away.items() if part > 1e-3}
    assert not wrong, f"more than one step away from the trained graph: {wrong}"
