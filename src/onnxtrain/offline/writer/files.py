"""The files of the artifact folder: the checkpoint, and graphs that point into it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from onnxtrain.errors import OnnxTrainError
from onnxtrain.format.checkpoint.file import WrittenCheckpoint, write_checkpoint
from onnxtrain.format.metadata import METADATA_KEY, GraphMetadata
from onnxtrain.offline.blocks.checkpoint import content_of
from onnxtrain.offline.passes.remat.budget import StepMemory
from onnxtrain.offline.training_graph import Target, TrainingGraphs
from onnxtrain.offline.writer.folder import Folder
from onnxtrain.offline.writer.shorten_names import compact

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def write_files(
    folder: Folder,
    models: Mapping[str, onnx.ModelProto],
    graphs: TrainingGraphs,
    outputs: Sequence[str],
    nominal: bool,
    memory: StepMemory | None = None,
    target: Target = "cpu",
    on_cpu: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Write the checkpoint, then the graphs that point into it for what is frozen.

    `on_cpu` says of each graph which nodes its target has no kernel for.
    """
    parameters = (graphs.trainable, graphs.frozen)
    written = write_checkpoint(folder.file("checkpoint"), content_of(parameters), sort=False)
    if written.data_path is not None:
        folder.file("checkpoint.data")
    if nominal:
        content = content_of(parameters, nominal=True)
        write_checkpoint(folder.file("nominal_checkpoint"), content, sort=False)
    metadata = _metadata(graphs, outputs, written, target, memory)
    for name, model in models.items():
        _point_to_checkpoint(model, written)
        if model is not graphs.evaluation:
            compact(model, graphs.evaluation)
        del model.metadata_props[:]
        about = replace(metadata, on_cpu=tuple((on_cpu or {}).get(name, ())))
        model.metadata_props.add(key=METADATA_KEY, value=about.to_json())
        file = folder.file(f"{name}.onnx")
        try:
            file.write_bytes(model.SerializeToString())
        except OSError as error:
            raise OnnxTrainError(f"{file.name!r} cannot be written: {error}") from None


def _metadata(
    graphs: TrainingGraphs,
    outputs: Sequence[str],
    written: WrittenCheckpoint,
    target: Target,
    memory: StepMemory | None,
) -> GraphMetadata:
    return GraphMetadata(
        checkpoint=written.path.name,
        loss=outputs[0],
        outputs=tuple(outputs[1:]),
        trainable=tuple(t.name for t in graphs.trainable),
        frozen=tuple(t.name for t in graphs.frozen if t.name not in graphs.statistics),
        statistics=tuple(graphs.statistics),
        target=target,
        memory=None if memory is None else memory.notes(),
    )


def _point_to_checkpoint(model: onnx.ModelProto, written: WrittenCheckpoint) -> None:
    """Let the graph take frozen parameters from the checkpoint file, where they are stored once."""
    for tensor in model.graph.initializer:
        place = written.locations.get(tensor.name)
        if place is None or _is_read_by_shape_inference(tensor, place.length):
            _take_in(tensor)
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
    return size <= (64 if tensor.data_type in _FLOATS else 1024)


def _take_in(tensor: onnx.TensorProto) -> None:
    """Read what is in a file beside the given model, which stays where it is."""
    if tensor.data_location == TensorProto.EXTERNAL:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, "")
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def write_ort(folder: Folder, models: Iterable[str], custom_op_library: Any | None) -> None:
    """Convert each graph to the ORT format, with the list of operators that a small build needs."""
    import onnxruntime as ort

    for name in models:
        source, target = folder.file(f"{name}.onnx"), folder.file(f"{name}.ort")
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(target)
        # Beyond this level the layout is made for the CPU that happens to convert.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry("session.save_model_format", "ORT")
        try:
            if custom_op_library is not None:
                options.register_custom_ops_library(os.fsdecode(custom_op_library))
            ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
            config = folder.file(f"{name}.required_operators.config")
            _list_operators(target, config)
        except Exception as error:  # onnxruntime has many kinds of errors and no common one
            raise OnnxTrainError(
                f"onnxruntime could not convert {source.name!r} to the ORT format: {error}"
            ) from None


def _list_operators(model: Path, config: Path) -> None:
    """Write the list of operators with onnxruntime's own tool, which is talkative."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        from onnxruntime.tools.ort_format_model import create_config_from_models

        logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
        create_config_from_models([model], config, False)
    finally:
        root.handlers[:] = handlers  # it sets up logging for the whole program
