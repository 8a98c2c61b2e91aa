"""The steps of the demo."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import onnxtrain
from onnxtrain.cli.console import Console, megabytes
from onnxtrain.cli.demo.digits import Digits, load
from onnxtrain.device.loop import evaluate
from onnxtrain.device.loop.history import History
from onnxtrain.errors import ArgumentError

_HALFWAY, _ALL = 6, 12


def demo_command(options: argparse.Namespace, console: Console) -> int:
    """Run the demo, from pretraining to inference."""
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{options.output!r} is a file: --output takes a folder")
    import matplotlib  # noqa: F401  (fail early if one is missing)
    import onnx_ir  # noqa: F401
    import sklearn  # noqa: F401

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{options.output!r} cannot be created ({error.strerror}): give another --output"
        ) from None
    values = tell(folder, options.seed, console)
    console.result(values, summary(values))
    return 0


def tell(folder: Path, seed: int, console: Console) -> dict[str, Any]:
    """Run the demo; return its figures."""
    began = time.perf_counter()
    device = folder / "device"
    for stale in device.glob("trained*"):
        stale.unlink()  # left by an earlier demo
    digits = load(seed)

    console.note("\n1. On the workstation: pretrain a small CNN on digits of many people")
    pretrained, accuracy = _pretrain(folder, digits, seed, console)

    console.note("\n2. On the workstation: write the artifacts that train the last two layers")
    started = time.perf_counter()
    made = onnxtrain.prepare(pretrained, device, train=["fc1.*", "fc2.*"], outputs=["scores"])
    artifact_seconds = time.perf_counter() - started
    console.note(str(made))
    _give_data(device, digits)

    console.note(
        "\n3. On the device, with only numpy and onnxruntime: learn the user's handwriting"
        "\n   (simulated: held-out digits, all slanted, rotated and darkened in the same way)"
    )
    first = _run_device(device, _HALFWAY, console)
    console.note("\n4. The device was switched off. Training continues from the checkpoint")
    second = _run_device(device, _ALL, console)

    console.note("\n5. Run the exported model in a plain onnxruntime.InferenceSession")
    agreement = _infer(device / "personal.onnx", digits, console)
    history = History.from_plain(second["history"])
    picture = folder / "demo.png"
    _draw(picture, digits, history, first["before"], second["after"])
    return {
        "pretrained_accuracy": accuracy,
        "user_before": first["before"]["accuracy"],
        "user_after": second["after"]["accuracy"],
        "people_before": first["before"]["others"],
        "people_after": second["after"]["others"],
        "exported_accuracy": agreement,
        "artifact_seconds": artifact_seconds,
        "seconds_to_start": second["seconds_to_start"],
        "milliseconds_per_step": second["milliseconds_per_step"],
        "onnx_imported_on_device": first["onnx_imported"] or second["onnx_imported"],
        "artifact_bytes": sum(made.files.values()),
        "checkpoint_bytes": (device / "trained").stat().st_size,
        "model_bytes": (device / "personal.onnx").stat().st_size,
        "numbers_trained": made.parameter_count,
        "seconds": time.perf_counter() - began,
        "picture": str(picture),
    }


def _pretrain(folder: Path, digits: Digits, seed: int, console: Console) -> tuple[Path, float]:
    from onnxtrain.cli.demo.network import network

    onnxtrain.prepare(network(seed), folder / "pretraining", outputs=["scores"])
    session = onnxtrain.TrainingSession.from_folder(folder / "pretraining")
    session.set_learning_rate(3e-3)
    onnxtrain.fit(
        session, tuple(digits.people), 12, validation=tuple(digits.people_test),
        metrics=["accuracy"], schedule="cosine", seed=seed, progress=console.progress(),
    )  # fmt: skip
    target = folder / "pretrained.onnx"
    session.export_model_for_inferencing(target, ["scores"])
    accuracy = evaluate(session, tuple(digits.people_test), ["accuracy"])["accuracy"]
    return target, float(accuracy)


def _give_data(device: Path, digits: Digits) -> None:
    np.savez(
        device / "user.npz",
        image=digits.user.images, labels=digits.user.labels,
        image_test=digits.user_test.images, labels_test=digits.user_test.labels,
        image_people=digits.people_test.images, labels_people=digits.people_test.labels,
    )  # fmt: skip


def _run_device(device: Path, epochs: int, console: Console) -> dict[str, Any]:
    quiet = ["--quiet"] if console.quiet else []
    program = [sys.executable, "-m", "onnxtrain.cli.demo.device_program"]
    subprocess.run([*program, str(device), str(epochs), *quiet], check=True)
    result: dict[str, Any] = json.loads((device / "device.json").read_text(encoding="utf-8"))
    return result


def _infer(model: Path, digits: Digits, console: Console) -> float:
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    images, labels = digits.user_test
    (scores,) = session.run(None, {"image": images})
    found = scores.argmax(axis=1)
    console.note(f"   predicted {' '.join(map(str, found[:12]))}")
    console.note(f"   labels    {' '.join(map(str, labels[:12]))}")
    return float((found == labels).mean())


def summary(values: dict[str, Any]) -> str:
    """Return the main figures as text."""
    lines = [
        "",
        f"accuracy, the user's digits   {values['user_before']:.1%} before, "
        f"{values['user_after']:.1%} after",
        f"accuracy, other people        {values['people_before']:.1%} before, "
        f"{values['people_after']:.1%} after",
        f"accuracy, exported model      {values['exported_accuracy']:.1%}",
        f"a training step               {values['milliseconds_per_step']:.2f} ms "
        f"for 32 digits, {values['numbers_trained']:,} parameters",
        f"artifacts                     {megabytes(values['artifact_bytes'])}, "
        f"written in {values['artifact_seconds']:.1f} s",
        f"checkpoint, model             {megabytes(values['checkpoint_bytes'])}, "
        f"{megabytes(values['model_bytes'])}",
        f"onnx imported on the device   {'yes' if values['onnx_imported_on_device'] else 'no'}",
        f"total                         {values['seconds']:.0f} s",
        f"picture                       {values['picture']}",
    ]
    return "\n".join(lines)


def _draw(path: Path, digits: Digits, history: History, before: Any, after: Any) -> None:
    """Draw the digits, the loss and the two matrices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 2.4])
    top, bottom = parts
    _draw_digits(top, digits)
    loss, first, second = bottom.subplots(1, 3, width_ratios=[1.25, 1, 1])
    _draw_loss(loss, history)
    for axes, title, values in ((first, "before", before), (second, "after", after)):
        _draw_matrix(axes, f"accuracy {title}: {values['accuracy']:.1%}", values["confusion"])
    figure.savefig(path, dpi=110)


def _draw_digits(figure: Any, digits: Digits) -> None:
    rows = figure.subplots(2, 10)
    for row, (name, samples) in enumerate((("people", digits.people), ("the user", digits.user))):
        for digit in range(10):
            axes = rows[row][digit]
            index = int(np.flatnonzero(samples.labels == digit)[0])
            axes.imshow(samples.images[index, 0], cmap="Greys", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
        rows[row][0].set_ylabel(name)


def _draw_loss(axes: Any, history: History) -> None:
    axes.plot(history.loss_steps, history.losses, color="0.8", label="training step")
    axes.plot(history["steps"], history["eval_loss"], marker="o", markersize=4, label="test data")
    axes.set(title="training on the device", xlabel="step", ylabel="loss", ylim=(0, None))
    axes.legend(frameon=False)


def _draw_matrix(axes: Any, title: str, rows: Any) -> None:
    matrix = np.array(rows)
    axes.imshow(matrix, cmap="Blues")
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            light = count > matrix.max() / 2
            axes.text(column, row, int(count), ha="center", va="center", fontsize=7,
                      color="white" if light else "black")  # fmt: skip
    axes.set(title=title, xlabel="predicted", ylabel="digit")
    axes.set_xticks(range(10))
    axes.set_yticks(range(10))
