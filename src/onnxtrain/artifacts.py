"""Training artifacts: from a model and a loss to a folder that any device can train from.

`generate_artifacts` is the recipe: add the loss, decide what trains, differentiate, and write the
graphs and the checkpoint, all of them or none.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onnxtrain import onnxblock
from onnxtrain.api.checkpoint_file import WrittenCheckpoint, write_checkpoint
from onnxtrain.artifact_folder import Folder
from onnxtrain.autodiff.load import ModelLike
from onnxtrain.autodiff.prepare import BatchNormMode, prepare
from onnxtrain.errors import ModelError, OnnxTrainError, UnknownNameError
from onnxtrain.inspection import Role, roles
from onnxtrain.onnxblock.block import names_of
from onnxtrain.onnxblock.checkpoint import content_of
from onnxtrain.onnxblock.external import locate
from onnxtrain.training_graph import TrainingGraphs, build_training_graphs

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


Loss = LossType | onnxblock.Block | Callable[..., Any] | onnx.ModelProto | str | os.PathLike[str]


@dataclass(frozen=True)
class Artifacts:
    """What `generate_artifacts` wrote."""

    directory: Path
    files: dict[str, int]
    trainable: dict[str, int]
    frozen: dict[str, int]
    statistics: dict[str, int]
    loss: str
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        """Return the summary as a few lines of text."""
        size = sum(self.files.values())
        return "\n".join(
            [
                f"{self.directory}: {len(self.files)} files, {size:,} bytes",
                *(f"  {name}  {bytes_:,}" for name, bytes_ in self.files.items()),
                f"trains {len(self.trainable)} tensors ({sum(self.trainable.values()):,} numbers), "
                f"{len(self.frozen)} frozen, {len(self.statistics)} running statistics",
                f"loss {self.loss!r}, outputs {', '.join(map(repr, self.outputs))}",
            ]
        )


def generate_artifacts(
    model: ModelLike,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: Loss | None = None,
    optimizer: OptimType | onnxblock.Block | None = None,
    artifact_directory: str | bytes | os.PathLike[Any] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike[Any] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    bn: BatchNormMode | None = None,
) -> Artifacts:
    """Write the files that a device trains from.

    Args:
        model: the forward model, or the path to its file; it is not changed.
        requires_grad: names or patterns (`"classifier.*"`) of what trains. Where neither this nor
            `frozen_params` is given, every weight that the loss depends on trains.
        frozen_params: names or patterns of parameters that are in the checkpoint and do not train.
        loss: a `LossType`, a Block, a function over block operators, or an ONNX model; None where
            the first output is the loss already.
        optimizer: an `OptimType` or an optimizer Block; None for no optimizer graph.
        artifact_directory: where to write; the working directory by default. It is created.
        prefix: put before each file name.
        ort_format: write each graph in the ORT format too.
        custom_op_library: the library of the model's own operators.
        additional_output_names: values to give out behind the loss.
        nominal_checkpoint: write a checkpoint without data too.
        loss_input_names: what the loss is called with, instead of the outputs of the model.
        bn: "batch" or "frozen" statistics in BatchNormalization; what the model says by default.

    Returns:
        A description of what was written.

    """
    if custom_op_library is not None and not Path(os.fsdecode(custom_op_library)).exists():
        raise OnnxTrainError(f"there is no custom_op_library at {custom_op_library!r}")
    forward, path = _forward_model(model)
    with_loss, outputs = _add_loss(forward, path, loss, loss_input_names)
    outputs += _additional(additional_output_names, outputs)
    if path is not None:
        locate(with_loss, path)
    trains, frozen = _decide(with_loss, outputs[0], requires_grad, frozen_params, bn)
    chosen = _optimizer(optimizer)
    if chosen is not None and not trains:
        raise OnnxTrainError("there is an optimizer but nothing trains: requires_grad is empty")
    graphs = build_training_graphs(with_loss, outputs, trains, frozen, bn=bn, optimizer=chosen)
    models = {"training_model": graphs.training, "eval_model": graphs.evaluation}
    if chosen is not None and graphs.step is not None:
        models["optimizer_model"] = _optimizer_model(chosen, graphs)
        models["step_model"] = graphs.step
    with Folder(artifact_directory, prefix) as folder:
        _write(folder, models, graphs, outputs, nominal_checkpoint)
        if ort_format:
            _write_ort(folder, models, custom_op_library)
        files = folder.publish()
    _log.info("wrote %d files to %s", len(files), folder.directory)
    return Artifacts(
        directory=folder.directory,
        files=files,
        trainable={t.name: _count(t) for t in graphs.trainable},
        frozen={t.name: _count(t) for t in graphs.frozen if t.name not in graphs.statistics},
        statistics={t.name: _count(t) for t in graphs.frozen if t.name in graphs.statistics},
        loss=outputs[0],
        outputs=tuple(outputs[1:]),
    )


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
    names = list(loss_input_names) if loss_input_names else given
    if isinstance(loss, LossType) and not loss_input_names and len(given) > 1:
        raise OnnxTrainError(
            f"the model has {len(given)} outputs ({', '.join(map(repr, given))}) and "
            f"{loss.name} takes one: say which with loss_input_names=[...]"
        )
    with onnxblock.base(forward, path) as accessor:
        outputs = names_of(block(*names))
        return accessor.model, outputs


def _loss_block(loss: Loss | None) -> onnxblock.Block:
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, LossType):
        made: onnxblock.Block = getattr(onnxblock.loss, loss.name)()
        return made
    if isinstance(loss, onnxblock.Block):
        return loss
    if isinstance(loss, onnx.ModelProto | os.PathLike):
        return onnxblock.loss.ModelLoss(loss)
    if isinstance(loss, str) and Path(loss).is_file():
        return onnxblock.loss.ModelLoss(loss)
    if callable(loss) and not isinstance(loss, type):
        return onnxblock.loss.FunctionLoss(loss)
    raise OnnxTrainError(
        "loss is a LossType, an instance of onnxblock.Block, a function, an ONNX model or the "
        f"path of one, not {loss!r}"
    )


def _additional(names: Sequence[str] | None, outputs: Sequence[str]) -> list[str]:
    if names is None:
        return []
    if not isinstance(names, list | tuple):
        raise OnnxTrainError(f"additional_output_names is a list of names, not {names!r}")
    return [name for name in names if name not in outputs]


# ---- what trains ---------------------------------------------------------------------------------


def _decide(
    model: onnx.ModelProto,
    loss: str,
    requires_grad: Sequence[str] | None,
    frozen_params: Sequence[str] | None,
    bn: BatchNormMode | None,
) -> tuple[list[str], list[str]]:
    """Return the names of what trains and of what is frozen."""
    prepared = prepare(model, "frozen" if bn is None else bn)
    graph = prepared.graph
    values = {v.name: v for v in (*graph.inputs, *(o for n in graph for o in n.outputs))}
    if loss not in values:
        raise UnknownNameError(f"the model has no value {loss!r} to take as the loss")
    found = roles(graph, [values[loss]], prepared.opset_imports[""])
    frozen = _matching(frozen_params or (), found)
    if requires_grad is None:
        trains = [n for n, role in found.items() if role is Role.WEIGHT and n not in frozen]
        frozen += [n for n, role in found.items() if role is Role.STATISTIC and n not in frozen]
    else:
        trains = _listed(requires_grad, found, {v.name for v in graph.inputs})
    both = sorted(set(trains) & set(frozen))
    if both:
        raise OnnxTrainError(
            f"{_some(both)} cannot both train and be frozen: requires_grad and frozen_params "
            "overlap"
        )
    return trains, frozen


def _listed(
    requires_grad: Sequence[str], found: Mapping[str, Role], inputs: Container[str | None]
) -> list[str]:
    """Return what is named to train; a name or pattern that nothing has is an error."""
    for name in requires_grad:
        if name not in inputs and not _matching([name], found):
            weights = _some(n for n, role in found.items() if role is Role.WEIGHT)
            raise UnknownNameError(
                f"requires_grad names {name!r}, and no initializer or input of the model is called "
                f"that; its weights are {weights}"
            )
    return _matching(requires_grad, found) + [n for n in requires_grad if n in inputs]


def _matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names that are listed, or that match a listed pattern, in their own order."""
    listed = set(patterns)
    globs = [p for p in listed if any(c in p for c in "*?[")]
    return [n for n in names if n in listed or any(fnmatch.fnmatchcase(n, g) for g in globs)]


