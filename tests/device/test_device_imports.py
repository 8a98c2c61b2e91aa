"""The device half imports numpy and onnxruntime, and nothing of the workstation half."""

import importlib.util
import subprocess
import sys

import pytest

import onnxtrain
from onnxtrain.errors import OnnxTrainError

FORBIDDEN = ("onnx", "onnx_ir", "google.protobuf", "torch", "onnxscript", "sympy", "matplotlib")
IMPORT_ALL = """
import importlib, pkgutil, sys
import onnxtrain, onnxtrain.api, onnxtrain.device, onnxtrain.format
rooms = (onnxtrain.device, onnxtrain.format)
names = [m.name for r in rooms for m in pkgutil.walk_packages(r.__path__, r.__name__ + ".")]
assert len(names) > 60, names
for name in names:
    importlib.import_module(name)
onnxtrain.TrainingSession, onnxtrain.fit, onnxtrain.set_seed
"""


def imported_by(code: str) -> str:
    """Which of the forbidden modules some code imports, in a process of its own."""
    code += f"\nimport sys\nprint([m for m in {FORBIDDEN!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_importing_onnxtrain_brings_nothing_of_the_workstation() -> None:
    assert imported_by("import onnxtrain") == "[]"


def test_no_module_of_the_device_half_imports_the_workstation() -> None:
    assert imported_by(IMPORT_ALL) == "[]"


def test_the_names_of_the_package() -> None:
    assert set(dir(onnxtrain)) == {
        "EarlyStopping", "History", "OnnxTrainError", "TrainingSession", "__version__", "evaluate",
        "fit", "gradient", "inspect", "set_seed",
    }  # fmt: skip
    import onnxtrain.api as api

    assert dir(api) == [
        "CheckpointState", "ConstantLRScheduler", "CosineLRScheduler", "ExponentialLRScheduler",
        "LinearLRScheduler", "Module", "MultiStepLRScheduler", "OneCycleLRScheduler", "Optimizer",
        "Parameter", "Parameters", "PlateauLRScheduler", "Properties", "StepLRScheduler",
        "TrainingSession",
    ]  # fmt: skip
    assert all(callable(getattr(api, name)) for name in dir(api))
    for package in (onnxtrain, api):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018


def test_what_needs_onnx_says_so() -> None:
    if importlib.util.find_spec("onnx") is not None:
        assert callable(onnxtrain.gradient)
    else:
        with pytest.raises(OnnxTrainError, match=r"pip install 'onnxtrain\[offline\]'"):
            onnxtrain.gradient  # noqa: B018
