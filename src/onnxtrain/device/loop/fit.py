"""`fit`: trains a session with data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from onnxtrain.device.checks import at_least, choice
from onnxtrain.device.loop.batches import make_source, require_repeatable, split_off
from onnxtrain.device.loop.callbacks import Callbacks, as_callbacks, take
from onnxtrain.device.loop.checkpoint_policy import SaveCheckpoint
from onnxtrain.device.loop.evaluation import Evaluation
from onnxtrain.device.loop.feature_cache import cached_features
from onnxtrain.device.loop.history import History
from onnxtrain.device.loop.metrics import Metric, MetricLike, make_metrics
from onnxtrain.device.loop.micro_batching import Accumulation
from onnxtrain.device.loop.monitor import Best, EarlyStopping, find_monitor
from onnxtrain.device.loop.nan_guard import CheckFinite, NanGuard
from onnxtrain.device.loop.old_keywords import accepts_old_keywords
from onnxtrain.device.loop.progress import ProgressDisplay, make_progress
from onnxtrain.device.loop.range_freeze import RangeFreeze
from onnxtrain.device.loop.replay import Replay, RunReplay
from onnxtrain.device.loop.resume_state import begin_or_resume, check_settings, saved_record
from onnxtrain.device.loop.run import Loop
from onnxtrain.device.loop.schedule import make_schedule
from onnxtrain.device.loop.weights import ClassWeight, with_weights, without_weights
from onnxtrain.device.schedules import Plateau
from onnxtrain.errors import ArgumentError
from onnxtrain.format.names import SAMPLE_WEIGHT

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


_SKIPS = 10  # batches in a row; more are a sign that training itself has failed
_WATCHED = ("patience", "monitor", "mode", "min_delta", "restore_best", "validation")


@accepts_old_keywords
def fit(
    session: TrainingSession,
    data: Any,
    epochs: int = 1,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    validation: Any = None,
    metrics: MetricLike | Iterable[MetricLike] | Mapping[str, MetricLike] = (),
    schedule: Any = None,
    accumulate: int | tuple[int, Literal["mean", "sum"]] = 1,
    micro_batch_size: int | None = None,
    callbacks: Any = (),
    resume: bool = False,
    progress: bool | Literal["bar", "lines"] | ProgressDisplay | None = None,
    seed: int | None = None,
    drop_last: bool = False,
    cache_features: bool | str | os.PathLike[str] = False,
    max_steps: int | None = None,
    validation_split: float | None = None,
    class_weight: ClassWeight = None,
    sample_weight: Any = None,
    nonfinite: Literal["stop", "skip"] | int = "stop",
    replay: int | str | Replay | None = None,
) -> History:
    """Train for some epochs, and return the history of the run.

    Args:
        session: a `TrainingSession` with an optimizer.
        data: a tuple of arrays in the order of `session.input_names()`, or a dictionary by these
            names, with samples on the first axis; or an iterable of batches, each a tuple or a
            dictionary; or a function that returns an iterator of batches for each epoch.
        epochs: the number of passes over the data. A resumed run counts those that are over.
        batch_size: samples in a batch, if data are arrays.
        shuffle: take samples of arrays in another order each epoch, determined by the seed.
        validation: data to evaluate after each epoch, of the same kinds.
        metrics: what to measure on the validation data beside the loss: names ("accuracy", "top5",
            "mae"), metrics, functions of outputs and labels; or a dictionary with names for them.
        schedule: the learning rate: a function from step to rate, such as
            `onnxtrain.schedules.cosine(0.01, steps=500)`; a name ("linear", "cosine", "constant",
            "step", "multistep", "exponential", "onecycle", "plateau"), or a dictionary of the name
            and settings, where the rest follows from the data and the learning rate;
            `schedules.Plateau(...)`; or a scheduler of `onnxtrain.api`. After the run, the rate is
            that of before.
        accumulate: the number of batches to an update with their mean gradient, as one batch of
            all their samples would make it. `(n, "sum")` updates with the sum of the gradients, as
            n calls of `train_step` before `optimizer_step` do.
        micro_batch_size: take each batch in passes of so many samples: the same update with a
            fraction of the memory.
        callbacks: `EarlyStopping(...)`, `SaveCheckpoint(path)`, `CheckFinite(...)`; functions that
            are called with a `Run` after each epoch; or objects with methods `on_train_begin`,
            `on_step_end`, `on_epoch_end`, `on_evaluate`, `on_train_end`.
        resume: continue the run that the checkpoint of the session was saved in, if it was: to the
            bit, or not at all where settings differ.
        progress: None shows a bar on a terminal and lines elsewhere; False shows nothing.
        seed: determines the order of samples, and Dropout; that of `onnxtrain.set_seed` by default.
        drop_last: leave out a last batch that is smaller than the others.
        cache_features: if everything that trains follows frozen layers, run those once over the
            data and keep their outputs: in memory (True), or in files in a folder (its path).
        max_steps: end the run after so many steps, also within an epoch: for a generator of batches
            that never ends.
        validation_split: the part of the samples, such as 0.2, that is not trained with but is the
            validation data; the seed determines which.
        class_weight: how much samples of a class count, as a dictionary (1 for others) or an array;
            "balanced" lets all classes count the same. Needs `prepare(..., sample_weight=True)`.
        sample_weight: how much each sample counts; both may be given.
        nonfinite: what to do with a batch whose loss or gradients are infinite or NaN, which never
            changes anything: "stop" with an error, or "skip" it, up to ten in a row, or as many as
            given here. `History.skipped` counts them.
        replay: mix samples of earlier runs into each batch, so that what they taught is not
            forgotten, and keep some of this run for later ones: so many samples, as many as fit
            into "5MB", or `Replay(...)`. The checkpoint has them; with `cache_features` it has
            their features instead.

    """
    # The arguments, one by one.
    epochs = at_least(0, "epochs", epochs)
    batch_size = at_least(1, "batch_size", batch_size)
    seed = None if seed is None else at_least(0, "seed", seed)
    max_steps = None if max_steps is None else at_least(1, "max_steps", max_steps)
    accumulate, average = _accumulate(accumulate)
    if micro_batch_size is not None:
        at_least(1, "micro_batch_size", micro_batch_size)
        if not average:
            raise ArgumentError("micro_batch_size cannot be combined with accumulate=(n, 'sum')")
    skips = _skips(nonfinite)
    if skips and not session.checks_finite:
        raise ArgumentError(
            "nonfinite='skip' needs artifacts of this version of onnxtrain, whose graphs check "
            "each step: generate them anew"
        )
    measured = make_metrics(metrics)
    others = as_callbacks(callbacks)
    early = take(others, EarlyStopping)
    checkpoint = take(others, SaveCheckpoint)
    check = take(others, CheckFinite)
    plateau = take(others, Plateau)
    if plateau is not None and schedule is not None:
        raise ArgumentError("Plateau is a schedule: a run takes one, in schedule= or in callbacks=")
    schedule = plateau if schedule is None else schedule
    called = Callbacks(others)
    shown = make_progress(progress)

    # A new run of the session, or the position of the one that was saved.
    optimizer = session.optimizer
    if optimizer is None:
        raise ArgumentError(
            "the session has no optimizer: make it with optimizer_model, or with "
            "TrainingSession.from_folder if the folder has optimizer_model.onnx"
        )
    saved = None
    if resume:
        saved = saved_record(session, None if checkpoint is None else checkpoint.path)
    state = begin_or_resume(session.module.training_state, optimizer, saved, seed)

    # Its data.
    inputs = session.input_types()
    data, complete = with_weights(data, inputs, class_weight, sample_weight)
    labels = without_weights(inputs)[-1].name
    memory = RunReplay.of(replay, session, labels, state.seed, state.is_resumed)
    source = make_source(
        data, inputs, batch_size=memory.new_in_batch(batch_size) if memory else batch_size,
        shuffle=shuffle, drop_last=drop_last, seed=state.seed, complete=complete,
    )  # fmt: skip
    if validation_split is not None:
        if validation is not None:
            raise ArgumentError("pass validation= or validation_split=, not both")
        source, split = split_off(source, validation_split, session.input_names())
        wanted = session.input_names(training=False)
        validation = {n: rows for n, rows in split.items() if n in wanted and n != SAMPLE_WEIGHT}
    evaluation = None
    if validation is not None:
        evaluation = Evaluation(session, validation, measured, batch_size, "validation")
    elif measured:
        raise ArgumentError("metrics are measured on validation data: pass validation=")
    require_repeatable(source, epochs - state.epoch, "data")
    if evaluation is not None:
        require_repeatable(evaluation.source, epochs - state.epoch, "validation")
    best = _watched(early, checkpoint, measured, evaluation is not None)
    order = source.order | {"accumulate": accumulate}
    steps = None if source.batches is None else math.ceil(source.batches / accumulate)
    limits = [max_steps, None if steps is None else epochs * steps]
    total = min((limit for limit in limits if limit is not None), default=None)

    with optimizer.run_schedule(schedule) if schedule is not None else nullcontext():
        rate = make_schedule(
            schedule, optimizer, state, steps, total, measured, evaluation is not None
        )
        settings = {
            "gradients": "mean" if average else "sum",
            "micro_batch_size": micro_batch_size,
            "cache_features": cache_features is not False,
            "replay": None if memory is None else memory.saved_settings(),
            **rate.settings,
            **_watching(early, best, rate.monitor, evaluation),
        }
        if saved is not None:
            now = order | settings | {"learning_rate": optimizer.lasting_rate}
            check_settings(saved, now, state.batch)
            if best is not None and isinstance(saved.get("best"), dict):
                best.restore(saved["best"], session, checkpoint)
            if saved.get("rate") is not None:
                optimizer.set_learning_rate(saved["rate"])
        elif schedule is None and optimizer.get_learning_rate() == 0:
            shown.say("note: the learning rate is 0: nothing trains")
        accumulation = None
        if accumulate > 1 or micro_batch_size is not None:
            accumulation = Accumulation(session, accumulate, average)
        size = micro_batch_size or batch_size
        with cached_features(session, source, size, cache_features) as batches:
            return Loop(
                session=session,
                source=memory.mixed(batches, session.input_names()) if memory else batches,
                replay=memory,
                state=state,
                order=order,
                settings=settings,
                epochs=epochs,
                max_steps=max_steps,
                accumulation=accumulation,
                micro_batch_size=micro_batch_size,
                steps_in_epoch=steps,
                evaluation=evaluation,
                best=best,
                checkpoint=checkpoint,
                schedule=rate,
                guard=NanGuard(session, check),
                callbacks=called,
                progress=shown,
                range_freeze=RangeFreeze(session, total),
                most_skips=skips,
            ).run()


def _accumulate(given: Any) -> tuple[int, bool]:
    """Return the number of batches to an update, and whether their gradients are averaged."""
    count, how = given if isinstance(given, tuple) and len(given) == 2 else (given, "mean")
    return at_least(1, "accumulate", count), choice("accumulate", how, ("mean", "sum")) == "mean"


def _skips(nonfinite: Any) -> int:
    """Return how many batches in a row may be skipped."""
    if isinstance(nonfinite, str):
        return _SKIPS if choice("nonfinite", nonfinite, ("stop", "skip")) == "skip" else 0
    return at_least(0, "nonfinite", nonfinite)


def _watched(
    early: EarlyStopping | None,
    checkpoint: SaveCheckpoint | None,
    metrics: Mapping[str, Metric],
    evaluates: bool,
) -> Best | None:
    """Return the value whose best epoch early stopping or checkpoints ask for."""
    if early is not None:
        monitor, mode = find_monitor(early.monitor, early.mode, metrics, evaluates, "EarlyStopping")
        return Best(monitor, mode, early)
    if checkpoint is not None and checkpoint.best:
        return Best(*find_monitor(None, "auto", metrics, evaluates, "SaveCheckpoint"), None)
    return None


def _watching(
    early: EarlyStopping | None, best: Best | None, monitor: str | None, evaluation: Any
) -> dict[str, Any]:
    """What decides when training stops, and which of its values that depends on."""
    settings: dict[str, Any] = {}
    watched = {monitor} - {None}
    if early is not None and best is not None:
        settings = {"patience": early.patience, "monitor": best.monitor, "mode": best.mode}
        settings |= {"min_delta": early.min_delta, "restore_best": early.restore_best}
        watched.add(best.monitor)
    if evaluation is not None and watched - {"loss"}:
        settings["validation"] = evaluation.source.order
    return dict.fromkeys(_WATCHED) | settings
