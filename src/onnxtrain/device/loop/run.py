"""The loop of a run: steps, epochs, evaluation, checkpoints, and the ways in which it ends."""

from __future__ import annotations

import math
import os
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxtrain.device.loop.accumulation import Accumulation
from onnxtrain.device.loop.batches import Batch, Source, as_array
from onnxtrain.device.loop.callbacks import Callbacks, Run
from onnxtrain.device.loop.checkpoint_policy import Rule, Snapshot
from onnxtrain.device.loop.evaluation import Evaluation
from onnxtrain.device.loop.history import EpochRecord, History
from onnxtrain.device.loop.interrupt import Interrupts
from onnxtrain.device.loop.monitor import Best, EarlyStopping
from onnxtrain.device.loop.nan_guard import Guard
from onnxtrain.device.loop.progress import Silent
from onnxtrain.device.loop.resume_state import KEY, Place, write_place
from onnxtrain.device.loop.schedule import Schedule
from onnxtrain.errors import OnnxTrainError

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


@dataclass
class Parts:
    """What a run is put together from."""

    session: TrainingSession
    source: Source
    place: Place
    order: dict[str, Any]
    epochs: int
    accumulation: Accumulation | None
    steps_in_epoch: int | None
    evaluation: Evaluation | None
    best: Best | None
    early_stopping: EarlyStopping | None
    rule: Rule
    schedule: Schedule
    guard: Guard
    callbacks: Callbacks
    progress: Silent


