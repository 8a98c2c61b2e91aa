"""Each graph is loaded once, as a device does, before the folder appears.

So a graph that onnxruntime refuses is an error of `prepare`, with the model at hand, and not one of
a device. The optimiser of onnxruntime stays off, which takes most of the time to load a graph and
none of what it checks: names, types, shapes, kernels and constants that come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

from onnxtrain.device.run.graph import Frozen, Graph
from onnxtrain.device.run.session_settings import Settings, default_options
from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.format.checkpoint.content import tensor_bytes
from onnxtrain.format.checkpoint.file import read_checkpoint
from onnxtrain.format.committed_folder import BASE_DATA, INFERENCE_MODEL
from onnxtrain.format.model.file import ModelFile
from onnxtrain.offline.writer.folder import Folder

# What stock onnxruntime has operators of.
_KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnxtrain", "com.microsoft")
# Of constants, which onnxruntime copies for each graph; a workstation may lack the memory.
_MOST_BYTES = 1 << 30
# Of all parameters, which are read.
_MOST_STORED = 1 << 31
# Of one graph. The time that onnxruntime takes to load a chain is the square of its length.
_MOST_NODES = 50_000


def verify(
    folder: Folder, models: Mapping[str, ir.Model], custom_op_library: str | None
) -> tuple[str, ...]:
    """Load each graph of a folder in onnxruntime; return a note where that cannot be tried."""
    domains = {node.domain for model in models.values() for node in model.graph.all_nodes()}
    unknown = sorted(domains.difference(_KNOWN_DOMAINS))
    if unknown and custom_op_library is None:
        return (
            f"The graphs were not loaded, as they have operators of {', '.join(unknown)}: give "
            "the library that has them as custom_op_library.",
        )

    largest = max(sum(1 for _ in model.graph.all_nodes()) for model in models.values())
    if largest > _MOST_NODES:
        return (
            f"The graphs were not loaded, as the largest has {largest:,} nodes, which takes "
            "onnxruntime minutes: open them once with TrainingSession.",
        )
    files = [folder.file(name) for name in ("checkpoint", "checkpoint.data", BASE_DATA)]
    stored = sum(file.stat().st_size for file in files if file.exists())
    if stored > _MOST_STORED:
        return (_too_large("parameters", stored),)
    constants = dict(read_checkpoint(files[0]).frozen)
    size = sum(len(tensor_bytes(tensor)) for tensor in constants.values())
    if size > _MOST_BYTES:
        return (_too_large("constants", size),)

    def options() -> Any:
        made = default_options()
        made.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        made.log_severity_level = 4  # what it would say is in the error
        made.add_session_config_entry("session.disable_prepacking", "1")
        if custom_op_library is not None:
            try:
                made.register_custom_ops_library(custom_op_library)
            except Exception as error:  # onnxruntime has many kinds of errors and no common one
                raise OnnxTrainError(
                    f"the custom_op_library {custom_op_library!r} cannot be loaded: {error}"
                ) from None
        return made

    # Without native kernels: onnxruntime would not look at the bodies that they stand in for.
    settings = Settings(["CPUExecutionProvider"], options, native=False)
    frozen = Frozen(constants)
    for name in models:
        file = folder.file(f"{name}.onnx")
        graph = Graph(ModelFile.read(file), settings, frozen)
        try:
            graph.session  # noqa: B018  (makes it)
        except ModelError as error:
            raise OnnxTrainError(
                f"{error}. Nothing was written. This is a defect of onnxtrain, or an operator that "
                "onnxruntime's CPU provider does not have; if a device has it, write the graphs "
                "with verify=False (--no-verify)"
            ) from None
    _verify_inference(folder.file(f"{INFERENCE_MODEL}.onnx"), options())
    return ()


def _verify_inference(file: Path, options: Any) -> None:
    """Load the model with slots, where there is one."""
    if not file.exists():
        return
    try:
        ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise OnnxTrainError(
            f"onnxruntime does not load the model with slots for adapters: {error}. Nothing was "
            "written. If onnxruntime loads the model itself, this is a defect of onnxtrain"
        ) from None


def _too_large(what: str, size: int) -> str:
    return (
        f"The graphs were not loaded, as their {what} take {size / 2**30:.1f} GB: open them once "
        "with TrainingSession where there is enough memory."
    )