def _some(names: Iterable[str], most: int = 12) -> str:
    listed = [repr(n) for n in names]
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest


# ---- optimizer -----------------------------------------------------------------------------------


def _optimizer(optimizer: OptimType | onnxblock.Block | None) -> onnxblock.optim.Optimizer | None:
    if optimizer is None:
        return None
    if isinstance(optimizer, OptimType):
        made: onnxblock.optim.Optimizer = getattr(onnxblock.optim, optimizer.name)()
        return made
    if isinstance(optimizer, onnxblock.optim.Optimizer):
        return optimizer
    raise TypeError(
        f"optimizer is an OptimType or an optimizer of onnxblock.optim, not {optimizer!r}"
    )


def _optimizer_model(
    optimizer: onnxblock.optim.Optimizer, graphs: TrainingGraphs
) -> onnx.ModelProto:
    opset = next(o.version for o in graphs.training.opset_import if o.domain == "")
    with onnxblock.empty_base(opset) as accessor:
        optimizer((graphs.trainable, graphs.frozen))
        model = accessor.model
    model.ir_version = graphs.training.ir_version
    return model


# ---- files ---------------------------------------------------------------------------------------


def _write(
    folder: Folder,
    models: Mapping[str, onnx.ModelProto],
    graphs: TrainingGraphs,
    outputs: Sequence[str],
    nominal: bool,
) -> None:
    """Write the checkpoint, then the graphs that point into it for what is frozen."""
    parameters = (graphs.trainable, graphs.frozen)
    written = write_checkpoint(folder.file("checkpoint"), content_of(parameters), sort=False)
    if written.data_path is not None:
        folder.file("checkpoint.data")
    if nominal:
        content = content_of(parameters, nominal=True)
        write_checkpoint(folder.file("nominal_checkpoint"), content, sort=False)
    notes = _notes(graphs, outputs, folder.prefix)
    for name, model in models.items():
        _point_to_checkpoint(model, written)
        del model.metadata_props[:]
        model.metadata_props.add(key="onnxtrain", value=notes)
        file = folder.file(f"{name}.onnx")
        try:
            file.write_bytes(model.SerializeToString())
        except OSError as error:
            raise OnnxTrainError(f"{file.name!r} cannot be written: {error}") from None


