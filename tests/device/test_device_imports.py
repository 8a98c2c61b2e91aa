"""The device half imports numpy and onnxruntime, and nothing of the workstation half."""

import importlib
import subprocess
import sys
import warnings

import pytest

import onnxtrain
from onnxtrain.moved import MOVED

FORBIDDEN = ("onnx", "onnx_ir", "google.protobuf", "torch", "onnxscript", "sympy", "matplotlib")
IMPORT_ALL = """
import importlib, pkgutil, sys
import onnxtrain, onnxtrain.api, onnxtrain.device, onnxtrain.format
rooms = (onnxtrain.device, onnxtrain.format)
names = [m.name for r in rooms for m in pkgutil.walk_packages(r.__path__, r.__name__ + ".")]
assert len(names) > 50, names
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
    assert dir(onnxtrain) == [
        "Adapter", "CheckFinite", "EarlyStopping", "History", "Limits", "Lora", "OnnxTrainError",
        "Quantize", "Replay", "SaveCheckpoint", "Sparse", "TensorBoard", "TrainingSession",
        "__version__", "artifacts", "compare", "evaluate", "federated", "fit", "fit_head",
        "gradient", "inspect", "losses", "merge_adapter", "metrics", "onnxblock", "optim",
        "predict", "prepare", "replace_classifier", "schedules", "set_seed",
    ]  # fmt: skip
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


def test_what_needs_onnx_is_imported_on_first_use() -> None:
    pytest.importorskip("onnx", reason="it is in the extra `offline`")
    pytest.importorskip("onnx_ir", reason="it is in the extra `offline`")
    from onnxtrain.losses import __name__ as losses

    assert onnxtrain.losses.__name__ == losses == "onnxtrain.offline.losses"
    assert onnxtrain.optim.__name__ == "onnxtrain.offline.optimizers"
    for name in ("gradient", "inspect", "prepare", "replace_classifier"):
        assert callable(getattr(onnxtrain, name))
    assert callable(onnxtrain.artifacts.generate_artifacts)
    assert onnxtrain.onnxblock.Block


WITHOUT_ONNX = """
import sys
sys.modules["onnx"] = None
import onnxtrain
from onnxtrain.errors import OnnxTrainError

def hint(code):
    try:
        exec(code)
    except OnnxTrainError as error:
        assert isinstance(error, ImportError)
        assert "pip install 'onnxtrain[offline]'" in str(error), error
    else:
        raise AssertionError(code)

for name in ("artifacts", "gradient", "inspect", "losses", "onnxblock", "optim", "prepare",
             "replace_classifier"):
    hint(f"onnxtrain.{name}")
    hint(f"from onnxtrain import {name}")
hint("from onnxtrain.artifacts import generate_artifacts")
hint("import onnxtrain.losses")
hint("import onnxtrain.offline.autodiff")
assert onnxtrain.fit and onnxtrain.schedules.cosine and onnxtrain.metrics.Accuracy
assert onnxtrain.federated.__name__ == "onnxtrain.federated"
"""


def test_what_needs_onnx_says_so_where_it_is_missing() -> None:
    assert imported_by(WITHOUT_ONNX) == "['onnx']"  # the None that says that it is missing


# ---- old names -----------------------------------------------------------------------------------


def needs(module: str) -> str | None:
    """The package that a module needs beside numpy and onnxruntime."""
    if module.startswith(("onnxtrain.offline", "onnxtrain.cli.demo")):
        return "onnx_ir"
    return "flwr" if module.startswith("onnxtrain.federated.") else None


@pytest.mark.parametrize("old", MOVED)
def test_old_names_of_modules_import_with_a_warning(old, monkeypatch) -> None:
    package = needs(MOVED[old])
    if package is not None:
        pytest.importorskip(package, reason="it is in an extra")
    for name in [name for name in sys.modules if name in MOVED or name.startswith(f"{old}.")]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert told[-1].category is DeprecationWarning
    assert str(told[-1].message) == f"{old} has moved to {MOVED[old]}"
    assert module is importlib.import_module(MOVED[old])
    assert module.__spec__.name == module.__name__ == MOVED[old]


@pytest.mark.parametrize(
    "code",
    [
        "from onnxtrain.api.fit import EarlyStopping, evaluate, fit",
        "from onnxtrain.api.fit.monitor import EarlyStopping",
        "from onnxtrain.api.metrics import Accuracy, Metric",
        "from onnxtrain.api.metrics.classes import Accuracy",
        "from onnxtrain.api.schedulers import SCHEDULERS, CosineLRScheduler",
        "from onnxtrain.api.history import EpochRecord, History",
        "from onnxtrain.api.session import TrainingSession",
        "from onnxtrain.api.random_state import set_seed",
        "from onnxtrain.api.checkpoint import CheckpointState",
        "from onnxtrain.api.graph import default_options",
        "import onnxtrain.plots",
        "from onnxtrain.autodiff import rule, zero_gradient",
        "from onnxtrain.autodiff.gradient import gradient",
        "from onnxtrain.autodiff.ops import Ops",
        "from onnxtrain.autodiff.registry import rule",
        "from onnxtrain.autodiff.window import Window",
        "from onnxtrain.demo.network import network",
        "from onnxtrain.inspection import inspect",
        "from onnxtrain.new_head import new_head",
        "import onnxtrain.memory, onnxtrain.training_graph",
        "from onnxtrain.flower import client_app, pack, server_app",
        "from onnxtrain.flower.arrays import from_arrays, to_arrays",
        "from onnxtrain.flower.server import Server",
    ],
)
def test_what_old_pages_imported(code, monkeypatch) -> None:
    if not any(name in code for name in ("onnxtrain.api", "onnxtrain.plots")):
        package = "flwr" if "flower" in code else "onnx_ir"
        pytest.importorskip(package, reason="it is in an extra")
    for name in [name for name in sys.modules if name.startswith(tuple(MOVED))]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(compile(code, "page", "exec"), {})
    assert {each.category for each in told} == {DeprecationWarning}
    assert {each.filename for each in told} == {"page"}


def test_a_module_that_never_was() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"onnxtrain\.nothing"):
        importlib.import_module("onnxtrain.nothing")
