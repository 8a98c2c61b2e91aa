"""Lets onnxruntime-training generate its artifacts; runs in its own environment.

The argument is the folder of a workload. What it fails with is written there, and shown in the
table.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import onnx
from onnxruntime.training import artifacts, onnxblock

from plan import BETAS, EPSILON, WEIGHT_DECAY


class AdamW(onnxblock.optim.AdamW):
    """With the numbers that all peers use; the recipe below only knows the defaults."""

    def __init__(self) -> None:
        super().__init__(betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY)


def main() -> None:
    folder, trains = Path(sys.argv[1]), sys.argv[2]
    model = onnx.load(folder / "forward-15.onnx")
    floats = [t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    if trains == "head":
        trained = [name for name in floats if name.startswith("head.")]
    else:
        trained = [name for name in floats if "running_" not in name]
    others = [name for name in floats if name not in trained]
    _generate(folder / "upstream", model, trained, others)
    if trains == "head":
        # Weights in neither list stay in the graph as constants, which onnxruntime optimizes.
        _generate(folder / "upstream-embedded", model, trained, [])


def _generate(target: Path, model: onnx.ModelProto, trained: list[str], frozen: list[str]) -> None:
    target.mkdir(exist_ok=True)
    try:
        artifacts.generate_artifacts(
            model,
            requires_grad=trained,
            frozen_params=frozen,
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=AdamW(),
            artifact_directory=str(target),
        )
    except Exception as error:  # its message is the result
        (target / "failure.txt").write_text(f"generate_artifacts: {type(error).__name__}: {error}")


if __name__ == "__main__":
    os.environ.setdefault("ORT_LOGGING_LEVEL", "3")
    main()
