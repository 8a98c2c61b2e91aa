"""The training loop: `fit` and `evaluate`, and what is passed to them."""

from onnxtrain.device.loop.callbacks import Run
from onnxtrain.device.loop.checkpoint_policy import SaveCheckpoint
from onnxtrain.device.loop.evaluation import evaluate
from onnxtrain.device.loop.fit import fit
from onnxtrain.device.loop.history import EpochRecord, History
from onnxtrain.device.loop.monitor import EarlyStopping
from onnxtrain.device.loop.nan_guard import CheckFinite
from onnxtrain.device.loop.replay import Replay
from onnxtrain.device.loop.tensorboard import TensorBoard

__all__ = [
    "CheckFinite",
    "EarlyStopping",
    "EpochRecord",
    "History",
    "Replay",
    "Run",
    "SaveCheckpoint",
    "TensorBoard",
    "evaluate",
    "fit",
]
