"""Every graph that is generated is valid ONNX, and runs on the newest and the oldest onnxruntime.

The networks of `tests/models` times a few optimizers and losses are written to folders. The oldest
onnxruntime that is supported lives in an environment of its own, which `make test` sets up.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
import torch

from exporting import export
from oldest_program import run_all
from onnxtrain import onnxblock
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.format.checkpoint.file import read_checkpoint
from onnxtrain.onnxblock.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ClipGradNorm,
    ClipGradValue,
    Lion,
    ParameterGroup,
    RMSprop,
)
from zoo import NETWORKS

HERE = Path(__file__).resolve().parent
OLDEST = os.environ.get("ONNXTRAIN_OLDEST_PYTHON", str(HERE.parents[1] / ".venv-oldest/bin/python"))


@dataclass(frozen=True)
class Case:
    """A network, how it is exported, and what is made of it."""

    network: str
    optimizer: Any = OptimType.AdamW
    loss: Callable[[], Any] | LossType = LossType.CrossEntropyLoss
    exporter: str = "torchscript"
    training: bool = False
    trains: tuple[str, ...] | None = None


loss = onnxblock.loss
CASES = {
    **{name: Case(name) for name in NETWORKS if not name.startswith(("Fresh", "Smooth"))},
    **{f"{name}-dynamo": Case(name, exporter="dynamo") for name in ("CNN", "Bert", "UNet")},
    "ResNet18-training": Case("ResNet18", training=True),
    # With kinks, rounding would decide what the statistics of three samples amplify.
    "MobileNetV2-training": Case("SmoothMobileNetV2", OptimType.SGD, training=True),
    "MobileNetV2-head": Case("MobileNetV2", trains=("classifier.*",)),
    "SGD": Case("MLP", OptimType.SGD),
    "SGD-nesterov": Case("MLP", SGD(momentum=0.9, nesterov=True, weight_decay=0.1)),
    "Adam": Case("MLP", Adam(weight_decay=0.1)),
    "AdamW-torch": Case("MLP", AdamW.torch(weight_decay=0.1)),
    "RMSprop": Case("MLP", RMSprop()),
    "Adagrad": Case("MLP", Adagrad()),
    "Lion": Case("MLP", Lion()),
    "clip-norm": Case("MLP", AdamW(clip_grad=ClipGradNorm(0.1))),
    "clip-value": Case("MLP", SGD(clip_grad=ClipGradValue(0.01))),
    "groups": Case("MLP", AdamW(groups=[ParameterGroup("*.bias", 0.0, lr_scale=2.0)])),
    "MSE": Case("MLP", loss=LossType.MSELoss),
    "L1": Case("MLP", loss=LossType.L1Loss),
    "BCE": Case("MLP", loss=LossType.BCEWithLogitsLoss),
    "Huber": Case("MLP", loss=loss.HuberLoss),
    "KLDiv": Case("MLP", loss=lambda: loss.KLDivLoss("batchmean")),
    "smoothed": Case("MLP", loss=lambda: loss.CrossEntropyLoss(label_smoothing=0.1)),
    "weighted": Case("MLP", loss=lambda: loss.CrossEntropyLoss(np.arange(1, 6))),
    "pixels": Case("UNet", loss=lambda: loss.CrossEntropyLoss(ignore_index=1)),
}  # fmt: skip


def generate(case: Case, folder: Path) -> None:
    torch.manual_seed(0)
    make, data = NETWORKS[case.network]
    net = make().train(case.training)
    written = generate_artifacts(
        export(net, data(3), case.exporter),
        requires_grad=case.trains,
        loss=case.loss if isinstance(case.loss, LossType) else case.loss(),
        optimizer=case.optimizer,
        artifact_directory=folder,
        additional_output_names=["y"],
    )
    assert written.trainable
    np.savez(folder / "feeds.npz", **feeds(folder, data(3).numpy()))


def feeds(folder: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    """What all graphs of a folder are fed with; states of the optimizer are not zero."""
    content = read_checkpoint(folder / "checkpoint")
    given = {**content.trainable, **content.frozen, "x": x, "step": np.array([1])}
    given["lazy_reset_grad"] = np.array([True])
    for file in folder.glob("*.onnx"):
        for value in onnx.load(file, load_external_data=False).graph.input:
            kind = value.type.tensor_type
            shape = [dim.dim_value or len(x) for dim in kind.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
            given.setdefault(value.name, np.full(shape, 0.01).astype(dtype))
    return given


def check(file: Path) -> None:
    """The file is valid ONNX, of plain operators, and claims no newer version than it needs.

    Functions have plain operators as their bodies.
    """
    onnx.checker.check_model(file, full_check=True)
    model = onnx.load(file, load_external_data=False)
    assert {opset.domain for opset in model.opset_import} <= {"", "ai.onnxtrain"}
    model = onnx.inliner.inline_local_functions(model)
    assert {node.domain for node in model.graph.node} == {""}
    assert model.ir_version <= 9 and model.opset_import[0].version <= 20


def run_on_oldest(folder: Path) -> dict[str, np.ndarray]:
    program = [OLDEST, str(HERE / "oldest_program.py"), str(folder)]
    result = subprocess.run(program, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.startswith("1.19.")
    return dict(np.load(folder / "outputs.npz"))


@pytest.mark.parametrize("name", CASES)
def test_the_graphs_are_valid_and_run_on_the_newest_and_oldest(name: str, tmp_path: Path) -> None:
    generate(CASES[name], tmp_path)
    files = sorted(tmp_path.glob("*.onnx"))
    assert len(files) == 4
    for file in files:
        check(file)
    now = run_all(tmp_path)
    for output, value in now.items():
        assert np.isfinite(value).all(), output
    if not Path(OLDEST).exists():
        pytest.skip(f"no environment with the oldest onnxruntime at {OLDEST}; `make test` makes it")
    then = run_on_oldest(tmp_path)
    assert set(then) == set(now)
    for output, value in now.items():
        scale = np.abs(value).max(initial=1e-3)
        np.testing.assert_allclose(then[output], value, atol=1e-3 * scale, err_msg=output)
