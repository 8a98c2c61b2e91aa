"""A schedule ends with its run; a run with one resumes exactly, or is refused."""

import numpy as np
import pytest
from small_runs import StopAt, assert_same, open_session, parameters, samples

from onnxtrain.device import random_state, schedules
from onnxtrain.device.loop import EarlyStopping, SaveCheckpoint, fit
from onnxtrain.device.random_state import set_seed
from onnxtrain.device.schedulers import (
    CosineLRScheduler,
    ExponentialLRScheduler,
    PlateauLRScheduler,
)
from onnxtrain.errors import ArgumentError, CheckpointError

QUIET = {"batch_size": 4, "progress": False}
NAMED = [
    "linear",
    "cosine",
    "onecycle",
    {"name": "constant", "warmup_ratio": 0.3},
    {"name": "step", "step_size": 3},
    {"name": "multistep", "milestones": (2, 5)},
    {"name": "exponential", "gamma": 0.8},
    {"name": "exponential", "gamma": 0.8, "unit": "epoch"},
    {"name": "plateau", "patience": 0, "threshold": 0.9},
    schedules.Plateau("loss", patience=0, threshold=0.9),
    schedules.cosine(0.05, 12, warmup=3),
    lambda step: 0.1 / (1 + step),
]


@pytest.fixture(autouse=True)
def own_seed(monkeypatch) -> None:
    """What a test sets as seed of the process ends with it."""
    monkeypatch.setattr(random_state, "_process_seed", None)


def give(schedule):
    """A schedule; one that belongs to an optimizer is made for each session."""
    return (lambda session: schedule) if not isinstance(schedule, type) else schedule


def own_cosine(session):
    return CosineLRScheduler(session.optimizer, 0, 12, 0.05)


def own_plateau(session):
    return PlateauLRScheduler(session.optimizer, patience=0, threshold=0.9, initial_lr=0.05)


def label(schedule) -> str:
    """Name a schedule without the address that objects have in their text."""
    return str(schedule) if isinstance(schedule, str | dict) else type(schedule).__name__


@pytest.mark.parametrize("schedule", NAMED, ids=label)
def test_the_rate_of_before_comes_back(schedule, tmp_path) -> None:
    session = open_session(learning_rate=0.25)
    saved = SaveCheckpoint(tmp_path / "run")
    fit(session, samples(16), 3, schedule=schedule, callbacks=saved, **QUIET)
    assert session.get_learning_rate() == 0.25
    assert session.optimizer.scheduler_state() is None
    assert open_session(checkpoint=tmp_path / "run").get_learning_rate() == 0.25
    before = parameters(session)
    fit(session, samples(16), **QUIET)
    assert any((parameters(session)[name] != value).any() for name, value in before.items())


def test_a_checkpoint_within_a_run_has_the_rate_of_before(tmp_path) -> None:
    session = open_session(learning_rate=0.25)
    rates = []

    def save(run):
        run.save(tmp_path / f"epoch{run.epoch}")
        rates.append(run.session.get_learning_rate())

    fit(session, samples(16), 3, schedule="cosine", callbacks=save, **QUIET)
    assert rates[0] > rates[1] > rates[2] == 0.0
    for epoch in (1, 2, 3):
        assert open_session(checkpoint=tmp_path / f"epoch{epoch}").get_learning_rate() == 0.25


def test_the_rate_comes_back_after_an_error() -> None:
    def fail(run):
        raise RuntimeError("stop")

    session = open_session(learning_rate=0.25)
    with pytest.raises(RuntimeError):
        fit(session, samples(16), 3, schedule="linear", callbacks=fail, **QUIET)
    assert session.get_learning_rate() == 0.25


def test_ones_own_scheduler_goes_on_until_it_is_over() -> None:
    whole, parts = open_session(), open_session()
    fit(whole, samples(16), 3, schedule=own_cosine(whole), shuffle=False, **QUIET)
    own = own_cosine(parts)
    for _ in range(3):
        assert parts.optimizer.scheduler is own
        fit(parts, samples(16), 1, schedule=own, shuffle=False, **QUIET)
    assert_same(whole, parts)
    assert parts.get_learning_rate() == pytest.approx(0.05)
    assert parts.optimizer.scheduler is None
    session = open_session()
    own = ExponentialLRScheduler(session.optimizer, 0.5, 1.0)
    fit(session, samples(16), 1, schedule=own, **QUIET)
    assert session.get_learning_rate() == 1 / 16


