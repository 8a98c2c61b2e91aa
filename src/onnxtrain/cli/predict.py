"""The command predict: a model applied to images, tables or arrays."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.cli.console import Console
from onnxtrain.cli.data import load_samples
from onnxtrain.cli.device import artifact_folder, chosen_checkpoint
from onnxtrain.cli.files import check_target, of_artifacts, of_data, of_run
from onnxtrain.cli.reading import Array, reading_of
from onnxtrain.device.predict import open_model, predict
from onnxtrain.device.run.graph import value_type
from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import ArgumentError, ModelError
from onnxtrain.format.checkpoint.store import translated
from onnxtrain.format.model_metadata import ModelMetadata
from onnxtrain.format.replace_file import replace_file

_MOST_VALUES = 16  # of a sample that are shown


def predict_command(options: argparse.Namespace, console: Console) -> int:
    """Show what a model says about samples."""
    path = Path(options.model)
    target = Path(options.output) if options.output else None
    if target is not None:
        read = {path: "the model"} | of_artifacts(path) | of_data(options.inputs)
        if path.is_dir():
            read |= of_run(chosen_checkpoint(artifact_folder(str(path)), None))
        check_target(target, "--output", read)
    session = open_model(_exported(path) if path.is_dir() else path)
    try:
        about = ModelMetadata.of(session.get_modelmeta().custom_metadata_map)
    except ValueError as error:
        raise ModelError(f"the metadata of {options.model} cannot be read: {error}") from None
    reading = reading_of(about, options)
    inputs = [value_type(value) for value in session.get_inputs()]
    names, arrays = load_samples(options.inputs, inputs, reading)
    outputs = [value.name for value in session.get_outputs()]
    shown = _shown_output(options.of, outputs, about)
    found = predict(session, arrays, batch_size=options.batch_size)
    values = dict(zip(outputs, found if len(outputs) > 1 else (found,), strict=True))
    if target is not None:
        arrays = {name: np.asarray(value) for name, value in values.items()}
        with translated("write", target):
            replace_file(target, lambda file: np.savez(file, allow_pickle=False, **arrays))
    scores = _scores(np.asarray(values[shown]), about.activation.get(shown))
    content: dict[str, Any] = {
        "model": options.model, "output": shown, "activation": scores.activation,
        "file": options.output,
    }  # fmt: skip
    if scores.guessed:
        console.note(
            f"note: the model does not say what {shown!r} is: probabilities are its softmax"
        )
    if scores.activation == "identity":
        return _show_values(console, content, names, scores.values, reading.about.classes)
    ranked = _rank(scores.values, reading.about.classes, options.top)
    lines = zip(names, ranked, strict=True)
    content["predictions"] = [{"input": name, **top[0], "top": top} for name, top in lines]
    console.result(content)
    others = [", ".join(f"{t['class']} {t['probability']:.4g}" for t in top[1:]) for top in ranked]
    rows = [
        (name, top[0]["class"], top[0]["probability"], *([rest] if rest else []))
        for name, top, rest in zip(names, ranked, others, strict=True)
    ]
    columns = ("input", "class", "probability", "next")
    console.table(columns[: len(rows[0])], rows)
    return 0


def _exported(folder: Path) -> bytes:
    """Return the model for inference of a folder of artifacts."""
    checkpoint = chosen_checkpoint(artifact_folder(str(folder)), None)
    session = TrainingSession.from_folder(folder, checkpoint=checkpoint)
    names = session.output_names(training=False)[1:]
    if not names:
        raise ArgumentError(
            f"{str(folder)!r} returns the loss alone: export a model with --outputs, and give that"
        )
    exported = session.export_model_for_inferencing(None, names)
    assert exported is not None
    return exported


def _shown_output(given: str | None, outputs: Sequence[str], about: ModelMetadata) -> str:
    if given is not None and given not in outputs:
        raise ArgumentError(f"--of: the outputs of the model are {', '.join(outputs)}")
    return given or next((name for name in outputs if name in about.activation), outputs[0])


class _Scores(NamedTuple):
    """Probabilities, or other values, of samples, and what was applied to the output."""

    values: Array
    activation: str
    guessed: bool = False


def _scores(output: Array, activation: str | None) -> _Scores:
    """Make probabilities of the scores of classes; what is no such scores stays as it is."""
    is_scores = output.ndim == 2 and output.dtype.kind == "f"
    if activation is None and is_scores and output.shape[1] > 1:
        activation, guessed = "softmax", True
    else:
        guessed = False
    if not is_scores or activation in (None, "identity"):
        return _Scores(output, "identity")
    values = output.astype(np.float64)
    if activation == "sigmoid":
        return _Scores(0.5 * (1 + np.tanh(values / 2)), activation)
    in_range = bool(np.all((values >= 0) & (values <= 1)))
    if in_range and np.allclose(values.sum(axis=1), 1, atol=1e-3):
        return _Scores(values, "none")  # the model ends with its own softmax
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return _Scores(powers / powers.sum(axis=1, keepdims=True), activation, guessed)


def _rank(
    probabilities: Array, classes: Sequence[str] | None, top: int
) -> list[list[dict[str, Any]]]:
    """Return the most probable classes of each sample."""
    count = probabilities.shape[1]
    names = classes if classes and len(classes) == count else [str(i) for i in range(count)]
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    return [
        [{"class": names[i], "index": int(i), "probability": float(row[i])} for i in best]
        for row, best in zip(probabilities, order, strict=True)
    ]


def _show_values(
    console: Console,
    content: Mapping[str, Any],
    names: Sequence[str],
    values: Array,
    classes: Sequence[str] | None,
) -> int:
    """Show outputs that are no scores of classes: numbers, or labels."""
    size = int(np.prod(values.shape[1:]))
    if values.shape[:1] != (len(names),) or size > _MOST_VALUES:
        if content["file"] is not None:
            shape = list(values.shape)
            written = f"{content['file']}: {content['output']} of the shape {shape}"
            console.result({**content, "shape": shape}, written)
            return 0
        raise ArgumentError(
            f"the output {content['output']!r} has the shape {list(values.shape)}, too much to "
            "show: write it to a file with --output FILE, or choose another with --of"
        )
    flat = values.reshape(len(names), size)
    predictions = [{"input": n, "values": row.tolist()} for n, row in zip(names, flat, strict=True)]
    console.result({**content, "predictions": predictions})
    columns = classes if classes and len(classes) == size else [
        content["output"] if size == 1 else f"{content['output']}[{i}]" for i in range(size)
    ]  # fmt: skip
    rows = [(name, *row.tolist()) for name, row in zip(names, flat, strict=True)]
    console.table(("input", *columns), rows)
    return 0
