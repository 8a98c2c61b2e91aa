"""Training artifacts: from a model and a loss to a folder that any device can train from.

`generate_artifacts` is the recipe: add the loss, decide what trains, differentiate, and write the
graphs and the checkpoint, all of them or none.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import (
    ArgumentError,
    ArgumentTypeError,
    ModelError,
    OnnxTrainError,
    UnknownNameError,
)
from onnxtrain.offline import losses, optimizers
from onnxtrain.offline.blocks.accessor import base, current_library, empty_base
from onnxtrain.offline.blocks.block import Block, names_of
from onnxtrain.offline.blocks.external import locate
from onnxtrain.offline.blocks.operators import PassThrough
from onnxtrain.offline.blocks.values import without_weights
from onnxtrain.offline.frontend.canonical_model import BatchNormMode, prepare
from onnxtrain.offline.frontend.load import ModelLike
from onnxtrain.offline.memory import Activations, estimate_proto
from onnxtrain.offline.passes.remat.budget import StepMemory, fit_into
from onnxtrain.offline.passes.webgpu import (
    ONNXRUNTIME_WEB,
    Uncovered,
    rewrite_for_webgpu,
    uncovered,
)
from onnxtrain.offline.selection import Survey, choose, list_of_names, survey
from onnxtrain.offline.training_graph import Target, TrainingGraphs, build_training_graphs, finished
from onnxtrain.offline.writer.files import write_files, write_ort
from onnxtrain.offline.writer.folder import Folder

USE_PATH_THRESHOLD = 2147483648  # bytes; a larger model is given by its path
_log = logging.getLogger(__name__)


class LossType(Enum):
    """The losses that can be asked for by name."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """The optimizers that can be asked for by name."""

    AdamW = 1
    SGD = 2


Loss = LossType | Block | Callable[..., Any] | onnx.ModelProto | str | os.PathLike[str]


@dataclass(frozen=True)
class Artifacts:
    """What `generate_artifacts` wrote.

    Attributes:
        directory: where it is.
        files: the size of each file, in bytes.
        trainable: how many numbers each tensor has that trains.
        frozen: the same for those in the checkpoint that never change.
        statistics: the same for running statistics, which are updated.
        unreached: what looks like a weight, but has no gradient.
        without_gradient: operators that would have to be passed if more were trained, and cannot.
        loss: the name of the loss.
        outputs: the names of what is given out beside it.
        memory: what a step takes, where a budget was given.
        on_cpu: with `target="webgpu"`, the nodes on floats that WebGPU has no kernel for.

    """

    directory: Path
    files: dict[str, int]
    trainable: dict[str, int]
    frozen: dict[str, int]
    statistics: dict[str, int]
    unreached: tuple[str, ...]
    without_gradient: tuple[str, ...]
    loss: str
    outputs: tuple[str, ...]
    memory: StepMemory | None
    on_cpu: tuple[Uncovered, ...]
    _graph: onnx.ModelProto = field(repr=False, compare=False)
    _inputs: frozenset[str] = field(repr=False, compare=False)

    @property
    def parameter_count(self) -> int:
        """How many numbers train."""
        return sum(self.trainable.values())

    @cached_property
    def activations(self) -> Activations:
        """What a training step takes beside the parameters, estimated from the graph."""
        return self.estimate_memory()

    @property
    def activation_bytes_per_sample(self) -> int:
        """How much memory each sample of a batch takes at the peak, as far as can be told."""
        return self.activations.bytes_per_sample

    def estimate_memory(self, sizes: Mapping[str, int] | None = None) -> Activations:
        """Estimate what a step takes, with numbers for symbolic dimensions by their names."""
        return estimate_proto(self._graph, sizes, self._inputs)

    def __str__(self) -> str:
        """Return the summary as a few lines of text."""
        size = sum(self.files.values())
        lines = [
            f"{self.directory}: {len(self.files)} files, {size:,} bytes",
            *(f"  {name}  {bytes_:,}" for name, bytes_ in self.files.items()),
            f"trains        {len(self.trainable)} tensors, {self.parameter_count:,} numbers",
            f"frozen        {len(self.frozen)} tensors, {sum(self.frozen.values()):,} numbers",
            f"statistics    {len(self.statistics)} tensors (BatchNormalization)",
            f"activations   {self.activations}",
            f"loss          {self.loss}",
        ]
        more = (
            ("budget", str(self.memory or "")),
            ("outputs", ", ".join(self.outputs)),
            ("not reached", ", ".join(self.unreached)),
            ("no gradient", "; ".join(self.without_gradient)),
            ("not on WebGPU", _shortened(self.on_cpu)),
        )
        return "\n".join([*lines, *(f"{name:14}{text}" for name, text in more if text)])


def generate_artifacts(
    model: ModelLike,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: Loss | None = None,
    optimizer: OptimType | Block | None = None,
    artifact_directory: str | bytes | os.PathLike[Any] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike[Any] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    bn: BatchNormMode | None = None,
    memory_budget: float | None = None,
    sizes: Mapping[str, int] | None = None,
    target: Target = "cpu",
    proximal: bool = False,
) -> Artifacts:
    """Write the files that a device trains from.

    Args:
        model: the forward model, or the path to its file; it is not changed.
        requires_grad: names or patterns (`"classifier.*"`) of what trains. By default every weight
            does that the loss depends on and that `frozen_params` does not name.
        frozen_params: names or patterns of parameters that do not train. Other weights that do not
            train are frozen as well.
        loss: a `LossType`, a Block, a function over block operators, or an ONNX model; None where
            the first output is the loss already.
        optimizer: an `OptimType` or an optimizer Block; None for no optimizer graph.
        artifact_directory: where to write; the working directory by default. It is created.
        prefix: put before each file name.
        ort_format: write each graph in the ORT format too.
        custom_op_library: the library of the model's own operators, by default that of the context
            `onnxblock.custom_op_library`.
        additional_output_names: values to give out behind the loss.
        nominal_checkpoint: write a checkpoint without data too.
        loss_input_names: what the loss is called with, instead of the outputs of the model.
        bn: "batch" or "frozen" statistics in BatchNormalization; what the model says by default.
        memory_budget: what a step may take beside its parameters: bytes (an integer, or above 1),
            or a fraction of what it takes without a budget. To keep to it, the backward pass
            computes parts of the forward pass again, which takes time.
        sizes: numbers for symbolic dimensions, by their names, that `memory_budget` is meant for.
        target: "webgpu" writes graphs of operators that onnxruntime-web has WebGPU kernels for, as
            far as that can be done; the result tells what is left (`on_cpu`). They run elsewhere
            too, with the same numbers, if more slowly.
        proximal: let updates pull the weights back to those of a reference, by a strength that is
            set on the device (FedProx); see `TrainingSession.set_proximal`.

    Returns:
        A description of what was written.

    Raises:
        MemoryBudgetError: a step cannot be made to fit; the message says what can be reached.

    """
    if target not in ("cpu", "webgpu"):
        raise ArgumentTypeError(f"target is 'cpu' or 'webgpu', not {target!r}")
    library = _library(custom_op_library)
    forward, path = _forward_model(model)
    with_loss, outputs = _add_loss(forward, path, loss, loss_input_names)
    outputs += _additional(additional_output_names, outputs)
    if path is not None:
        locate(with_loss, path)
    found = _survey(with_loss, outputs[0])
    trains, frozen = choose(found, requires_grad, frozen_params)
    chosen = _optimizer(optimizer)
    if not trains and (chosen is not None or (requires_grad is None and not frozen_params)):
        raise OnnxTrainError(_nothing_trains(outputs[0], requires_grad, frozen_params))
    if proximal and chosen is None:
        raise ArgumentError("proximal=True is a term of the update: it needs an optimizer")
    build = partial(
        build_training_graphs, with_loss, outputs, trains, frozen,
        bn=bn, optimizer=chosen, target=target, proximal=proximal,
    )  # fmt: skip
    inputs = frozenset(info.name for info in forward.graph.input)
    graphs, memory = build(), None
    if memory_budget is not None:
        graphs, memory = fit_into(memory_budget, graphs, build, sizes, inputs)
    models = {"training_model": graphs.training, "eval_model": graphs.evaluation}
    if chosen is not None and graphs.step is not None:
        models["optimizer_model"] = _optimizer_model(chosen, graphs, target, proximal)
        models["step_model"] = graphs.step
    on_cpu = _not_on_webgpu(models) if target == "webgpu" else {}
    graph = without_weights(graphs.training)  # before names and shapes go that a file does not need
    with Folder(artifact_directory, prefix) as folder:
        told = {name: [str(item) for item in items[:8]] for name, items in on_cpu.items()}
        write_files(folder, models, graphs, outputs, nominal_checkpoint, memory, target, told)
        if ort_format:
            write_ort(folder, models, library)
        files = folder.publish()
    _log.info("wrote %d files to %s", len(files), folder.directory)
    running = set(graphs.statistics)
    return Artifacts(
        directory=folder.directory,
        files=files,
        trainable=_counts(graphs.trainable),
        frozen=_counts(t for t in graphs.frozen if t.name not in running),
        statistics=_counts(t for t in graphs.frozen if t.name in running),
        unreached=found.unreached,
        without_gradient=found.without_gradient(),
        loss=outputs[0],
        outputs=tuple(outputs[1:]),
        memory=memory,
        on_cpu=tuple(item for items in on_cpu.values() for item in items),
        _graph=graph,
        _inputs=inputs,
    )


def _library(given: str | bytes | os.PathLike[Any] | None) -> str | None:
    library = current_library() if given is None else given
    if library is None:
        return None
    path = os.fsdecode(library)
    if not Path(path).exists():
        raise OnnxTrainError(f"there is no custom_op_library at {path!r}")
    return path


# ---- the model and its loss ----------------------------------------------------------------------


def _forward_model(model: ModelLike) -> tuple[onnx.ModelProto, Path | None]:
    """Return the model, and where it is; weights in files beside it are not read."""
    if isinstance(model, onnx.ModelProto):
        if model.ByteSize() > USE_PATH_THRESHOLD:
            raise ModelError("the model is larger than 2 GB: give the path of its file instead")
        return copy.deepcopy(model), None
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(
            f"a model is an onnx.ModelProto or a path to a file, not {type(model).__name__}"
        )
    path = Path(os.fsdecode(os.fspath(model)))
    if not path.is_file():
        raise ModelError(f"there is no model file at {str(path)!r}")
    try:
        return onnx.load(path, load_external_data=False), path
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error}") from None
    except Exception:  # each of the formats that onnx reads has its own errors
        raise ModelError(f"{str(path)!r} is not an ONNX model, or it is truncated") from None


def _add_loss(
    forward: onnx.ModelProto,
    path: Path | None,
    loss: Loss | None,
    loss_input_names: Sequence[str] | None,
) -> tuple[onnx.ModelProto, list[str]]:
    """Add the loss to the model; return it with the names of the loss and of what goes with it."""
    given = [output.name for output in forward.graph.output]
    block = _loss_block(loss)
    names = list_of_names(loss_input_names, "loss_input_names") or given
    if isinstance(loss, LossType) and not loss_input_names and len(given) > 1:
        raise OnnxTrainError(
            f"the model has {len(given)} outputs ({', '.join(map(repr, given))}) and "
            f"{loss.name} takes one: say which with loss_input_names=[...]"
        )
    _require_taken(block, names)
    if loss_input_names and isinstance(block, losses.ModelLoss):
        block = block.by_position(names)
    with base(forward, path) as accessor:
        outputs = names_of(block(*names))
        return accessor.model, outputs


def _require_taken(block: Block, names: Sequence[str]) -> None:
    """Refuse names that the loss has no parameters for, or lacks."""
    try:
        inspect.signature(block.build).bind(*names)
    except TypeError as error:
        raise ArgumentTypeError(
            f"the loss {type(block).__name__} cannot be called with {', '.join(map(repr, names))} "
            f"({error}): say what it is to be called with in loss_input_names=[...]"
        ) from None


def _loss_block(loss: Loss | None) -> Block:
    if loss is None:
        return PassThrough()
    if isinstance(loss, LossType):
        made: Block = getattr(losses, loss.name)()
        return made
    if isinstance(loss, Block):
        return loss
    if isinstance(loss, onnx.ModelProto | os.PathLike):
        return losses.ModelLoss(loss)
    if isinstance(loss, str) and Path(loss).is_file():
        return losses.ModelLoss(loss)
    if callable(loss) and not isinstance(loss, type):
        return losses.FunctionLoss(loss)
    raise OnnxTrainError(
        "loss is a LossType, an instance of onnxblock.Block, a function, an ONNX model or the "
        f"path of one, not {loss!r}"
    )


def _additional(names: Sequence[str] | None, outputs: Sequence[str]) -> list[str]:
    listed = list_of_names(names, "additional_output_names") or []
    return [name for name in dict.fromkeys(listed) if name not in outputs]


# ---- what trains ---------------------------------------------------------------------------------


def _survey(model: onnx.ModelProto, loss: str) -> Survey:
    prepared = prepare(model, "frozen")
    graph = prepared.graph
    values = {v.name: v for v in (*graph.inputs, *(o for n in graph for o in n.outputs))}
    if loss not in values:
        raise UnknownNameError(f"the model has no value {loss!r} to take as the loss")
    return survey(prepared, values[loss])


def _nothing_trains(loss: str, requires_grad: Any, frozen_params: Any) -> str:
    if requires_grad is not None:
        return "there is an optimizer but nothing trains: requires_grad is empty"
    if frozen_params:
        return "there is an optimizer but nothing trains: frozen_params names every weight"
    return f"nothing trains: the loss {loss!r} depends on no weight of the model"


# ---- optimizer -----------------------------------------------------------------------------------


def _optimizer(optimizer: OptimType | Block | None) -> optimizers.Optimizer | None:
    if optimizer is None:
        return None
    if isinstance(optimizer, OptimType):
        made: optimizers.Optimizer = getattr(optimizers, optimizer.name)()
        return made
    if isinstance(optimizer, optimizers.Optimizer):
        return optimizer
    raise ArgumentTypeError(
        f"optimizer is an OptimType or an optimizer of onnxblock.optim, not {optimizer!r}"
    )


def _optimizer_model(
    optimizer: optimizers.Optimizer, graphs: TrainingGraphs, target: Target, proximal: bool
) -> onnx.ModelProto:
    opset = next(o.version for o in graphs.training.opset_import if o.domain == "")
    optimizer = copy.copy(optimizer)
    optimizer.chunked = target == "cpu"
    with empty_base(opset) as accessor:
        optimizer((graphs.trainable, graphs.frozen), proximal=proximal)
        model = accessor.model
    if target == "webgpu":
        made = ir.from_proto(model)
        rewrite_for_webgpu(made)
        model = finished(made)
    model.ir_version = graphs.training.ir_version
    return model


def _not_on_webgpu(models: Mapping[str, onnx.ModelProto]) -> dict[str, list[Uncovered]]:
    """Return the nodes of each graph that onnxruntime-web would run on the CPU; warn of them."""
    found = {name: uncovered(model, name) for name, model in models.items()}
    everything = [item for items in found.values() for item in items]
    if everything:
        _log.warning(
            "onnxruntime-web %s has no WebGPU kernel for %d nodes on floats, which it runs on the "
            "CPU: %s",
            ONNXRUNTIME_WEB, len(everything), _shortened(everything),
        )  # fmt: skip
    return found


def _shortened(found: Sequence[Uncovered]) -> str:
    more = [f"and {len(found) - 8} more"] if len(found) > 8 else []
    return "; ".join([*map(str, found[:8]), *more])


def _counts(tensors: Iterable[onnx.TensorProto]) -> dict[str, int]:
    return {tensor.name: math.prod(tensor.dims) for tensor in tensors}
