"""The device of the demo: a separate process with numpy and onnxruntime, without onnx.

    python -m onnxtrain.cli.demo.device_program FOLDER EPOCHS

The folder has the artifacts and `user.npz`. Each run continues the last one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import onnxtrain
from onnxtrain.cli.console import Console
from onnxtrain.device.loop import evaluate

_EPOCHS = 12


def main(folder: Path, epochs: int, quiet: bool) -> dict[str, Any]:
    """Train up to an epoch; return the metrics before and after."""
    data = np.load(folder / "user.npz")
    own, unseen = (data["image"], data["labels"]), (data["image_test"], data["labels_test"])
    others = data["image_people"], data["labels_people"]
    saved = folder / "trained"
    began = time.perf_counter()
    session = onnxtrain.TrainingSession.from_folder(
        folder, checkpoint=saved if saved.exists() else None
    )
    if not saved.exists():
        session.set_learning_rate(2e-3)
    measures = ["accuracy", "confusion"]
    before = evaluate(session, unseen, measures) | {"others": _accuracy(session, others)}
    ready = time.perf_counter() - began
    history = onnxtrain.fit(
        session,
        own,
        epochs,
        validation=unseen,
        metrics=["accuracy"],
        schedule={"name": "cosine", "total_step_count": _EPOCHS * -(-len(own[0]) // 32)},
        callbacks=[onnxtrain.SaveCheckpoint(saved)],
        resume=True,
        seed=0,
        progress=Console(quiet=quiet).progress(),
    )
    after = evaluate(session, unseen, measures) | {"others": _accuracy(session, others)}
    session.export_model_for_inferencing(folder / "personal.onnx", ["scores"])
    return {
        "before": before,
        "after": after,
        "history": json.loads(history.to_json()),
        "seconds_to_start": ready,
        "milliseconds_per_step": _milliseconds(session, own),
        "onnx_imported": any(m in sys.modules for m in ("onnx", "onnx_ir", "torch")),
    }


def _milliseconds(session: onnxtrain.TrainingSession, data: Any) -> float:
    """Return the median time of a step; the trained state is saved already."""
    batch = [array[:32] for array in data]
    times = []
    for _ in range(50):
        began = time.perf_counter()
        session.step(*batch)
        times.append(time.perf_counter() - began)
    return 1000 * float(np.median(times))


def _accuracy(session: onnxtrain.TrainingSession, data: Any) -> float:
    return float(evaluate(session, data, ["accuracy"])["accuracy"])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    result = main(target, int(sys.argv[2]), "--quiet" in sys.argv)
    (target / "device.json").write_text(json.dumps(result), encoding="utf-8")
