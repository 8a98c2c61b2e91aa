"""`generate_artifacts`, with upstream's arguments and defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from onnxtrain.errors import ArgumentTypeError
from onnxtrain.offline import losses, optimizers
from onnxtrain.offline.add_loss import Loss
from onnxtrain.offline.artifacts import Artifacts
from onnxtrain.offline.blocks.block import Block
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.graph.limits import Limits
from onnxtrain.offline.passes.batch_norm import BatchNormChoice
from onnxtrain.offline.passes.native_kernels import Precision
from onnxtrain.offline.passes.remat.budget import MemoryBudget
from onnxtrain.offline.prepare import prepare
from onnxtrain.offline.selection import list_of_names
from onnxtrain.offline.training_graph import Target


class LossType(Enum):
    """Losses by upstream's names."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """Optimizers by upstream's names."""

    AdamW = 1
    SGD = 2


def generate_artifacts(
    model: ModelLike,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | Loss | None = None,
    optimizer: OptimType | Block | str | None = None,
    artifact_directory: str | bytes | os.PathLike[Any] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike[Any] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    bn: BatchNormChoice | None = "model",
    tie_weights: bool = True,
    memory_budget: MemoryBudget | None = None,
    sizes: Mapping[str, int] | None = None,
    target: Target = "cpu",
    native: bool = True,
    precision: Precision = "float32",
    proximal: bool = False,
    verify: bool = True,
    limits: Limits | None = None,
) -> Artifacts:
    """Write the files that a device trains from; `onnxtrain.prepare` with upstream's arguments.

    Args:
        model: the forward model, or the path to its file; it is not changed.
        requires_grad: what trains (`train` of `prepare`).
        frozen_params: what does not (`freeze`).
        loss: a `LossType`, or what `prepare` takes; None where the first output is the loss.
        optimizer: an `OptimType`, or what `prepare` takes; None for no optimizer graph.
        artifact_directory: where to write; the working directory by default. It is created.
        prefix: put before each file name.
        ort_format: write each graph in the ORT format too.
        custom_op_library: the library of the model's own operators, by default that of the context
            `onnxblock.custom_op_library`.
        additional_output_names: values to return beside the loss.
        nominal_checkpoint: write a checkpoint without data too.
        loss_input_names: what the loss is called with, instead of the outputs of the model.
        bn: as in `prepare`, like all that follow; what the "model" says by default, as upstream.
        tie_weights: whether matrices of equal values train as one parameter.
        memory_budget: what a step may take beside its parameters.
        sizes: numbers for symbolic dimensions that the budget is meant for.
        target: "cpu", "cuda" or "webgpu".
        native: whether functions are called where onnxtrain-native has kernels.
        precision: what such kernels multiply in, "float32" or "bf16".
        proximal: whether updates have a proximal term.
        verify: whether each graph is loaded in onnxruntime before anything is written.
        limits: how much the model may ask for, where the defaults of `Limits` are too low.

    Returns:
        A description of what was written.

    Raises:
        MemoryBudgetError: a step cannot be made to fit; the message says what can be reached.

    """
    if isinstance(optimizer, OptimType):
        optimizer = str(optimizer.name).lower()
    if isinstance(optimizer, Block) and not isinstance(optimizer, optimizers.Optimizer):
        raise ArgumentTypeError(
            f"optimizer is an OptimType or an optimizer of onnxblock.optim, not {optimizer!r}"
        )
    return prepare(
        model,
        artifact_directory,
        train=list_of_names(requires_grad, "requires_grad"),
        freeze=list_of_names(frozen_params, "frozen_params"),
        loss=getattr(losses, loss.name)() if isinstance(loss, LossType) else loss,
        optimizer=optimizer,
        of=list_of_names(loss_input_names, "loss_input_names"),
        outputs=list_of_names(additional_output_names, "additional_output_names") or (),
        bn=bn or "model",
        tie_weights=tie_weights,
        memory_budget=memory_budget,
        sizes=sizes,
        target=target,
        native=native,
        precision=precision,
        proximal=proximal,
        prefix=prefix,
        nominal_checkpoint=nominal_checkpoint,
        ort_format=ort_format,
        custom_op_library=custom_op_library,
        verify=verify,
        limits=limits,
    )
