"""The loop of a run: steps, epochs, evaluation, checkpoints, and the ways in which it ends."""

from __future__ import annotations

import math
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from onnxtrain.device.loop.batches import Batch, Source, loss_of
from onnxtrain.device.loop.callbacks import Callbacks, Run
from onnxtrain.device.loop.checkpoint_policy import SaveCheckpoint
from onnxtrain.device.loop.evaluation import Evaluation
from onnxtrain.device.loop.history import EpochRecord, History
from onnxtrain.device.loop.micro_batching import Accumulation
from onnxtrain.device.loop.monitor import Best
from onnxtrain.device.loop.nan_guard import Moment, NanGuard
from onnxtrain.device.loop.progress import ProgressDisplay
from onnxtrain.device.loop.range_freeze import RangeFreeze
from onnxtrain.device.loop.replay import RunReplay
from onnxtrain.device.loop.resume_state import KEY, ResumeState
from onnxtrain.device.loop.schedule import RunSchedule
from onnxtrain.errors import NonFiniteError, OnnxTrainError, StateError

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


@dataclass
class Loop:
    """Trains until all epochs are over, or something ends the run before.

    `state` is the position of the run; `order` determines the order of its batches, and `settings`
    whatever else a resumed run has to have in common. Batches are taken in parts of
    `micro_batch_size` samples. Of those that are not finite, `most_skips` in a row are left out.
    """

    session: TrainingSession
    source: Source
    state: ResumeState
    order: dict[str, Any]
    settings: dict[str, Any]
    epochs: int
    max_steps: int | None
    accumulation: Accumulation | None
    micro_batch_size: int | None
    steps_in_epoch: int | None
    evaluation: Evaluation | None
    best: Best | None
    checkpoint: SaveCheckpoint | None
    schedule: RunSchedule
    guard: NanGuard
    callbacks: Callbacks
    progress: ProgressDisplay
    range_freeze: RangeFreeze
    most_skips: int = 0
    replay: RunReplay | None = None

    def __post_init__(self) -> None:
        self._history = self.state.history
        self._interrupts = Interrupts()
        self._run = Run(self.session, self.epochs, self._history, _weakly(self._save))
        self._began = 0.0
        self._steps_of_epoch = 0
        self._told = 0
        self._skips_in_a_row = 0
        self._saved_at: tuple[int, int] | None = None
        self._kept = "No checkpoint was saved so far."
        if self.checkpoint is None:
            self._kept = "No checkpoint was saved: callbacks=[SaveCheckpoint(path)] keeps one."
        elif self._history.losses and self.checkpoint.path.exists():
            self._note_kept(self.checkpoint.path)

    def run(self) -> History:
        """Train, and return the history."""
        with self._interrupts:
            try:
                self._train()
            except KeyboardInterrupt:
                if self._interrupts.busy:
                    # In the middle of a step: memory may hold half of one state and half of
                    # another, so it is not saved.
                    raise
                self._interrupts.busy = True
                self._history.interrupted = True
                self._history.stopped = "interrupted"
                self._saved_at = None  # callbacks may have changed something since
                self._save_last()
                saved = "" if self.checkpoint is None else f"; saved to {self.checkpoint.path}"
                self.progress.say(f"interrupted{saved}")
            finally:
                self.progress.close()
        self.callbacks.call("on_train_end", self._run)
        return self._history

    # ---- the course of a run -------------------------------------------------------------------

    def _train(self) -> None:
        self.callbacks.call("on_train_begin", self._run)
        while self.state.epoch < self.epochs and not self._why_over():
            self._train_epoch()
            if self._run.stopped is None and not self._is_last_step():
                self._end_epoch()
        self._history.stopped = self._run.stopped or self._why_over()
        # From here on, an interrupt has nothing left to interrupt.
        self._interrupts.busy = True
        self._save_last()
        if self._is_last_step() and self.state.batch:
            # The run can be resumed within the epoch; the history has what there is of it.
            self._history.epochs.append(self._record())
            self.progress.end_epoch(self._history.epochs[-1], self.epochs)
        self._restore_best()
        self._history.interrupted = self._interrupts.asked
        if self._history.skipped:
            self.progress.say(f"{self._history.skipped} batches skipped: they were not finite")
        if self._history.stopped:
            self.progress.say(self._history.stopped)

    def _why_over(self) -> str:
        """Return why training is over before its last epoch; "" if it is not."""
        if self._run.stopped is not None:
            return self._run.stopped
        if self._is_last_step():
            return f"max_steps: {self.max_steps} steps are over"
        best = self.best
        if best is None or best.waited < best.patience:
            return ""
        found = "" if best.value is None else f" (the best: {best.value:.4g} in epoch {best.epoch})"
        return f"no better {best.monitor} for {best.waited} epochs{found}"

    def _is_last_step(self) -> bool:
        return self.max_steps is not None and self._run.step >= self.max_steps

    def _save_last(self) -> None:
        """Save the run where it ends."""
        if self.checkpoint is None:
            self._record_position()
        elif self._saved_at != self._position():
            self._save(self.checkpoint.path)

    def _restore_best(self) -> None:
        best = self.best
        if best is None or best.snapshot is None or not best.snapshot.restore(self.session):
            return
        if best.epoch != self.state.epoch:
            # What is in memory is not of the position that was recorded any more.
            self.session.module.training_state.private[KEY]["restored"] = best.epoch

    # ---- steps ---------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        state, accumulation = self.state, self.accumulation
        self._run.epoch = state.epoch + 1
        self._began = time.monotonic() - state.seconds
        self._steps_of_epoch = math.ceil(state.batch / (accumulation.size if accumulation else 1))
        self.progress.begin_epoch(
            self._run.epoch, self.epochs, self.steps_in_epoch, self._steps_of_epoch
        )
        for batch in self.source.epoch(state.epoch, state.batch):
            self._tell_notes()
            # With accumulation, all from the first batch to the update is one step.
            self._interrupts.busy = True
            if accumulation is None:
                loss = self._loss(self.session.step, batch)
                if loss is None:
                    self._pass_over(1)
                else:
                    self._end_step(loss, 1, batch.samples)
            else:
                self._accumulate(accumulation, batch)
            if self._run.stopped is not None or self._is_last_step():
                return
        if accumulation is not None and accumulation.batches:
            self._update(accumulation)

    def _tell_notes(self) -> None:
        for note in self.source.notes[self._told :]:
            self.progress.say(note)
        self._told = len(self.source.notes)

    def _accumulate(self, accumulation: Accumulation, batch: Batch) -> None:
        for part in batch.split(self.micro_batch_size):
            accumulation.begin(part.samples)
            accumulation.count(self._loss(self.session.train_step, part), part.samples)
        accumulation.batches += 1
        if accumulation.batches == accumulation.size:
            self._update(accumulation)

    def _update(self, accumulation: Accumulation) -> None:
        batches = accumulation.batches
        if not accumulation.samples:  # all were skipped
            accumulation.start()
            self._pass_over(batches)
            return
        if not self.session.checks_finite and (self._run.step + 1) % self.guard.every == 0:
            self.guard.check_gradients(self._moment(1))
        before = self.session.skipped_steps
        made = accumulation.update()
        if self.session.skipped_steps == before:
            self._end_step(*made)
        else:
            self._skip(self.guard.explain_accumulated(self._moment(1)), batches)
            self._pass_over(batches)

    def _loss(self, run: Callable[..., Any], batch: Batch) -> float | None:
        """Run a batch, and return its loss; None if it was not finite, and skipped."""
        before = self.session.skipped_batches
        try:
            with self.range_freeze.at(self._run.step):
                result = run(*batch.values)
        except OnnxTrainError as error:
            error.add_note(
                f"in epoch {self.state.epoch + 1}, batch {self.state.batch + 1}, of "
                f"{batch.samples} samples (drop_last=True leaves out a last batch that is smaller "
                "than the others)"
            )
            raise
        loss = loss_of(result)
        if not math.isfinite(loss):
            cause = self.guard.explain_loss(self._moment(1), loss, batch, self._history.losses)
        elif self.session.skipped_batches > before:
            cause = self.guard.explain_gradients(self._moment(1), loss, batch)
        else:
            self._skips_in_a_row = 0
            return loss
        self._skip(cause, 1)
        return None

    def _skip(self, error: NonFiniteError, batches: int) -> None:
        """Count batches that are left out; raise the error if there are too many in a row."""
        self._skips_in_a_row += batches
        if self._skips_in_a_row > self.most_skips:
            raise error
        if not self._history.skipped:
            self.progress.say(f"skipped: {error.message}")
        self._history.skipped += batches

    def _pass_over(self, batches: int) -> None:
        """Go on behind batches that were left out."""
        self.state.batch += batches
        self._steps_of_epoch += 1
        self._interrupts.end()
        self.progress.step(self._steps_of_epoch, self._mean_loss())

    def _mean_loss(self) -> float:
        state = self.state
        return state.loss_sum / state.samples if state.samples else math.nan

    def _end_step(self, loss: float, batches: int, samples: int) -> None:
        state = self.state
        state.batch += batches
        state.samples += samples
        state.loss_sum += loss * samples
        self._history.losses.append(loss)
        self._run.loss = loss
        self._steps_of_epoch += 1
        step = self._run.step
        if step % self.guard.every == 0:
            self.guard.check_parameters(self._moment())
        if self.schedule.monitor is None:
            self.schedule.step()
        if self.checkpoint is not None and self.checkpoint.is_due(step):
            self._save(self.checkpoint.path)
        self._interrupts.end()
        self.progress.step(self._steps_of_epoch, self._mean_loss())
        self.callbacks.call("on_step_end", self._run)

    def _moment(self, coming: int = 0) -> Moment:
        """The step that was just taken, or is `coming` (1)."""
        step, of_run = self._steps_of_epoch + coming, self._run.step + coming
        where = f"epoch {self._run.epoch}, step {step} (step {of_run} of the run)"
        return Moment(where, of_run, self._kept)

    # ---- the end of an epoch -------------------------------------------------------------------

    def _record(self) -> EpochRecord:
        """Evaluate, and return the record of the epoch."""
        values: dict[str, Any] = {}
        if self.evaluation is not None:
            self.progress.evaluating()
            values = self._run.values = self.evaluation.run(self.state.epoch)
            self.callbacks.call("on_evaluate", self._run)
        self._interrupts.busy = True
        state = self.state
        return EpochRecord(
            epoch=state.epoch + 1,
            steps=self._run.step,
            samples=state.samples,
            loss=self._mean_loss(),
            learning_rate=self.session.get_learning_rate(),
            seconds=time.monotonic() - self._began,
            values=values,
        )

    def _end_epoch(self) -> None:
        record = self._record()
        self._history.epochs.append(record)
        if self.schedule.monitor is not None:
            self.schedule.step(record[self.schedule.monitor])
        self.state.next_epoch()
        self._keep(record)
        self.progress.end_epoch(record, self.epochs)
        self._interrupts.end()
        self.callbacks.call("on_epoch_end", self._run)

    def _keep(self, record: EpochRecord) -> None:
        """Save the run after an epoch, and the best epoch apart."""
        policy, best = self.checkpoint, self.best
        if best is not None and best.update(record[best.monitor], record.epoch):
            self._history.best_epoch = best.epoch
            if best.snapshot is not None:
                best.snapshot.take(self.session)
            if policy is not None and (policy.best or best.snapshot is not None):
                self._save(policy.best_path)
        if policy is not None and policy.epochs:
            self._save(policy.path)

    # ---- checkpoints ---------------------------------------------------------------------------

    def _position(self) -> tuple[int, int]:
        return self.state.epoch, self._run.step

    def _save(self, path: str | os.PathLike[str]) -> None:
        """Save a checkpoint, unless it would hold numbers that are not finite."""
        self.guard.check_state(self._moment())
        self._record_position()
        self.session.save_checkpoint(path, allow_nonfinite=True)  # it was just checked
        if self.checkpoint is not None and os.fspath(path) == os.fspath(self.checkpoint.path):
            self._saved_at = self._position()
        self._note_kept(path)

    def _note_kept(self, path: str | os.PathLike[str]) -> None:
        self._kept = f"The last good checkpoint is {os.fspath(path)}, of step {self._run.step}."

    def _record_position(self) -> None:
        """Put the position of the run into the session's state, which is saved with it."""
        if self.state.batch:
            self.state.seconds = time.monotonic() - self._began
        optimizer, state = self.session.optimizer, self.session.module.training_state
        assert optimizer is not None
        scheduler = self.schedule.scheduler
        if scheduler is not None:
            self.state.scheduler = {
                "name": scheduler.kind,
                **(self.state.scheduler or {}),
                "state": scheduler.state(),
            }
        if self.replay is not None:
            self.replay.record(self.state.epoch, self.state.batch)
        state.private[KEY] = self.state.to_record(
            step=optimizer.step_count,
            rate=optimizer.get_learning_rate(),
            random=state.random.saved(),
            order=self.order,
            settings=self.settings | {"learning_rate": optimizer.lasting_rate},
            best=None if self.best is None else self.best.saved(),
        )


def _weakly(save: Callable[[str | os.PathLike[str]], None]) -> Callable[..., None]:
    """Return a method that does not keep its loop: a loop and its run would keep the session."""
    method = weakref.WeakMethod(save)

    def save_if_running(path: str | os.PathLike[str]) -> None:
        found = method()
        if found is None:
            raise StateError("the run is over: save with session.save_checkpoint(path)")
        found(path)

    return save_if_running


class Interrupts:
    """Lets Ctrl-C end a run between two steps and not in the middle of one.

    While `busy`, the signal is only noted (`asked`). Otherwise, and if it comes a second time, it
    is a KeyboardInterrupt as ever; should that get lost (raised inside a destructor, say, where
    Python drops it), the end of the step raises it again. Outside the main thread, and in programs
    that have a handler of their own, nothing is changed.
    """

    def __init__(self) -> None:
        self.busy = False
        self.asked = False
        self._before: Any = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again or not self.busy:
            raise KeyboardInterrupt

    def end(self) -> None:
        """The state is whole again: let an interrupt that was asked for happen."""
        self.busy = False
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with suppress(ValueError):  # not the main thread: signals do not arrive here
                self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
