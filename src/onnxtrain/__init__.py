"""On-device training for ONNX models, on the stock onnxruntime.

The names a user starts with. Each is imported when it is first used: a device needs numpy and
onnxruntime alone; `onnx` is needed by the names that prepare models, on a workstation.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import OnnxTrainError
from onnxtrain.moved import install

if TYPE_CHECKING:
    from onnxtrain import artifacts, federated, onnxblock
    from onnxtrain.device import schedules
    from onnxtrain.device.heads import fit_head
    from onnxtrain.device.loop import (
        CheckFinite,
        EarlyStopping,
        History,
        Replay,
        SaveCheckpoint,
        TensorBoard,
        evaluate,
        fit,
        metrics,
    )
    from onnxtrain.device.predict import predict
    from onnxtrain.device.random_state import set_seed
    from onnxtrain.device.session import TrainingSession
    from onnxtrain.format.adapter.adapter import Adapter
    from onnxtrain.offline import losses
    from onnxtrain.offline import optimizers as optim
    from onnxtrain.offline.compare import compare
    from onnxtrain.offline.gradient import gradient
    from onnxtrain.offline.graph.limits import Limits
    from onnxtrain.offline.inspect import inspect
    from onnxtrain.offline.lora import Lora
    from onnxtrain.offline.merge_adapter import merge_adapter
    from onnxtrain.offline.passes.replace_classifier import replace_classifier
    from onnxtrain.offline.prepare import prepare
    from onnxtrain.offline.quantize import Quantize
    from onnxtrain.offline.sparse import Sparse

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "CheckFinite",
    "EarlyStopping",
    "History",
    "Limits",
    "Lora",
    "OnnxTrainError",
    "Quantize",
    "Replay",
    "SaveCheckpoint",
    "Sparse",
    "TensorBoard",
    "TrainingSession",
    "__version__",
    "artifacts",
    "compare",
    "evaluate",
    "federated",
    "fit",
    "fit_head",
    "gradient",
    "inspect",
    "losses",
    "merge_adapter",
    "metrics",
    "onnxblock",
    "optim",
    "predict",
    "prepare",
    "replace_classifier",
    "schedules",
    "set_seed",
]

# The names that are not modules of this package, by where they are defined.
_LOOP = "CheckFinite EarlyStopping History Replay SaveCheckpoint TensorBoard evaluate fit".split()
_HOMES = dict.fromkeys(_LOOP, "onnxtrain.device.loop") | {
    "Adapter": "onnxtrain.format.adapter.adapter",
    "Limits": "onnxtrain.offline.graph.limits",
    "Lora": "onnxtrain.offline.lora",
    "Quantize": "onnxtrain.offline.quantize",
    "Sparse": "onnxtrain.offline.sparse",
    "TrainingSession": "onnxtrain.device.session",
    "compare": "onnxtrain.offline.compare",
    "fit_head": "onnxtrain.device.heads",
    "gradient": "onnxtrain.offline.gradient",
    "inspect": "onnxtrain.offline.inspect",
    "merge_adapter": "onnxtrain.offline.merge_adapter",
    "predict": "onnxtrain.device.predict",
    "prepare": "onnxtrain.offline.prepare",
    "replace_classifier": "onnxtrain.offline.passes.replace_classifier",
    "set_seed": "onnxtrain.device.random_state",
}
install()


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'onnxtrain' has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        value = import_module(f"onnxtrain.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
