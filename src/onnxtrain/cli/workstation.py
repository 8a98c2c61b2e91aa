"""Commands that need onnx: inspect, prepare, gradient, ops."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import onnx
import onnx_ir  # noqa: F401  (here, where Ctrl-C is taken care of)

from onnxtrain.cli.console import Console, megabytes
from onnxtrain.cli.files import check_target
from onnxtrain.cli.parser import LOSSES, OPTIMIZERS
from onnxtrain.errors import ArgumentError, ModelError

# What makes scores into probabilities, and the losses that do that themselves.
_SQUASH = {"cross-entropy": ("Softmax",), "bce": ("Sigmoid",)}


def inspect_command(options: argparse.Namespace, console: Console) -> int:
    """Tell what of a model would train."""
    from onnxtrain.offline.inspect import inspect

    path = _model_file(options.model)
    report = inspect(path, options.of, bn=options.bn, sizes=_sizes(options.size))
    content = asdict(report) | {
        "can_train": report.can_train,
        "parameter_count": report.parameter_count,
        "file_bytes": path.stat().st_size,
    }
    verdict = "yes" if report.can_train else "no"
    size = megabytes(path.stat().st_size)
    console.result(content, f"file          {path}, {size}\n{report}\ntrains        {verdict}")
    if options.weights:
        console.table(("weight", "numbers"), list(report.weights.items()))
    return 0


def prepare_command(options: argparse.Namespace, console: Console) -> int:
    """Write the artifacts of a model."""
    from onnxtrain import onnxblock
    from onnxtrain.offline.generate_artifacts import generate_artifacts

    model: Path | onnx.ModelProto = _model_file(options.model)
    optimizer = _optimizer(options)
    train = options.train
    if options.classes is not None:
        from onnxtrain.offline.passes.replace_classifier import replace_classifier

        replaced = replace_classifier(model, options.classes, of=options.of, after=options.after)
        model, options.of = replaced.model, replaced.output
        train = train or replaced.parameters
    elif options.after is not None:
        raise ArgumentError("--after says where a new layer goes: give --classes too")
    shown = _load_graph(model)
    _check_patterns(shown, options.freeze or ())
    scores, note = _scores(shown, options)
    outputs = [value.name for value in shown.graph.output]
    if scores not in outputs and options.loss == "bce":
        outputs.append(scores)
    made = generate_artifacts(
        model,
        requires_grad=train,
        frozen_params=options.freeze,
        loss=getattr(onnxblock.loss, LOSSES[options.loss])(),
        optimizer=optimizer,
        artifact_directory=options.output,
        ort_format=options.ort_format,
        additional_output_names=outputs,
        loss_input_names=[scores],
        bn=options.bn,
        target=options.target,
        memory_budget=_budget(options.memory_budget),
        sizes=_sizes(options.size) or None,
    )
    if note:
        console.note(note)
    content = {
        "directory": str(made.directory),
        "files": made.files,
        "trainable": made.trainable,
        "frozen": made.frozen,
        "statistics": made.statistics,
        "outputs": made.outputs,
        "loss": made.loss,
        "activations": asdict(made.activations) if console.as_json else None,
        "memory": None if made.memory is None else asdict(made.memory),
    }
    console.result(content, str(made))
    return 0


def gradient_command(options: argparse.Namespace, console: Console) -> int:
    """Write a model with gradients."""
    from onnxtrain.device.export.layout import Chunks
    from onnxtrain.device.export.store import store
    from onnxtrain.offline.gradient import gradient

    path = _model_file(options.model)
    check_target(Path(options.output), "--output", {path: "the model to read"})
    model = gradient(
        path, options.wrt, options.of, straight_through=options.straight_through, bn=options.bn
    )
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
        what = "a folder, not a file" if path.is_dir() else "not there"
        if path.exists() and not path.is_dir():
            what = "no ordinary file"
        raise ModelError(f"the model {name!r} is {what}: give the path of an .onnx file")
    return path


def _load_graph(model: Path | onnx.ModelProto) -> onnx.ModelProto:
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        loaded = onnx.load(model, load_external_data=False)
    except OSError:
        raise  # it may be a model, and cannot be read
    except Exception:  # each of the formats that onnx reads has its own errors
        loaded = None
    if loaded is None or not loaded.graph.output:
        raise ModelError(f"{str(model)!r} is not an ONNX model, or it is truncated: export it anew")
    return loaded


def _check_patterns(model: onnx.ModelProto, patterns: Sequence[str]) -> None:
    """Refuse what --freeze names and the model does not have: it would train unnoticed."""
    names = [tensor.name for tensor in model.graph.initializer]
    names += [n.output[0] for n in model.graph.node if n.op_type == "Constant"]
    for pattern in patterns:
        if not any(name == pattern or fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                f"--freeze {pattern!r} matches no weight of the model: onnxtrain inspect --weights "
                "lists them"
            )


def _sizes(given: list[str]) -> dict[str, int]:
    sizes = {}
    for item in given:
        name, _, number = item.rpartition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise ArgumentError(f"--size takes NAME=NUMBER, such as batch=8, not {item!r}")
        sizes[name] = int(number)
    return sizes


def _budget(given: str | None) -> float | None:
    """Read a part such as 50% or 0.5, or a size such as 300MB."""
    if given is None:
        return None
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(%|[kmg]?b)?", given.strip().lower())
    if found is None:
        raise ArgumentError(
            f"--memory-budget takes a size such as 300MB, or a part such as 50%, not {given!r}"
        )
    number, unit = float(found[1]), found[2]
    if unit == "%":
        return number / 100
    if unit is None:
        return number if number <= 1 else int(number)
    return int(number * {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30}[unit])


def _optimizer(options: argparse.Namespace) -> Any:
    from onnxtrain.offline import optimizers as optim

    settings: dict[str, Any] = {"weight_decay": options.weight_decay}
    if options.momentum is not None:
        if options.optimizer not in ("sgd", "rmsprop"):
            raise ArgumentError(f"{options.optimizer} has no --momentum: sgd and rmsprop have")
        settings["momentum"] = options.momentum
    if options.clip_norm is not None:
        settings["clip_grad"] = optim.ClipGradNorm(options.clip_norm)
    return getattr(optim, OPTIMIZERS[options.optimizer])(**settings)


def _scores(model: onnx.ModelProto, options: argparse.Namespace) -> tuple[str, str]:
    """Return the value to compute the loss from, and what is to be said about it.

    It is what comes before a final softmax or sigmoid, if the loss has that in itself.
    """
    outputs = [value.name for value in model.graph.output]
    if options.of is not None:
        chosen: str = options.of
    elif len(outputs) == 1:
        chosen = outputs[0]
    else:
        raise ArgumentError(
            f"the model has {len(outputs)} outputs: say with --of which the loss is computed from "
            f"({', '.join(outputs)})"
        )
    maker = next((node for node in model.graph.node if chosen in node.output), None)
    if maker is None or maker.op_type not in _SQUASH.get(options.loss, ()):
        return chosen, ""
    before: str = maker.input[0]
    return before, (
        f"note: {chosen!r} comes out of a {maker.op_type}, which the loss {options.loss} has in "
        f"itself: the loss is computed from {before!r}"
    )
