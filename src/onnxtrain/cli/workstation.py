"""Commands that need onnx: inspect, prepare, gradient, ops."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import onnx
import onnx_ir  # noqa: F401  (here, where Ctrl-C is taken care of)

from onnxtrain.cli.console import Console, megabytes
from onnxtrain.cli.files import check_target
from onnxtrain.errors import ArgumentError, ModelError, UnknownNameWarning
from onnxtrain.offline.graph.limits import Limits


def inspect_command(options: argparse.Namespace, console: Console) -> int:
    """Show what of a model can train."""
    from onnxtrain.offline.choices import USUAL
    from onnxtrain.offline.inspect import inspect

    path = _model_file(options.model)
    asked = [*(USUAL if options.choices else ()), *(options.train or ())]
    report = inspect(
        path, options.of, bn=options.bn, sizes=_sizes(options.size), train=asked,
        quantize=options.quantize, limits=_limits(options.limit),
    )  # fmt: skip
    content = asdict(report) | {
        "can_train": report.can_train,
        "verdict": report.verdict,
        "reasons": report.reasons,
        "parameter_count": report.parameter_count,
        "file_bytes": path.stat().st_size,
    }
    console.result(content, f"file          {path}, {megabytes(path.stat().st_size)}\n{report}")
    if options.all or options.weights:
        rows = [
            (f.name, f.elements, f.role, f.reason, ", ".join(f.modules))
            for f in report.tensors.values()
            if options.all or f.name in report.weights
        ]
        console.table(("tensor", "elements", "role", "why", "in torch"), rows)
    return 0


def prepare_command(options: argparse.Namespace, console: Console) -> int:
    """Write the artifacts of a model."""
    from onnxtrain.cli.device import TRAINED
    from onnxtrain.offline.prepare import prepare

    same = (
        "train freeze of outputs classes after dynamic_batch bn tie_weights memory_budget target "
        "native precision proximal quantize "
        "sample_weight prefix nominal_checkpoint ort_format custom_op_library verify"
    )
    given = {name: getattr(options, name) for name in same.split()}
    given["loss"] = None if options.loss == "none" else options.loss
    given |= {"optimizer": _optimizer(options), "sizes": _sizes(options.size) or None}
    given["limits"] = _limits(options.limit)
    if options.calibration:
        given["calibration"] = _calibration(options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnknownNameWarning)  # what it names would train
            made = prepare(_model_file(options.model), options.output, **given)
    except UnknownNameWarning as warning:
        raise ArgumentError(f"--freeze: {warning}") from None
    content = {
        "directory": str(made.directory),
        "files": made.files,
        "trainable": made.trainable,
        "frozen": made.frozen,
        "statistics": made.statistics,
        "tied": made.tied,
        "outputs": made.outputs,
        "loss": made.loss,
        "activations": asdict(made.activations) if console.as_json else None,
        "memory": None if made.memory is None else asdict(made.memory),
        "notes": made.notes,
    }
    console.result(content, str(made))
    run = made.directory / TRAINED
    if run.exists():
        console.note(
            f"note: {run} is a run of earlier artifacts; if these are others, it does not fit: "
            "train --restart replaces it"
        )
    return 0


def _calibration(options: argparse.Namespace) -> dict[str, Any]:
    """Read the samples that the ranges of integers come from."""
    from onnxtrain.cli.data import load_samples
    from onnxtrain.cli.reading import reading_of
    from onnxtrain.format.model.file import ModelFile
    from onnxtrain.format.model_metadata import ModelMetadata

    model = ModelFile.read(_model_file(options.model))
    inputs = [value for value in model.inputs if value.name not in model.initializer_names]
    try:
        reading = reading_of(ModelMetadata.of(model.properties), options)
    except ValueError as error:
        raise ModelError(f"the metadata of {options.model} cannot be read: {error}") from None
    return load_samples(options.calibration, inputs, reading, "--calibration")[1]


def gradient_command(options: argparse.Namespace, console: Console) -> int:
    """Write a model with gradients."""
    from onnxtrain.device.export.layout import Chunks
    from onnxtrain.device.export.store import store
    from onnxtrain.offline.gradient import gradient

    path = _model_file(options.model)
    check_target(Path(options.output), "--output", {path: "the model to read"})
    model = gradient(
        path, options.wrt, options.of, straight_through=options.straight_through, bn=options.bn,
        limits=_limits(options.limit),
    )  # fmt: skip
    data = model.SerializeToString()
    store(Path(options.output), Chunks([data]))
    content = {
        "output": options.output,
        "bytes": len(data),
        "inputs": [value.name for value in model.graph.input],
        "outputs": [value.name for value in model.graph.output],
        "nodes": len(model.graph.node),
    }
    text = (
        f"{options.output}: {megabytes(len(data))}, {len(model.graph.node)} nodes\n"
        f"inputs   {', '.join(content['inputs'])}\noutputs  {', '.join(content['outputs'])}"
    )
    console.result(content, text)
    return 0


def ops_command(options: argparse.Namespace, console: Console) -> int:
    """List the operators and how each is differentiated."""
    from onnxtrain.offline.autodiff.coverage import coverage

    rows = coverage()
    known = {row.op.lower(): row.op for row in rows}
    unknown = [op for op in options.op if op.lower() not in known]
    if unknown:
        raise ArgumentError(
            f"onnx {onnx.__version__} has no operator {unknown[0]!r}: onnxtrain ops lists all"
        )
    wanted = {known[op.lower()] for op in options.op}
    rows = [r for r in rows if (not wanted or r.op in wanted) and options.how in (None, r.how)]
    console.result({"onnx": onnx.__version__, "operators": [asdict(row) for row in rows]})
    console.table(("operator", "how", "notes"), [(r.op, r.how, r.notes) for r in rows])
    return 0


def _model_file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not a regular file"
        if not path.exists():
            what = "does not exist"
        raise ModelError(f"the model {name!r} {what}: give the path of an .onnx file")
    return path


def _sizes(given: list[str] | None) -> dict[str, int]:
    return _numbers(given, "--size takes NAME=NUMBER, such as batch=8")


def _limits(given: list[str] | None) -> Limits | None:
    if not given:
        return None
    known = [field.name for field in fields(Limits)]
    numbers = _numbers(given, "--limit takes NAME=NUMBER, such as nodes=5000000")
    unknown = [name for name in numbers if name not in known]
    if unknown:
        raise ArgumentError(f"--limit: there are {', '.join(known)}, but no {unknown[0]!r}")
    return Limits(**numbers)


def _numbers(given: list[str] | None, usage: str) -> dict[str, int]:
    numbers = {}
    for item in given or ():
        name, _, number = item.rpartition("=")
        if not name or not number.isdecimal() or len(number) > 20 or int(number) < 1:
            raise ArgumentError(f"{usage}, not {item!r}")
        numbers[name] = int(number)
    return numbers


def _optimizer(options: argparse.Namespace) -> str | None:
    """Return the optimizer with the settings that have options of their own."""
    if options.optimizer == "none":
        return None
    names = ("weight_decay", "momentum", "clip_norm")
    given = [f"{n}={getattr(options, n)}" for n in names if getattr(options, n) is not None]
    name, colon, settings = options.optimizer.partition(":")
    return f"{name}:{','.join([*([settings] if colon else []), *given])}"
