"""The training loop: `fit` and `evaluate`, and what is passed to them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from onnxtrain.device.checks import at_least, choice
from onnxtrain.device.loop.assemble import Settings, assemble
from onnxtrain.device.loop.callbacks import Callbacks, Run
from onnxtrain.device.loop.checkpoint_policy import Rule
from onnxtrain.device.loop.evaluation import evaluate
from onnxtrain.device.loop.history import History
from onnxtrain.device.loop.metrics import MetricLike, make_metrics
from onnxtrain.device.loop.micro_batching import in_passes, with_features
from onnxtrain.device.loop.monitor import EarlyStopping, make_early_stopping
from onnxtrain.device.loop.progress import Silent, make_progress

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

__all__ = ["EarlyStopping", "Run", "evaluate", "fit"]


def fit(
    session: TrainingSession,
    data: Any,
    epochs: int = 1,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    evaluate: Any = None,
    metrics: MetricLike | Iterable[MetricLike] | Mapping[str, MetricLike] = (),
    scheduler: Any = None,
    accumulate: int = 1,
    accumulation: Literal["mean", "sum"] = "mean",
    early_stopping: EarlyStopping | int | Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | str | tuple[int | str, ...] | None = None,
    resume: bool = False,
    callbacks: Any = (),
    progress: bool | Literal["bar", "lines"] | Silent | None = None,
    seed: int | None = None,
    drop_last: bool = False,
    check_every: int | None = None,
    micro_batch: int = 1,
    cache_features: bool | str | os.PathLike[str] = False,
) -> History:
    """Train with data for some epochs, and return the history of the run.

    Args:
        session: a `TrainingSession` with an optimizer.
        data: a tuple of arrays in the order of `session.input_names()`, or a dictionary by these
            names, with samples on the first axis; or an iterable of batches, each a tuple or a
            dictionary; or a function that returns an iterator of batches for each epoch.
        epochs: how often to go through the data. A resumed run counts those that are over.
        batch_size: samples in a batch, if data are arrays.
        shuffle: take samples of arrays in another order each epoch, which follows from the seed.
        evaluate: data to evaluate with after each epoch, of the same kinds.
        metrics: what to measure in evaluation beside the loss: names ("accuracy", "top5", "mae"),
            metrics, or functions of outputs and labels; or a dictionary with names for them.
        scheduler: a scheduler of `session.optimizer`; a name ("linear", "cosine", "constant",
            "step", "multistep", "exponential", "onecycle", "plateau"); or a dictionary of the name
            and settings. What is not set follows from the data and the learning rate.
        accumulate: how many batches there are to one update.
        accumulation: update with the "mean" gradient of these batches, as one batch of all their
            samples would, or with the "sum", as calls of `train_step` before `optimizer_step` do.
        early_stopping: `EarlyStopping(...)`, its settings, or a number of epochs to wait.
        checkpoint: the file to save the run to.
        checkpoint_every: "epoch" (the default), a number of steps, "best" to keep the best epoch in
            a file of its own (the name and `.best`), or several of them.
        resume: go on with the run that the checkpoint of the session was saved in, if it was.
        callbacks: functions that are called with a `Run` after each epoch, or objects with methods
            `on_train_begin`, `on_step_end`, `on_epoch_end`, `on_evaluate`, `on_train_end`.
        progress: None shows a bar on a terminal and lines elsewhere; False shows nothing.
        seed: what the order of samples follows from; that of `onnxtrain.set_seed` by default.
        drop_last: leave out a last batch that is smaller than the others.
        check_every: look for parameters that are not finite after so many steps.
        micro_batch: take each batch of arrays in so many passes of equal size: the same update with
            a fraction of the memory.
        cache_features: where all that trains lies behind frozen layers, run those once over the
            data and keep what they give: in memory (True), or in files in a folder (its path).

    """
    passes = at_least(1, "micro_batch", micro_batch)
    if passes > 1:
        batch_size, accumulate = in_passes(data, batch_size, accumulate, passes)
    settings = Settings(
        epochs=at_least(0, "epochs", epochs),
        batch_size=at_least(1, "batch_size", batch_size),
        shuffle=shuffle,
        drop_last=drop_last,
        seed=None if seed is None else at_least(0, "seed", seed),
        accumulate=at_least(1, "accumulate", accumulate),
        average=choice("accumulation", accumulation, ("mean", "sum")) == "mean",
        check_every=None if check_every is None else at_least(1, "check_every", check_every),
        metrics=make_metrics(metrics),
        early_stopping=make_early_stopping(early_stopping),
        rule=Rule(checkpoint, checkpoint_every),
        callbacks=Callbacks(callbacks),
        progress=make_progress(progress),
    )
    if cache_features is False:
        return assemble(session, data, evaluate, scheduler, resume, settings).run()
    features, data = with_features(session, data, settings.batch_size, cache_features)
    with features.installed():
        return assemble(session, data, evaluate, scheduler, resume, settings).run()
