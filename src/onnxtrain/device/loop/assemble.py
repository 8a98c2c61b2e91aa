"""Puts a run together, a new one or one that goes on, and checks that its parts fit."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxtrain.device.loop.accumulation import Accumulation
from onnxtrain.device.loop.batches import Source, make_source, require_repeatable, steps_in_epoch
from onnxtrain.device.loop.callbacks import Callbacks
from onnxtrain.device.loop.checkpoint_policy import Rule, Snapshot
from onnxtrain.device.loop.evaluation import Evaluation
from onnxtrain.device.loop.metrics import Metric
from onnxtrain.device.loop.monitor import Best, EarlyStopping, find_monitor
from onnxtrain.device.loop.nan_guard import Guard
from onnxtrain.device.loop.progress import Silent
from onnxtrain.device.loop.resume_state import KEY, Place, check_order, read_place
from onnxtrain.device.loop.run import Loop, Parts
from onnxtrain.device.loop.schedule import make_schedule
from onnxtrain.device.random_state import process_seed
from onnxtrain.errors import ArgumentError

if TYPE_CHECKING:
    from onnxtrain.device.optimizer import Optimizer
    from onnxtrain.device.session import TrainingSession


@dataclass(frozen=True)
class Settings:
    """The arguments of `fit` that were checked one by one."""

    epochs: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int | None
    accumulate: int
    average: bool
    check_every: int | None
    metrics: dict[str, Metric]
    early_stopping: EarlyStopping | None
    rule: Rule
    callbacks: Callbacks
    progress: Silent


def assemble(
    session: TrainingSession,
    data: Any,
    evaluate: Any,
    scheduler: Any,
    resume: bool,
    settings: Settings,
) -> Loop:
    """Return the loop of a run, ready to go."""
    if session.optimizer is None:
        raise ArgumentError(
            "the session has no optimizer: make it with optimizer_model, or with "
            "TrainingSession.from_folder if the folder has optimizer_model.onnx"
        )
    evaluation = _make_evaluation(session, evaluate, settings)
    best = _make_best(settings, evaluation is not None)
    saved = _saved_run(session, settings.rule) if resume else None
    place = _place(session, session.optimizer, saved, settings.seed)
    source = _make_source(session, data, place, settings)
    if evaluation is not None:
        require_repeatable(evaluation.source, settings.epochs - place.epoch, "evaluate")
    snapshot = Snapshot()
    if saved is not None:
        check_order(saved.get("order"), _order(source, settings), place)
        _restore_best(best, saved, settings, snapshot, session)
    accumulation = None
    if settings.accumulate > 1:
        accumulation = Accumulation(session, settings.accumulate, settings.average)
    steps = steps_in_epoch(source, settings.accumulate)
    schedule = make_schedule(
        scheduler, session, place, steps, settings.epochs, settings.metrics, evaluation is not None
    )
    parts = Parts(
        session=session,
        source=source,
        place=place,
        order=_order(source, settings),
        epochs=settings.epochs,
        accumulation=accumulation,
        steps_in_epoch=steps,
        evaluation=evaluation,
        best=best,
        early_stopping=settings.early_stopping,
        rule=settings.rule,
        schedule=schedule,
        guard=Guard(session, settings.check_every),
        callbacks=settings.callbacks,
        progress=settings.progress,
    )
    return Loop(parts, snapshot)


def _make_evaluation(
    session: TrainingSession, evaluate: Any, settings: Settings
) -> Evaluation | None:
    if evaluate is not None:
        return Evaluation(session, evaluate, settings.metrics, settings.batch_size, "evaluate")
    if settings.metrics:
        raise ArgumentError("metrics are measured in evaluation: pass the data for it as evaluate=")
    return None


def _make_best(settings: Settings, evaluates: bool) -> Best | None:
    early, metrics = settings.early_stopping, settings.metrics
    if early is not None:
        monitor, mode = find_monitor(
            early.monitor, early.mode, metrics, evaluates, "early_stopping"
        )
        return Best(monitor, mode, early.min_delta)
    if settings.rule.best:
        return Best(*find_monitor(None, "auto", metrics, evaluates, "checkpoint_every"))
    return None


def _make_source(session: TrainingSession, data: Any, place: Place, settings: Settings) -> Source:
    source = make_source(
        data,
        session.input_names(True),
        batch_size=settings.batch_size,
        shuffle=settings.shuffle,
        drop_last=settings.drop_last,
        seed=place.seed,
    )
    require_repeatable(source, settings.epochs - place.epoch, "data")
    return source


def _order(source: Source, settings: Settings) -> dict[str, Any]:
    return source.order | {"accumulate": settings.accumulate}


def _saved_run(session: TrainingSession, rule: Rule) -> dict[str, Any] | None:
    """Return the record of the run that the session was saved in; None if there is none."""
    saved = session.state.private.get(KEY)
    if saved is None and rule.path is not None and rule.path.exists():
        raise ArgumentError(
            f"resume=True, but the session does not come from {str(rule.path)!r}, where a run was "
            f"saved: make it with TrainingSession.from_folder(..., checkpoint={str(rule.path)!r}). "
            "To start anew, delete the file or pass resume=False"
        )
    if saved is not None and not isinstance(saved, dict):
        saved = {}
    return saved


def _place(
    session: TrainingSession, optimizer: Optimizer, saved: dict[str, Any] | None, seed: int | None
) -> Place:
    """Return where the run begins, or goes on."""
    if saved is not None:
        place = read_place(saved, optimizer.step_count)
        place.seed = place.seed if seed is None else seed
        # The scheduler that is made next takes over from one of an earlier run in this process.
        session.state.saved_scheduler = optimizer.scheduler_state()
        return place
    # A new run has a schedule of its own.
    session.state.saved_scheduler = None
    if seed is None:
        seed = process_seed()
    return Place(
        seed=secrets.randbits(63) if seed is None else seed, first_step=optimizer.step_count
    )


def _restore_best(
    best: Best | None,
    saved: dict[str, Any],
    settings: Settings,
    snapshot: Snapshot,
    session: TrainingSession,
) -> None:
    """Go on with the best epoch of the run so far, and with its parameters if they were kept."""
    if best is None or saved.get("best") is None:
        return
    best.restore(saved["best"])
    early, path = settings.early_stopping, settings.rule.best_path
    wanted = early is not None and early.restore_best and best.epoch is not None
    if wanted and path is not None and path.exists():
        snapshot.read(path, session)