def _notes(graphs: TrainingGraphs, outputs: Sequence[str], prefix: str) -> str:
    """Describe the artifacts for the runtimes that read them, as JSON in each graph file."""
    return json.dumps(
        {
            "format": 1,
            "checkpoint": f"{prefix}checkpoint",
            "loss": outputs[0],
            "outputs": list(outputs[1:]),
            "trainable": [t.name for t in graphs.trainable],
            "frozen": [t.name for t in graphs.frozen if t.name not in graphs.statistics],
            "statistics": list(graphs.statistics),
        }
    )


def _point_to_checkpoint(model: onnx.ModelProto, written: WrittenCheckpoint) -> None:
    """Let the graph take frozen parameters from the checkpoint file, where they are stored once."""
    for tensor in model.graph.initializer:
        place = written.locations.get(tensor.name)
        if place is None or _is_read_by_shape_inference(tensor, place.length):
            continue
        stub = TensorProto(
            name=tensor.name,
            dims=tensor.dims,
            data_type=tensor.data_type,
            data_location=TensorProto.EXTERNAL,
        )
        entries = {"location": place.path.name, "offset": place.offset, "length": place.length}
        for key, entry in entries.items():
            stub.external_data.add(key=key, value=str(entry))
        tensor.CopyFrom(stub)


def _is_read_by_shape_inference(tensor: onnx.TensorProto, size: int) -> bool:
    """Tell small ones, such as shapes and scales, which onnxruntime wants in the graph itself."""
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    return size <= (64 if tensor.data_type in floats else 1024)


def _write_ort(
    folder: Folder,
    models: Iterable[str],
    custom_op_library: str | bytes | os.PathLike[Any] | None,
) -> None:
    """Convert each graph to the ORT format, with the list of operators that a small build needs."""
    import onnxruntime as ort
    from onnxruntime.tools.ort_format_model import create_config_from_models

    for name in models:
        source, target = folder.file(f"{name}.onnx"), folder.file(f"{name}.ort")
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(target)
        # Beyond this level the layout is made for the CPU that happens to convert.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry("session.save_model_format", "ORT")
        if custom_op_library is not None:
            options.register_custom_ops_library(os.fsdecode(custom_op_library))
        try:
            ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
            config = folder.file(f"{name}.required_operators.config")
            create_config_from_models([target], config, False)
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            raise OnnxTrainError(
                f"onnxruntime could not convert {source.name!r} to the ORT format: {error}"
            ) from None


def _count(tensor: onnx.TensorProto) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64))
