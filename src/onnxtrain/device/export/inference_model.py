"""Export a trained model for inference, without `onnx` or `protobuf`.

The evaluation graph is cut down to what the asked outputs need, and the parameters, which are
inputs of that graph, become initializers with their current values. Nodes are copied byte for
byte, so that the exported model computes what evaluation computes.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import onnxruntime as ort

from onnxtrain.device.export import store as export_store
from onnxtrain.device.export.fold import fold
from onnxtrain.device.export.layout import MAX_FILE_SIZE, Chunks, ModelLayout
from onnxtrain.device.export.model_parts import ModelParts, take_apart
from onnxtrain.device.export.prune import Cut, Values, quiet_options
from onnxtrain.errors import ArgumentError, ModelError, OnnxTrainError, UnknownNameError
from onnxtrain.format.checkpoint.layout import EXTERNAL_DATA_THRESHOLD
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.model.source import read_bytes
from onnxtrain.format.replace_file import ScratchFolder

Target = str | os.PathLike[str]
Format = Literal["onnx", "ort"]


def export_model(
    model: ModelFile,
    graph_output_names: Sequence[str],
    values: Values,
    target: Target | None = None,
    *,
    optimize: bool = False,
    format: Format = "onnx",
    properties: Mapping[str, str] | None = None,
    external_data_threshold: int = EXTERNAL_DATA_THRESHOLD,
) -> bytes | None:
    """Write an evaluation model as one for inference, or return its bytes if there is no target.

    The outputs may be any values of the graph, even inputs and parameters. `values` has the current
    value of each parameter, frozen ones included. With `optimize`, onnxruntime simplifies the model
    first; results then differ by rounding. `properties` are added to the metadata of the model. A
    model of `external_data_threshold` bytes or more keeps its tensors in `<target>.data`.
    """
    path = _checked_target(target, model, format)
    parts = _parts_of(model)
    names = _checked_names(graph_output_names, parts, model.source_name)
    parts.properties |= properties or {}
    fold(model, parts, names, values)
    layout = Cut(model, parts, names, values).layout()
    _check_format(layout, path, format)
    if not optimize and format == "onnx":
        return _write(layout, path, external_data_threshold)
    # What onnxruntime writes goes to the disk of the target.
    place = Path(tempfile.gettempdir()) if path is None else path.parent
    with ExitStack() as stack:
        with export_store.translated(path or place):
            scratch = stack.enter_context(ScratchFolder(place))
        plain = scratch.path / "plain.onnx"
        _write(layout, plain, external_data_threshold)
        if format == "ort":
            return _write_ort(plain, path, optimize)
        layout = _optimised(plain, names)
        return _write(layout, path, external_data_threshold)


def cut_model(model: ModelFile, graph_output_names: Sequence[str]) -> bytes:
    """Return the part of an evaluation model that some outputs need; parameters stay inputs."""
    parts = _parts_of(model)
    names = _checked_names(graph_output_names, parts, model.source_name)
    return Cut(model, parts, names, {}).open_layout().file().join()


def check_request(model: ModelFile, graph_output_names: Sequence[str], target: Target) -> None:
    """Refuse what could not be exported, before there is anything to export."""
    _checked_target(target, model, "onnx")
    _checked_names(graph_output_names, _parts_of(model), model.source_name)


def _parts_of(model: ModelFile) -> ModelParts:
    if model.is_ort:
        raise ModelError(
            f"{model.source_name} is in the ORT format, from which nothing can be exported: pass "
            "the .onnx file of the evaluation model instead"
        )
    return take_apart(model)


def _write(layout: ModelLayout, path: Path | None, threshold: int) -> bytes | None:
    if path is None:
        return layout.file().join()
    if layout.tensor_size() >= threshold:
        export_store.store_with_data(path, layout.file, layout.external_data())
    else:
        export_store.store(path, layout.file())
    return None


def _optimised(plain: Path, names: Sequence[str]) -> ModelLayout:
    """The model after optimisation, without the many imports that onnxruntime adds to it.

    The level is "basic": it computes what is constant and folds neighbours into each other, such as
    a BatchNormalization into the Conv before it. The result consists of standard operators, which
    any machine and any provider runs. Higher levels put in operators of `com.microsoft` that other
    versions and providers may lack; the session that loads the file does so anyway, for the machine
    that it is on.
    """
    target = plain.with_name("optimised.onnx")
    options = quiet_options(ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    options.add_session_config_entry("session.save_model_format", "ONNX")
    if plain.with_name(plain.name + ".data").exists():
        prefix = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{prefix}_file_name", "optimised.data")
        options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "64")
    _write_by_session(plain, options, target, "optimise the exported model")
    model = ModelFile.read(target)
    return Cut(model, take_apart(model), names, {}).layout()


def _write_ort(plain: Path, path: Path | None, optimize: bool) -> bytes | None:
    """Let onnxruntime write a model in the ORT format.

    Sessions change little of such a file when they load it, so that what is to be optimised must be
    now. The level is then "extended": above it the layout is made for the processor that happens to
    convert.
    """
    made = plain.with_name("model.ort")
    level = ort.GraphOptimizationLevel
    options = quiet_options(level.ORT_ENABLE_EXTENDED if optimize else level.ORT_DISABLE_ALL)
    options.add_session_config_entry("session.save_model_format", "ORT")
    action = "write the exported model in the ORT format"
    _write_by_session(plain, options, made, action)
    # Nothing but loading it tells whether all of it was written.
    _load(made, quiet_options(level.ORT_DISABLE_ALL), action)
    content = Chunks([read_bytes(made)])
    if path is None:
        return content.join()
    export_store.store(path, content)
    return None


def _write_by_session(model: Path, options: ort.SessionOptions, target: Path, action: str) -> None:
    options.optimized_model_filepath = str(target)
    _load(model, options, action)
    if not target.exists():
        raise OnnxTrainError(f"onnxruntime could not {action}: it wrote no file")


def _load(model: Path, options: ort.SessionOptions, action: str) -> None:
    try:
        ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise OnnxTrainError(f"onnxruntime could not {action}: {error}") from None


def _check_format(layout: ModelLayout, path: Path | None, format: Format) -> None:
    """Say at once what could only be found out after long work."""
    if format == "ort" and any(ELEMENT_TYPES[tensor.code].bits == 4 for tensor in layout.tensors):
        raise OnnxTrainError("the ORT format has no 4-bit integers: export in the format 'onnx'")
    size = layout.tensor_size()
    if size > MAX_FILE_SIZE and (path is None or format == "ort"):
        what = "a file in the ORT format" if format == "ort" else "a model without other files"
        raise OnnxTrainError(
            f"the parameters have {size:,} bytes, and {what} holds less than "
            f"{MAX_FILE_SIZE:,}: export to a file in the format 'onnx'"
        )


def _checked_target(target: Target | None, model: ModelFile, format: Format) -> Path | None:
    if format not in ("onnx", "ort"):
        raise ArgumentError(f"the format of an exported model is 'onnx' or 'ort', not {format!r}")
    if target is None:
        return None
    path = Path(os.fsdecode(target))
    export_store.check_target(path)
    # onnxruntime tells the formats apart by the name.
    if (path.suffix == ".ort") != (format == "ort"):
        raise ArgumentError(
            f"{path.name!r} would not be loaded: the name of a file in the ORT format, and of no "
            f"other, ends in .ort; say format='ort', or choose another name"
        )
    if model.path is not None and path.exists():
        names = {model.path.name, *(tensor.location for tensor in model.external.values())}
        names.add(model.metadata.checkpoint or model.path.name)
        read = (model.path.parent / name for name in names)
        if any(file.exists() and file.samefile(path) for file in read):
            raise ArgumentError(f"{path} is what training reads: export to another file")
    return path


def _checked_names(names: Sequence[str], parts: ModelParts, source: str) -> list[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"graph_output_names is a list of names, not {names!r}")
    if not names:
        raise ArgumentError("graph_output_names is empty: name at least one value")
    if len(set(names)) != len(names):
        raise ArgumentError(f"graph_output_names has a name twice: {', '.join(map(repr, names))}")
    known = parts.value_names()
    unknown = [name for name in names if name not in known]
    if unknown:
        near = dict.fromkeys(m for n in unknown for m in difflib.get_close_matches(n, known, 3))
        hint = "near are" if near else "its outputs are"
        raise UnknownNameError(
            f"{source} has no value {', '.join(map(repr, unknown))}; {hint} "
            f"{', '.join(map(repr, near or parts.outputs))}"
        )
    return list(names)
