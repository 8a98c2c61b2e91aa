"""The oldest onnxruntime trains and exports the same integers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import by_hand
import numpy as np
import pytest
from deploying import outputs_of

import onnxtrain

HERE = Path(__file__).parent
OLDEST = os.environ.get("ONNXTRAIN_OLDEST_PYTHON", str(HERE.parents[2] / ".venv-oldest/bin/python"))
PROGRAM = """
import sys
import numpy as np
import onnxruntime as ort
import onnxtrain

folder, target, output = sys.argv[1:]
data = np.load(folder + ".npz")
session = onnxtrain.TrainingSession.from_folder(folder)
session.set_learning_rate(1e-3)
losses = [float(session.step(data["x"], data["target"])[0]) for _ in range(2)]
session.export_model_for_inferencing(target, [output])
run = ort.InferenceSession(target)
np.savez(target + ".npz", losses=losses, outputs=run.run(None, {"x": data["x"]})[0])
"""


@pytest.mark.parametrize(
    "network, how",
    [
        ("residual", "int8"),
        ("depthwise", "int8:scales=learned"),
        ("attention", "int8"),
        ("attention", "int4-weights"),
    ],
)
def test_the_oldest_onnxruntime_computes_the_same(network: str, how: str, tmp_path: Path) -> None:
    if not Path(OLDEST).exists():
        pytest.skip(f"no environment with the oldest onnxruntime at {OLDEST}; `make test` makes it")
    model = by_hand.NETWORKS[network]()
    feeds = by_hand.feeds(model)
    folder, (expected, *_) = tmp_path / "a", outputs_of(model, feeds)
    calibration = None if how == "int4-weights" else [feeds]
    onnxtrain.prepare(
        model, folder, loss="mse", optimizer="sgd", quantize=how, calibration=calibration
    )
    np.savez(tmp_path / "a.npz", x=feeds["x"], target=expected)
    found = []
    source = str(Path(onnxtrain.__file__).parents[1])
    for number, python in enumerate((sys.executable, OLDEST)):
        target = tmp_path / f"{number}.onnx"
        result = subprocess.run(
            [python, "-c", PROGRAM, str(folder), str(target), model.graph.output[0].name],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-2000:]
        found.append(np.load(f"{target}.npz"))
    newest, oldest = found
    np.testing.assert_allclose(oldest["losses"], newest["losses"], rtol=1e-5)
    step = np.ptp(expected) / 255
    np.testing.assert_allclose(oldest["outputs"], newest["outputs"], atol=4 * step)