def test_a_rate_of_zero_is_told(capfd) -> None:
    fit(open_session(learning_rate=0.0), samples(8), progress="lines")
    assert "the learning rate is 0" in capfd.readouterr().err


# ---- resuming --------------------------------------------------------------------------------


HOW = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "micro": {"micro_batch_size": 3},
    "split": {"validation_split": 0.3},
    "early": {
        "validation": samples(10, "cnn", seed=4),
        "callbacks": [EarlyStopping(patience=2, min_delta=0.01)],
    },
}


def run_of(schedule, how, epochs=3, checkpoint=None, callbacks=(), rate=0.1, **others):
    session = open_session("cnn", checkpoint, rate)
    settings = {**QUIET, **how, **others}
    given = [*settings.pop("callbacks", ()), *callbacks]
    made = schedule(session) if schedule in (own_cosine, own_plateau) else schedule
    history = fit(session, samples(18, "cnn"), epochs, schedule=made, callbacks=given, **settings)
    return session, history


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("schedule", [*NAMED, own_cosine, own_plateau, None], ids=label)
def test_resuming_is_exact(schedule, how, tmp_path) -> None:
    set_seed(3)
    whole, history = run_of(schedule, HOW[how])
    set_seed(3)
    save = SaveCheckpoint(tmp_path / "run", 1)
    for stop in (2, 7):
        # Each time a new session, whose rate is set again, as the same program would do.
        path = save.path if save.path.exists() else None
        run_of(schedule, HOW[how], checkpoint=path, callbacks=[save, StopAt(stop)], resume=True)
        set_seed(99)
    again, resumed = run_of(schedule, HOW[how], checkpoint=save.path, callbacks=[save], resume=True)
    assert_same(whole, again)
    assert resumed.losses == history.losses
    assert resumed["learning_rate"] == history["learning_rate"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rate": 0.2}, r"learning_rate 0.2\d* \(before: 0.1"),
        ({"schedule": None}, r"schedule None \(before: 'cosine'\)"),
        ({"schedule": "linear"}, r"schedule 'linear' \(before: 'cosine'\)"),
        ({"schedule": {"name": "cosine", "min_lr": 0.01}}, r"cosine.min_lr 0.01 \(before: 0\)"),
        ({"epochs": 4}, r"cosine.total_step_count 20 \(before: 15\)"),
        ({"max_steps": 9}, r"cosine.total_step_count 9 \(before: 15\)"),
        ({"seed": 5}, "another seed: 5"),
        ({"schedule": schedules.cosine(0.1, 15)}, "schedule 'function'"),
    ],
)
def test_another_run_is_refused(changed, message, tmp_path) -> None:
    path = tmp_path / "run"
    run_of("cosine", {}, callbacks=[SaveCheckpoint(path), StopAt(7)])
    settings = {"schedule": "cosine", "how": {}, "checkpoint": path, "resume": True}
    with pytest.raises(ArgumentError, match=message):
        run_of(**settings | changed)
    session, _ = run_of(**settings)
    assert session.optimizer.step_count == 15


def test_another_function_is_refused(tmp_path) -> None:
    path = tmp_path / "run"
    run_of(schedules.cosine(0.1, 15), {}, callbacks=[SaveCheckpoint(path), StopAt(7)])
    settings = {"how": {}, "checkpoint": path, "resume": True}
    with pytest.raises(ArgumentError, match=r"its rate at step \d is"):
        run_of(schedules.cosine(0.1, 20), **settings)
    # A function does not depend on the number of epochs.
    session, _ = run_of(schedules.cosine(0.1, 15), epochs=4, **settings)
    assert session.optimizer.step_count == 20


def test_a_scheduler_without_a_saved_state_is_refused(tmp_path) -> None:
    class Mine:
        def step(self):
            pass

    path = tmp_path / "run"
    run_of(Mine(), {}, callbacks=[SaveCheckpoint(path), StopAt(2)])
    with pytest.raises(ArgumentError, match=r"Mine.*cannot be resumed"):
        run_of(Mine(), {}, checkpoint=path, resume=True)


