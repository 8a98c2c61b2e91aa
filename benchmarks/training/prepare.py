"""Prepares the files of workloads: weights, exported models and our artifacts.

Runs where torch, onnx and onnxtrain are installed. The arguments are the folder of all workloads
and the workloads.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nets
from onnxtrain import prepare as prepare_artifacts
from onnxtrain.artifacts import LossType, generate_artifacts
from onnxtrain.onnxblock.optim import AdamW
from plan import BETAS, EPSILON, WEIGHT_DECAY, Workload, folder_of, read_workload, write_workload

HERE = Path(__file__).parent
OURS = HERE.parents[1] / "src" / "onnxtrain"


def prepare(root: Path, workload: Workload) -> None:
    """Write what the peers need, unless it is there and was made from the same sources."""
    folder = folder_of(root, workload)
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*sorted(HERE.glob("prepare*.py")), HERE / "nets.py"]
    _once(folder / "exported.stamp", _digest(workload, sources), lambda: _export(folder, workload))
    sources += sorted(OURS.rglob("*.py"))
    _once(folder / "ours.stamp", _digest(workload, sources), lambda: _ours(folder, workload))


def _once(stamp: Path, digest: str, make: Callable[[], None]) -> None:
    if stamp.exists() and stamp.read_text() == digest:
        return
    make()
    stamp.write_text(digest)


def _digest(workload: Workload, files: Sequence[Path]) -> str:
    sums = hashlib.sha256(f"{torch.__version__} {write_workload(workload)}".encode())
    for file in files:
        sums.update(file.read_bytes())
    return sums.hexdigest()


# ---- torch -> ONNX -------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """For a peer that has no loss of its own, in operators that it can differentiate."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.net(x)
        chances = scores - torch.log(torch.exp(scores).sum(1, keepdim=True))
        return -(chances * targets).sum() / targets.shape[0]


def _export(folder: Path, workload: Workload) -> None:
    net = network(workload)
    torch.save(net.state_dict(), folder / "weights.pt")
    x = _example(workload)
    batch = workload.statistics == "batch"
    to_onnx(net.train(batch), (x,), folder / "forward.onnx", 17)
    # Its gradient of LayerNormalization needs outputs that no exporter writes; before opset 17
    # there is no such operator. BatchNormalization is exported in inference mode and not folded:
    # the package trains it on the statistics of the batch all the same, and fails on the other.
    to_onnx(net.eval(), (x,), folder / "forward-15.onnx", 15, fold_norms=not batch)
    targets = torch.eye(workload.classes)[torch.zeros(workload.batch, dtype=torch.int64)]
    to_onnx(WithLoss(net).train(batch), (x, targets), folder / "with-loss.onnx", 17)
    for made in ("upstream", "upstream-embedded", "onnxsim"):
        shutil.rmtree(folder / made, ignore_errors=True)


def network(workload: Workload, seed: int = 1) -> nets.Split:
    """Make the network, with normalizations that look used.

    Fresh ones have equal parameters, and the exporter stores equal tensors once: they would be
    trained as one.
    """
    torch.manual_seed(seed)
    net = nets.build(workload.net, dict(workload.options))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.02)
            nn.init.normal_(module.bias, 0.0, 0.02)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.02)
            module.running_var.uniform_(0.9, 1.1)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias, 0.0, 0.02)
    return net


def _example(workload: Workload) -> torch.Tensor:
    shape = (workload.batch, *workload.shape)
    return torch.zeros(shape, dtype=torch.int64) if workload.words else torch.zeros(shape)


def to_onnx(
    net: nn.Module, inputs: tuple[Any, ...], path: Path, opset: int, *, fold_norms: bool = True
) -> None:
    mode = torch.onnx.TrainingMode
    evaluation = mode.EVAL if fold_norms else mode.PRESERVE
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, inputs, path, dynamo=False, opset_version=opset,
            input_names=["x", "targets"][: len(inputs)],
            output_names=["loss" if len(inputs) > 1 else "logits"],
            training=mode.TRAINING if net.training else evaluation,
            do_constant_folding=not net.training,
        )  # fmt: skip
    logging.disable(logging.NOTSET)


# ---- our artifacts -------------------------------------------------------------------------------


def _ours(folder: Path, workload: Workload) -> None:
    shutil.rmtree(folder / "ours", ignore_errors=True)
    optimizer = AdamW(betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, flavour="torch")
    statistics = "batch" if workload.statistics == "batch" else None
    if "precision" in workload.generate:  # upstream's function does not have it
        model, target = folder / "forward.onnx", folder / "ours"
        prepare_artifacts(
            model, target, optimizer=optimizer, bn=statistics or "auto", outputs=[],
            **workload.generate,
        )  # fmt: skip
        return
    generate_artifacts(
        folder / "forward.onnx",
        requires_grad=["head.*"] if workload.trains == "head" else None,
        loss=LossType.CrossEntropyLoss,
        optimizer=optimizer,
        artifact_directory=folder / "ours",
        bn=statistics,
        **workload.generate,
    )


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        prepare(Path(sys.argv[1]), read_workload(argument))