class Loop:
    """Trains until all epochs are over, or something ends the run before."""

    def __init__(self, parts: Parts, snapshot: Snapshot) -> None:
        self._parts = parts
        self._session = parts.session
        self._place = parts.place
        self._history = parts.place.history
        self._snapshot = snapshot
        self._interrupts = Interrupts()
        self._run = Run(parts.session, parts.epochs, self._history, self._save)
        self._began = 0.0
        self._steps_of_epoch = 0
        self._saved_at: tuple[int, int] | None = None
        self._kept = "No checkpoint was saved" + (
            ": pass checkpoint= to keep one." if parts.rule.path is None else " so far."
        )
        if self._history.losses and parts.rule.path is not None and parts.rule.path.exists():
            self._note_kept(parts.rule.path)

    def run(self) -> History:
        """Train, and return the history."""
        with self._interrupts:
            try:
                self._train()
            except KeyboardInterrupt:
                if self._interrupts.busy:
                    # In the middle of a step: what is in memory may be half of one and half of
                    # another state, so it is not saved.
                    raise
                self._end_interrupted()
            finally:
                self._parts.progress.close()
        self._parts.callbacks.call("on_train_end", self._run)
        return self._history

    # ---- the course of a run -------------------------------------------------------------------

    def _train(self) -> None:
        self._parts.callbacks.call("on_train_begin", self._run)
        while self._place.epoch < self._parts.epochs and not self._is_over():
            self._train_epoch()
            if self._run.stopped is None:
                self._end_epoch()
        self._history.stopped = self._run.stopped or self._is_over()
        # From here on, an interrupt has nothing left to interrupt.
        self._interrupts.busy = True
        if self._parts.rule.path is None:
            self._remember()
        elif self._saved_at != self._position():
            self._save(self._parts.rule.path)
        self._restore_best()
        self._history.interrupted = self._interrupts.asked
        if self._history.stopped:
            self._parts.progress.say(self._history.stopped)

    def _is_over(self) -> str:
        """Say why training is over before its last epoch; nothing if it is not."""
        if self._run.stopped is not None:
            return self._run.stopped
        early, best = self._parts.early_stopping, self._parts.best
        if early is None or best is None or best.waited < early.patience:
            return ""
        found = "" if best.value is None else f" (the best: {best.value:.4g} in epoch {best.epoch})"
        return f"no better {best.monitor} for {best.waited} epochs{found}"

    def _end_interrupted(self) -> None:
        self._interrupts.busy = True
        self._history.interrupted = True
        self._history.stopped = "interrupted"
        path = self._parts.rule.path
        if path is None:
            self._remember()
            self._parts.progress.say("interrupted")
            return
        self._save(path)
        self._parts.progress.say(f"interrupted; saved to {path}")

    def _restore_best(self) -> None:
        early, best = self._parts.early_stopping, self._parts.best
        if early is None or not early.restore_best or best is None or best.epoch is None:
            return
        if not self._snapshot.restore(self._session):
            warnings.warn(
                f"restore_best: the best epoch was {best.epoch}, before this run was resumed, and "
                "its parameters were not kept; those of the last epoch remain",
                UserWarning,
                stacklevel=5,
            )

    # ---- steps ---------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        parts, place = self._parts, self._place
        accumulation = parts.accumulation
        self._run.epoch = place.epoch + 1
        self._began = time.monotonic() - place.seconds
        self._steps_of_epoch = math.ceil(place.batch / (accumulation.size if accumulation else 1))
        parts.progress.begin_epoch(
            self._run.epoch, parts.epochs, parts.steps_in_epoch, self._steps_of_epoch
        )
        for batch in parts.source.epoch(place.epoch, place.batch):
            # With accumulation, all from the first batch to the update is one step.
            self._interrupts.busy = True
            if accumulation is None:
                self._end_step(self._step(batch), 1, batch.samples)
            else:
                self._accumulate(accumulation, batch)
            if self._run.stopped is not None:
                return
        if accumulation is not None and accumulation.batches:
            self._update(accumulation)

    def _step(self, batch: Batch) -> float:
        try:
            result = self._session.step(*batch.values)
        except OnnxTrainError as error:
            self._add_place(error, batch)
            raise
        return self._checked_loss(result, batch)

    def _accumulate(self, accumulation: Accumulation, batch: Batch) -> None:
        try:
            result = accumulation.add(batch)
        except OnnxTrainError as error:
            self._add_place(error, batch)
            raise
        accumulation.count(self._checked_loss(result, batch), batch.samples)
        if accumulation.batches == accumulation.size:
            self._update(accumulation)

    def _update(self, accumulation: Accumulation) -> None:
        step = self._run.step + 1
        if step % self._parts.guard.every == 0:
            self._parts.guard.check_gradients(self._where(1), step, self._kept)
        self._end_step(*accumulation.update())

    def _checked_loss(self, result: Any, batch: Batch) -> float:
        first = result[0] if isinstance(result, tuple) else result
        loss = float(as_array(first))
        if not math.isfinite(loss):
            raise self._parts.guard.explain_loss(
                self._where(1), self._run.step + 1, loss, batch, self._history.losses, self._kept
            )
        return loss

    def _end_step(self, loss: float, batches: int, samples: int) -> None:
        parts, place = self._parts, self._place
        place.batch += batches
        place.samples += samples
        place.loss_sum += loss * samples
        self._history.losses.append(loss)
        self._run.loss = loss
        self._steps_of_epoch += 1
        step = self._run.step
        if step % parts.guard.every == 0:
            parts.guard.check_parameters(self._where(), step, self._kept)
        parts.schedule.after_step()
        if parts.rule.steps and step % parts.rule.steps == 0:
            assert parts.rule.path is not None
            self._save(parts.rule.path)
        self._interrupts.end()
        parts.progress.step(self._steps_of_epoch, place.loss_sum / place.samples)
        if parts.callbacks.wants("on_step_end"):
            parts.callbacks.call("on_step_end", self._run)

    def _where(self, coming: int = 0) -> str:
        """The step that was just taken, or is `coming` (1), in words."""
        step, of_run = self._steps_of_epoch + coming, self._run.step + coming
        return f"epoch {self._run.epoch}, step {step} (step {of_run} of the run)"

    def _add_place(self, error: OnnxTrainError, batch: Batch) -> None:
        error.add_note(
            f"in epoch {self._place.epoch + 1}, batch {self._place.batch + 1}, of {batch.samples} "
            "samples (drop_last=True leaves out a last batch that is smaller than the others)"
        )

    # ---- the end of an epoch -------------------------------------------------------------------

    def _end_epoch(self) -> None:
        parts, place = self._parts, self._place
        values: dict[str, Any] = {}
        if parts.evaluation is not None:
            parts.progress.evaluating()
            values = self._run.values = parts.evaluation.run(place.epoch)
            parts.callbacks.call("on_evaluate", self._run)
        self._interrupts.busy = True
        record = self._make_record(values)
        self._history.epochs.append(record)
        if parts.schedule.monitor is not None:
            parts.schedule.after_epoch(record[parts.schedule.monitor])
        is_best = parts.best is not None and parts.best.update(
            record[parts.best.monitor], record.epoch
        )
        place.next_epoch()
        self._keep(is_best)
        parts.progress.end_epoch(record, parts.epochs)
        self._interrupts.end()
        parts.callbacks.call("on_epoch_end", self._run)

    def _make_record(self, values: dict[str, Any]) -> EpochRecord:
        place = self._place
        return EpochRecord(
            epoch=place.epoch + 1,
            steps=self._run.step,
            samples=place.samples,
            loss=place.loss_sum / place.samples,
            learning_rate=self._session.get_learning_rate(),
            seconds=time.monotonic() - self._began,
            values=values,
        )

    def _keep(self, is_best: bool) -> None:
        """Save what is to be saved after an epoch."""
        rule, early = self._parts.rule, self._parts.early_stopping
        restores = early is not None and early.restore_best
        if is_best:
            assert self._parts.best is not None
            self._history.best_epoch = self._parts.best.epoch
            if restores:
                self._snapshot.take(self._session)
            if rule.best_path is not None and (rule.best or restores):
                self._save(rule.best_path)
        if rule.path is not None and rule.epochs:
            self._save(rule.path)

    # ---- checkpoints ---------------------------------------------------------------------------

    def _position(self) -> tuple[int, int]:
        return self._place.epoch, self._run.step

    def _save(self, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint, unless what it would hold is not finite."""
        self._parts.guard.check_state(self._where(), self._run.step, self._kept)
        self._remember()
        self._session.save_checkpoint(path)
        if self._parts.rule.path is not None and os.fspath(path) == os.fspath(
            self._parts.rule.path
        ):
            self._saved_at = self._position()
        self._note_kept(path)

    def _note_kept(self, path: str | os.PathLike[str]) -> None:
        self._kept = f"The last good checkpoint is {os.fspath(path)}, of step {self._run.step}."

    def _remember(self) -> None:
        """Put a record of where the run stands into the state, which is saved with it."""
        parts, place = self._parts, self._place
        if place.batch:
            place.seconds = time.monotonic() - self._began
        assert self._session.optimizer is not None
        best = None if parts.best is None else parts.best.saved()
        self._session.state.private[KEY] = write_place(
            place, self._session.optimizer.step_count, parts.order, best
        )