def test_less_patience_is_refused(tmp_path) -> None:
    path = tmp_path / "run"
    settings = {"validation": samples(10, "cnn", seed=4)}
    run_of(None, settings, callbacks=[SaveCheckpoint(path), EarlyStopping(patience=3), StopAt(7)])
    for early, message in (
        (EarlyStopping(patience=2), r"patience 2 \(before: 3\)"),
        (EarlyStopping(monitor="loss"), r"monitor 'loss' \(before: 'eval_loss'\)"),
        (EarlyStopping(min_delta=0.1), r"min_delta 0.1 \(before: 0\)"),
    ):
        with pytest.raises(ArgumentError, match=message):
            run_of(None, settings, checkpoint=path, callbacks=[early], resume=True)
    for more in ([EarlyStopping(patience=9)], []):
        session, _ = run_of(None, settings, checkpoint=path, callbacks=more, resume=True)
        assert session.optimizer.step_count == 15


def test_the_parameters_of_the_best_epoch_are_not_those_of_the_position(tmp_path) -> None:
    session = open_session(learning_rate=0.5)
    settings = {"validation": samples(30, seed=9), "seed": 1, **QUIET}
    callbacks = [EarlyStopping(patience=2, restore_best=True), SaveCheckpoint(tmp_path / "run")]
    history = fit(session, samples(12), 9, callbacks=callbacks, **settings)
    assert history.best_epoch < len(history.epochs)
    with pytest.raises(ArgumentError, match=f"holds the parameters of epoch {history.best_epoch}"):
        fit(session, samples(12), 9, callbacks=callbacks, resume=True, **settings)
    again = open_session(checkpoint=tmp_path / "run")
    fit(again, samples(12), 9, callbacks=callbacks, resume=True, **settings)
    assert_same(session, again)


def test_resuming_in_memory_after_another_seed() -> None:
    session, other = open_session("cnn", learning_rate=0.1), open_session("cnn", learning_rate=0.1)
    settings = {"schedule": "cosine", "seed": 4, **QUIET}
    fit(session, samples(18, "cnn"), 3, **settings)
    fit(other, samples(18, "cnn"), 3, callbacks=StopAt(7), **settings)
    assert other.get_learning_rate() == pytest.approx(0.1)
    set_seed(99)
    fit(other, samples(18, "cnn"), 3, resume=True, **settings)
    assert_same(session, other)


def test_damaged_random_numbers_in_the_record() -> None:
    session = open_session()
    fit(session, samples(16), callbacks=StopAt(2), **QUIET)
    session.state._training.private["fit"]["random"] = {"seed": "x"}
    with pytest.raises(CheckpointError, match="record"):
        fit(session, samples(16), resume=True, **QUIET)


# ---- seeds and steps -------------------------------------------------------------------------


def test_the_seed_of_a_run_seeds_dropout_too() -> None:
    losses = []
    for other in (1, 2):
        set_seed(other)  # of the process, which does not count
        session = open_session("cnn")
        losses.append(fit(session, samples(18, "cnn"), 2, seed=3, **QUIET).losses)
    assert losses[0] == losses[1]
    set_seed(1)
    another = open_session("cnn")
    assert fit(another, samples(18, "cnn"), 2, seed=4, **QUIET).losses != losses[0]


def test_an_endless_generator_ends_after_max_steps(tmp_path) -> None:
    def endless():
        rng = np.random.default_rng(0)
        while True:
            x = rng.normal(size=(4, 8)).astype(np.float32)
            yield x, x[:, :3].argmax(axis=1)

    one, other = open_session(), open_session()
    history = fit(one, endless, max_steps=7, validation=samples(8), progress=False)
    assert len(history.losses) == 7
    assert history.stopped.startswith("max_steps")
    assert history.epochs[0].steps == 7 and "eval_loss" in history.epochs[0].values
    path = tmp_path / "run"
    fit(other, endless(), max_steps=3, callbacks=SaveCheckpoint(path), progress=False)
    again = open_session(checkpoint=path)
    resumed = fit(again, endless(), max_steps=7, resume=True, progress=False)
    assert_same(one, again)
    assert resumed.losses == history.losses and len(resumed.epochs) == 1


def test_max_steps_at_the_end_of_an_epoch() -> None:
    whole, other = open_session(), open_session()
    fit(whole, samples(16), 3, seed=1, **QUIET)
    history = fit(other, samples(16), 3, seed=1, max_steps=4, **QUIET)
    assert history["steps"] == [4]
    history = fit(other, samples(16), 3, seed=1, max_steps=400, resume=True, **QUIET)
    assert history["steps"] == [4, 8, 12]
    assert_same(whole, other)
