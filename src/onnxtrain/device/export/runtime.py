"""What the export leaves to onnxruntime: types of values, optimisation, the ORT format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime as ort

from onnxtrain.device.export.layout import tensor_type
from onnxtrain.errors import ModelError, OnnxTrainError
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.wire import bytes_field, text_field

_CODES = {element.name.lower(): code for code, element in ELEMENT_TYPES.items()}
_FATAL = 4


class Inferred(NamedTuple):
    """What onnxruntime knows of an output: its kind, and its dimensions or None."""

    kind: str
    dims: list[int | str | None] | None

    def value_info(self, name: str, source: str) -> bytes:
        """Write it as a ValueInfoProto."""
        element = self.kind.removeprefix("seq(").removeprefix("tensor(").rstrip(")")
        if element not in _CODES:
            raise ModelError(f"{source}: {name!r} is a {self.kind}, which cannot be exported")
        typed = tensor_type(_CODES[element], self.dims)
        if self.kind.startswith("seq("):
            typed = bytes_field(4, bytes_field(1, typed))
        return text_field(1, name) + bytes_field(2, typed)


def infer(
    model: Callable[[Sequence[bytes], Sequence[str]], bytes], names: Sequence[str], source: str
) -> dict[str, Inferred]:
    """Ask onnxruntime for the types of values.

    `model` makes a model with additional nodes and outputs of unknown type.
    """
    found = _outputs(model([], names), names, source)
    # A scalar and an unknown shape look alike. Of Shape's result, the shape says which it is.
    flat = [n for n in names if not found[n].shape and found[n].type.startswith("tensor(")]
    ranks = {name: f"rank of {name}" for name in flat}
    nodes = [
        text_field(1, name) + text_field(2, rank) + text_field(4, "Shape")
        for name, rank in ranks.items()
    ]
    asked = _outputs(model(nodes, list(ranks.values())), flat, source) if flat else {}
    scalars = {name for name in flat if list(asked[ranks[name]].shape) == [0]}
    return {
        name: Inferred(output.type, list(output.shape) if output.shape or name in scalars else None)
        for name, output in found.items()
    }


def _outputs(model: bytes, names: Sequence[str], source: str) -> dict[str, Any]:
    options = _quiet(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many kinds of errors and no common one
        raise ModelError(
            f"{source} does not say of which type {', '.join(map(repr, names))} is, and "
            f"onnxruntime cannot tell: {error}"
        ) from None
    return {output.name: output for output in session.get_outputs()}


def optimise(model: Path, target: Path, data_name: str | None) -> None:
    """Let onnxruntime simplify a model and write the result.

    The level is "basic": it computes what is constant and folds neighbours into each other, such as
    a BatchNormalization into the Conv before it. The result consists of standard operators, which
    any machine and any provider runs. Higher levels put in operators of `com.microsoft` that other
    versions and providers may lack; the session that loads the file does so anyway, for the machine
    that it is on. With `data_name`, large tensors go to a file of that name.
    """
    options = _quiet(ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
    options.add_session_config_entry("session.save_model_format", "ONNX")
    if data_name is not None:
        prefix = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{prefix}_file_name", data_name)
        options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "64")
    _write_by_session(model, options, target, "optimise the exported model")


def convert(model: Path, target: Path, optimised: bool) -> None:
    """Let onnxruntime write a model in the ORT format.

    Sessions change little of such a file when they load it, so that what is to be optimised must be
    now. The level is then "extended": above it the layout is made for the processor that happens to
    convert.
    """
    level = ort.GraphOptimizationLevel
    options = _quiet(level.ORT_ENABLE_EXTENDED if optimised else level.ORT_DISABLE_ALL)
    options.add_session_config_entry("session.save_model_format", "ORT")
    action = "write the exported model in the ORT format"
    _write_by_session(model, options, target, action)
    # Nothing but loading it tells whether all of it was written.
    _load(target, _quiet(level.ORT_DISABLE_ALL), action)


def _quiet(level: Any) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = _FATAL
    return options


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
