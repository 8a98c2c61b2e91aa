"""Commands that need numpy and onnxruntime alone: train, eval, export, checkpoint show."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.cli.batch_size import Batches
from onnxtrain.cli.console import Console, megabytes
from onnxtrain.cli.data import load
from onnxtrain.cli.files import (
    check_run,
    check_target,
    is_checkpoint,
    of_artifacts,
    of_data,
    of_run,
)
from onnxtrain.cli.reading import remembered
from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import ArgumentError, CheckpointError, ModelError, one_line
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.folder_lock import settle

if TYPE_CHECKING:
    from onnxtrain.cli.reading import Data

TRAINED = "trained"
_LEARNING_RATE = 1e-3
_INT64 = 7


# ---- train ---------------------------------------------------------------------------------------


def train_command(options: argparse.Namespace, console: Console) -> int:
    """Train, and save the run."""
    from onnxtrain.device.loop import EarlyStopping, SaveCheckpoint, TensorBoard, fit
    from onnxtrain.device.random_state import set_seed

    folder = artifact_folder(options.artifacts)
    saved = Path(options.checkpoint) if options.checkpoint else folder / TRAINED
    read = of_artifacts(folder) | of_data([*options.data, *(options.validation or ())])
    _check_plot(options.plot, read | of_run(saved))
    check_target(saved, "--checkpoint", read)
    check_run(saved, options.resume or options.add, options.restart)
    if options.metric and not options.validation:
        raise ArgumentError("--metric is measured on validation data: pass --validation")
    if (options.add or options.resume) and options.head == "ridge":
        raise ArgumentError("--head ridge computes the layer anew: leave out --add and --resume")
    if options.add and options.head is None:
        raise ArgumentError("--add is for --head class-means")
    resumes = (options.resume or options.add) and saved.exists()
    set_seed(options.seed)
    start = saved if resumes else options.start
    session = TrainingSession.from_folder(
        folder, checkpoint=start and _existing(start), native=options.native
    )
    data = load(options.data, session, remembered(session, options), "--data")
    validation = None
    if options.validation:
        validation = load(options.validation, session, data.reading, "--validation")
    data.reading.remember(session)
    if options.lr is not None or not resumes:
        session.set_learning_rate(_LEARNING_RATE if options.lr is None else options.lr)
    batches = Batches.of(session, options.batch_size, options.accumulate)
    batches.note(console)
    metrics = [] if validation is None else _metrics(session, options, validation)
    if options.head is not None:
        from onnxtrain.cli.heads import compute_head

        checked = None if validation is None else batches.whole(validation.arrays, console)
        return compute_head(session, data.arrays, checked, metrics, saved, options, console)
    steps_too = () if options.checkpoint_every is None else (options.checkpoint_every,)
    callbacks: list[Any] = [SaveCheckpoint(saved, ("epoch", *steps_too))]
    if options.early_stopping is not None:
        callbacks.append(EarlyStopping(patience=options.early_stopping))
    if options.tensorboard is not None:
        callbacks.append(TensorBoard(options.tensorboard))
    steps = _steps(session)
    history = fit(
        session,
        data.arrays,
        options.epochs,
        batch_size=batches.size,
        drop_last=batches.is_fixed,
        validation=None if validation is None else batches.whole(validation.arrays, console),
        metrics=metrics,
        schedule=_schedule(options),
        accumulate=batches.accumulate,
        callbacks=callbacks,
        resume=resumes,
        progress=console.progress(),
        seed=options.seed,
        cache_features=options.cache_features,
        max_steps=options.max_steps,
        class_weight=_class_weight(options.class_weight),
        nonfinite=options.nonfinite,
        replay=_replay(options.replay),
    )
    if _steps(session) == steps and not history.interrupted:
        done = history.epochs[-1].epoch if history.epochs else options.epochs
        limit = "--epochs" if options.max_steps is None else "--epochs or --max-steps"
        console.note(
            f"note: nothing is left to train, the run has had {done} epochs: go on with more by "
            f"{limit}"
        )
    lines = [f"saved     {saved}, {megabytes(_size(saved))}"]
    if options.plot and history.losses:
        history.plot(options.plot)
        lines.append(f"picture   {options.plot}")
    if history.interrupted:
        lines.append("go on     the same command with --resume")
    content = json.loads(history.to_json()) | {"checkpoint": str(saved)}
    console.result(content, "\n".join(lines))
    return 130 if history.interrupted else 0


def _steps(session: TrainingSession) -> int:
    return 0 if session.optimizer is None else session.optimizer.step_count


def _schedule(options: argparse.Namespace) -> Any:
    if options.schedule is None and options.warmup is None:
        return None
    settings: dict[str, Any] = {"name": options.schedule or "constant"}
    if options.warmup is not None:
        settings["warmup_ratio"] = options.warmup
    if options.schedule == "exponential":
        settings |= {"gamma": 0.9, "unit": "epoch"}
    if options.schedule == "step":
        settings |= {"gamma": 0.1, "step_size": max(1, options.epochs // 3), "unit": "epoch"}
    return settings


def _replay(given: str | None) -> int | str | None:
    return int(given) if given is not None and given.isdecimal() else given


def _class_weight(given: str | None) -> Any:
    if given is None or given == "balanced":
        return given
    try:
        return [float(number) for number in given.split(",")]
    except ValueError:
        raise ArgumentError(
            f"--class-weight takes 'balanced' or a number for each class, such as 1,2.5,1, not "
            f"{given!r}"
        ) from None


def _check_plot(picture: str | None, read: Mapping[Path, str]) -> None:
    """Find out before training whether its picture can be drawn."""
    if picture is None:
        return
    check_target(Path(picture), "--plot", read)
    if Path(picture).suffix.lower() not in (".png", ".svg", ".pdf", ".jpg", ".webp"):
        raise ArgumentError(f"--plot writes .png, .svg, .pdf, .jpg or .webp, not {picture!r}")
    import matplotlib  # noqa: F401


# ---- eval, export --------------------------------------------------------------------------------


def eval_command(options: argparse.Namespace, console: Console) -> int:
    """Measure the loss and metrics."""
    from onnxtrain.device.loop import evaluate

    folder = artifact_folder(options.artifacts)
    checkpoint = chosen_checkpoint(folder, options.checkpoint)
    session = TrainingSession.from_folder(folder, checkpoint=checkpoint)
    data = load(options.data, session, remembered(session, options), "--data")
    metrics = _metrics(session, options, data)
    batches = Batches.of(session, options.batch_size, None)
    arrays = batches.whole(data.arrays, console)
    values = evaluate(session, arrays, metrics, batch_size=batches.size)
    samples = len(next(iter(arrays.values())))
    content = {"checkpoint": str(checkpoint), "samples": samples, **values}
    if data.reading.about.classes:
        content["classes"] = data.reading.about.classes
    console.result(content)
    simple = [(name, value) for name, value in values.items() if isinstance(value, float)]
    console.table(("measure", "value"), [("samples", samples), *simple])
    for name, value in values.items():
        if not isinstance(value, float):
            names = data.reading.about.classes or [str(i) for i in range(len(value))]
            console.table((name, *names), [(n, *row) for n, row in zip(names, value, strict=True)])
    return 0


def export_command(options: argparse.Namespace, console: Console) -> int:
    """Write a model for inference."""
    folder = artifact_folder(options.artifacts)
    checkpoint = chosen_checkpoint(folder, options.checkpoint)
    session = TrainingSession.from_folder(folder, checkpoint=checkpoint)
    names = options.outputs or session.output_names(training=False)[1:]
    if not names:
        raise ArgumentError(
            "the artifacts give out the loss alone: name the values to export with --outputs"
        )
    target = Path(options.output)
    check_target(target, "--output", of_artifacts(folder) | of_run(checkpoint))
    if is_checkpoint(target):
        raise ArgumentError(f"--output: {str(target)!r} is a checkpoint: choose another file")
    session.export_model_for_inferencing(
        target,
        names,
        optimize=options.optimize,
        format=options.format,
        allow_nonfinite=options.allow_nonfinite,
    )
    content = {
        "output": str(target), "bytes": _size(target), "outputs": names,
        "checkpoint": str(checkpoint),
    }  # fmt: skip
    text = f"{target}: {megabytes(_size(target))}, outputs {', '.join(names)}, from {checkpoint}"
    console.result(content, text)
    return 0


# ---- checkpoint show -----------------------------------------------------------------------------


def checkpoint_command(options: argparse.Namespace, console: Console) -> int:
    """Show what a checkpoint holds."""
    from onnxtrain.device.state import CheckpointState

    path = Path(options.checkpoint)
    path = chosen_checkpoint(path, None) if path.is_dir() else _existing(path)
    checkpoint = CheckpointState.load_checkpoint(path)
    state = checkpoint._training
    trained = set(state.trainable_names())
    parameters = [_describe(name, state.held(name), name in trained) for name in state.names()]
    groups = state.groups.values()
    run = state.private.get("fit")
    epochs = run.get("epoch") if isinstance(run, dict) else None
    content: dict[str, Any] = {
        "checkpoint": str(path),
        "bytes": _size(path),
        "nominal": state.nominal,
        "steps": max((group.step for group in groups), default=0),
        "learning_rate": state.saved_learning_rate,
        "scheduler": state.saved_scheduler,
        "epochs": epochs if isinstance(epochs, int) else None,
        "properties": dict(checkpoint.properties),
        "parameters": parameters,
    }
    count = sum(p["numbers"] for p in parameters if p["trains"])
    lines = [
        f"checkpoint     {path}, {megabytes(content['bytes'])}"
        + (", nominal: names without values" if state.nominal else ""),
        f"trains         {len(trained)} tensors, {count:,} parameters",
        f"optimizer      {_optimizer_line(content)}",
        *(
            f"property       {one_line(name)} = {one_line(value)}"
            for name, value in content["properties"].items()
        ),
    ]
    console.result(content, "\n".join(lines))
    console.table(
        ("parameter", "type", "shape", "trains", "elements", "norm"),
        [
            (p["name"], p["type"], _shape(p["shape"]), "yes" if p["trains"] else "", p["numbers"],
             "" if p["norm"] is None else float(p["norm"]))
            for p in parameters
        ],
    )  # fmt: skip
    return 0


def _describe(name: str, value: Any, trains: bool) -> dict[str, Any]:
    is_array = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    norm = float(np.linalg.norm(value.astype(np.float64))) if is_array else None
    shape = tuple(value.shape if isinstance(value, np.ndarray) else value.dims)
    kind = str(value.dtype) if isinstance(value, np.ndarray) else ELEMENT_TYPES[value.code].name
    return {
        "name": name, "type": kind, "shape": shape, "trains": trains,
        "numbers": math.prod(shape), "norm": norm,
    }  # fmt: skip


def _shape(dims: Sequence[int]) -> str:
    return " x ".join(map(str, dims)) or "one number"


def _optimizer_line(content: dict[str, Any]) -> str:
    if not content["steps"]:
        return "no steps yet"
    parts = [f"{content['steps']:,} steps"]
    if content["epochs"] is not None:
        parts.append(f"{content['epochs']} epochs")
    if content["learning_rate"] is not None:
        parts.append(f"learning rate {content['learning_rate']:.4g}")
    return ", ".join(parts)


# ---- what several commands do --------------------------------------------------------------------


def artifact_folder(name: str) -> Path:
    """Return a folder that training reads."""
    folder = Path(name)
    settle(folder)
    if not (folder / "training_model.onnx").is_file() and not any(folder.glob("*training_model*")):
        raise ModelError(
            f"{name!r} is no folder of training artifacts: make one with onnxtrain prepare"
        )
    return folder


def _existing(checkpoint: str | Path) -> Path:
    if not Path(checkpoint).is_file():
        raise CheckpointError(f"the checkpoint {str(checkpoint)!r} is not there: give its file")
    return Path(checkpoint)


def chosen_checkpoint(folder: Path, given: str | None) -> Path:
    """Return the checkpoint that is meant: the one given, the trained one, or the first one."""
    settle(folder)
    trained = folder / TRAINED
    return _existing(given or (trained if trained.exists() else folder / "checkpoint"))


def _size(path: Path) -> int:
    """Return the size of a file and of the data beside it."""
    beside = path.with_name(f"{path.name}.data")
    return sum(p.stat().st_size for p in (path, beside) if p.exists())


def _metrics(session: TrainingSession, options: argparse.Namespace, data: Data) -> list[Any]:
    """Return the metrics asked for; accuracy where labels are classes and none was."""
    from onnxtrain.device.loop.metrics import make_metric
    from onnxtrain.device.loop.weights import without_weights

    beside = session.output_names(training=False)[1:]
    labels = without_weights(session.input_types())[-1]
    if options.metric and not beside:
        raise ArgumentError("metrics need an output, and the artifacts give out the loss alone")
    output = options.metric_output or (beside[-1] if beside else None)
    made = [make_metric(name) for name in options.metric or ()]
    if options.metric is None and labels.element_type == _INT64 and output is not None:
        made = _accuracy(session, output, data.arrays[labels.name].shape)
    for metric in made:
        if options.metric_output or metric.output is None:
            metric.output = output
    return made


def _accuracy(session: TrainingSession, output: str, labels: tuple[int, ...]) -> list[Any]:
    """Return the metric that nobody asked for, if labels are the classes of the output."""
    from onnxtrain.device.loop.metrics import Accuracy

    layout = session.metadata.labels
    axis = layout.get("class_axis", 1)
    evaluation = session.module.evaluation_executor
    dims = None if evaluation is None else evaluation.graph.model.output_dims(output)
    if dims is not None and len(dims) > 2 and "class_axis" not in layout:
        without = [*dims[:axis], *dims[axis + 1 :]]
        if len(without) != len(labels) or any(
            isinstance(dim, int) and dim != size for dim, size in zip(without, labels, strict=True)
        ):
            return []
    return [Accuracy(class_axis=axis, ignore_index=layout.get("ignore_index"))]
