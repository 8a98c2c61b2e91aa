"""The device half imports numpy and onnxruntime, and nothing of the workstation half."""

import subprocess
import sys

FORBIDDEN = ("onnx", "onnx_ir", "google.protobuf", "torch", "onnxscript", "sympy")


def test_importing_onnxtrain_brings_nothing_of_the_workstation() -> None:
    code = f"import sys, onnxtrain; print([m for m in {FORBIDDEN!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_names_of_the_package() -> None:
    import onnxtrain

    assert set(dir(onnxtrain)) == {"OnnxTrainError", "__version__", "gradient", "inspect"}
    assert callable(onnxtrain.gradient)
