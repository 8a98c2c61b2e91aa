"""The command compare: two models side by side, on the same data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onnxtrain.cli.console import Console
from onnxtrain.cli.data import has_labels, load_inputs, load_samples
from onnxtrain.cli.reading import Array, Reading, reading_of
from onnxtrain.errors import InputError, ModelError
from onnxtrain.format.model.file import ModelFile, ValueType
from onnxtrain.format.model_metadata import ModelMetadata
from onnxtrain.offline.compare import compare
from onnxtrain.offline.compare.report import ComparedModel

_FLOAT, _INT64 = 1, 7
_OF_NUMBERS = ("mae", "mse", "rmse")  # metrics of targets that are no classes


def compare_command(options: argparse.Namespace, console: Console) -> int:
    """Show how two models differ."""
    files = [_model_file(name) for name in (options.first, options.second)]
    reading = reading_of(_about(files), options)
    found = compare(
        options.first,
        options.second,
        _load(files[0], reading, options),
        metrics=options.metric,
        of=options.metric_output,
        batch_size=options.batch_size or 32,
        layers=options.layers > 0,
        latency=options.latency,
        threads=options.threads,
    )
    content = {
        "samples": found.samples,
        "agreement": found.agreement,
        "first": _described(found.first),
        "second": _described(found.second),
        "outputs": {name: asdict(errors) for name, errors in found.outputs.items()},
        "layers": [asdict(layer) for layer in found.layers[: options.layers]],
        "notes": found.notes,
    }
    console.result(content, found.text(options.layers))
    return 0


def _described(model: ComparedModel) -> dict[str, Any]:
    latency = [{"samples": count, "seconds": t} for count, t in model.latency.items()]
    return asdict(model) | {"latency": latency}


def _model_file(name: str) -> ModelFile:
    if not Path(name).is_file():
        what = "is a folder" if Path(name).is_dir() else "does not exist"
        raise ModelError(f"the model {name!r} {what}: give the path of an .onnx file")
    file = ModelFile.read(name)
    if file.is_ort:
        raise ModelError(f"{name!r} is in the ORT format: give the .onnx file that it was made of")
    return file


def _about(files: Sequence[ModelFile]) -> ModelMetadata:
    """Return what the first model says about its use, completed by the second."""
    known: dict[str, Any] = {}
    for file in files:
        try:
            about = asdict(ModelMetadata.of(file.properties))
        except ValueError as error:
            raise ModelError(
                f"the metadata of {file.source_name} cannot be read: {error}"
            ) from None
        known = {name: known.get(name) or value for name, value in about.items()}
    return ModelMetadata(**known)


# ---- data ----------------------------------------------------------------------------------------


def _load(model: ModelFile, reading: Reading, options: argparse.Namespace) -> dict[str, Array]:
    """Read the inputs of the models, and labels if there are any."""
    stored = set(model.initializer_names)
    inputs = [value for value in model.inputs if value.name not in stored]
    if not inputs:
        raise InputError(f"{model.source_name} has no inputs: there is nothing to compare on")
    asked = options.label is not None
    if not asked and not has_labels(options.data, inputs, reading, "--data"):
        return load_samples(options.data, inputs, reading, "--data")[1]
    name = "labels" if all(value.name != "labels" for value in inputs) else "targets"
    labels = ValueType(name, _label_type(options), None)
    data = load_inputs(options.data, [*inputs, labels], reading, "--data")
    if reading.about.classes is None:
        _require_all_classes(model, data.reading.about.classes)
    return data.arrays


def _label_type(options: argparse.Namespace) -> int:
    """Return the type of labels: numbers if a metric is one of numbers, and otherwise classes."""
    if any(metric.partition(":")[0] in _OF_NUMBERS for metric in options.metric or ()):
        return _FLOAT
    is_array = options.data[0].lower().endswith((".npz", ".npy"))
    return 0 if is_array else _INT64  # arrays have a type of their own


def _require_all_classes(model: ModelFile, classes: Sequence[str] | None) -> None:
    """Refuse names that would be numbered otherwise than the model numbers its classes."""
    dims = model.outputs[0].dims or ()
    count = dims[1] if len(dims) == 2 and isinstance(dims[1], int) else None
    if classes is not None and count is not None and count != len(classes):
        raise InputError(
            f"--data: there are {len(classes)} classes, and the model has {count}, whose names it "
            "does not tell: give them in its order with --class-names"
        )
