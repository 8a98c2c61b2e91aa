"""Models of integers train and are exported on the oldest onnxruntime as on this one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from integers_program import train

import onnxtrain

HERE = Path(__file__).resolve().parent
OLDEST = os.environ.get("ONNXTRAIN_OLDEST_PYTHON", str(HERE.parents[1] / ".venv-oldest/bin/python"))
sys.path.insert(0, str(HERE.parent / "golden"))

pytestmark = pytest.mark.skipif(
    not Path(OLDEST).exists(), reason=f"no Python with the oldest onnxruntime at {OLDEST}"
)


@pytest.mark.parametrize(
    "how", ["int8", "int8:scales=learned", "int8:scales=fixed,activations=int8", "int4-weights"]
)
def test_the_oldest_onnxruntime(how, tmp_path) -> None:
    from make_artifacts import residual

    x = np.random.default_rng(0).normal(size=(24, 1, 6, 6)).astype(np.float32)
    onnxtrain.prepare(residual(), tmp_path, quantize=how, calibration=[x])
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(24) % 3)
    here = train(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(Path(onnxtrain.__file__).parents[1])}
    program = [OLDEST, str(HERE / "integers_program.py"), str(tmp_path)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    there = np.load(tmp_path / "outputs.npz")
    np.testing.assert_allclose(there["losses"], here["losses"], rtol=1e-3)
    # A number near the middle between two integers may be rounded otherwise.
    for found in (here, there):
        np.testing.assert_allclose(found["made"], found["scores"], atol=0.05)
    np.testing.assert_allclose(there["made"], here["made"], atol=0.05)
