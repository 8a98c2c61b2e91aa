"""Trains an artifact folder of integers on the onnxruntime that this interpreter has.

`python integers_program.py <folder>`: inputs and labels are in `data.npz` in the folder. It exports
the model to `exported.onnx`, and writes losses and what the model makes to `outputs.npz`.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

from onnxtrain import TrainingSession, fit


def train(folder: Path) -> dict[str, np.ndarray]:
    """Train two epochs, export, and run what was exported."""
    data = np.load(folder / "data.npz")
    session = TrainingSession(folder)
    session.set_learning_rate(0.01)
    history = fit(session, (data["x"], data["y"]), 2, batch_size=4, progress=False, seed=2)
    session.export_model_for_inferencing(folder / "exported.onnx", ["output"])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = ort.InferenceSession(str(folder / "exported.onnx"), options)
    made = model.run(None, {"input": data["x"]})[0]
    return {"losses": np.array(history.losses), "made": made, "scores": session.predict(data["x"])}


if __name__ == "__main__":
    np.savez(Path(sys.argv[1]) / "outputs.npz", **train(Path(sys.argv[1])))
