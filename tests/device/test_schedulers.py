"""Schedulers of a real optimizer: rates, resuming, and what is refused."""

import numpy as np
import pytest
from small_runs import open_session, reopened, samples

from onnxtrain.device.schedulers import (
    SCHEDULERS,
    ConstantLRScheduler,
    CosineLRScheduler,
    ExponentialLRScheduler,
    LinearLRScheduler,
    MultiStepLRScheduler,
    OneCycleLRScheduler,
    PlateauLRScheduler,
    StepLRScheduler,
)
from onnxtrain.errors import ArgumentError, CheckpointError

# Each with the rates of its first steps, worked out by hand. The optimizer's own rate is 0.5.
RATES = {
    "linear": (
        lambda opt: LinearLRScheduler(opt, 2, 10, 1.0),
        [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0, 0],
    ),
    "linear-no-warm-up": (lambda opt: LinearLRScheduler(opt, 0, 4, 2.0), [2, 1.5, 1, 0.5, 0, 0]),
    "linear-warm-up-only": (lambda opt: LinearLRScheduler(opt, 2, 2, 1.0), [0, 0.5, 0, 0]),
    "constant": (lambda opt: ConstantLRScheduler(opt, 4), [0, 0.125, 0.25, 0.375, 0.5, 0.5]),
    "cosine": (lambda opt: CosineLRScheduler(opt, 1, 5, 4.0), [
        0, 4, 2 + 2**0.5, 2, 2 - 2**0.5, 0, 0]),
    "cosine-minimum": (lambda opt: CosineLRScheduler(opt, 0, 2, 4.0, min_lr=1.0), [4, 2.5, 1, 1]),
    "cosine-waves": (lambda opt: CosineLRScheduler(opt, 0, 4, 1.0, cycles=1), [1, 0.5, 0, 0.5, 1]),
    "step": (lambda opt: StepLRScheduler(opt, 2, 0.5), [0.5, 0.5, 0.25, 0.25, 0.125]),
    "step-of-epochs": (lambda opt: StepLRScheduler(opt, 1, 0.5, every=3), [
        0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
    "multistep": (lambda opt: MultiStepLRScheduler(opt, [1, 3], 0.1), [
        0.5, 0.05, 0.05, 0.005, 0.005]),
    "exponential": (lambda opt: ExponentialLRScheduler(opt, 0.9), [
        0.5, 0.45, 0.405, 0.3645]),
    "onecycle": (
        lambda opt: OneCycleLRScheduler(
            opt, 1.0, 10, pct_start=0.5, anneal_strategy="linear", div_factor=5, final_div_factor=2
        ),
        [0.2, 0.4, 0.6, 0.8, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1, 0.1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RATES)
def test_rates(name) -> None:
    make, expected = RATES[name]
    session = open_session(learning_rate=0.5)
    batch = samples(4)
    scheduler = make(session.optimizer)
    rates = []
    for step in range(len(expected)):
        assert scheduler.learning_rate(step) == pytest.approx(expected[step], abs=1e-15)
        rates.append(session.get_learning_rate())
        session.step(*batch)
        session.scheduler_step()
    np.testing.assert_allclose(rates, expected, rtol=2e-7, atol=1e-15)
    assert session.optimizer.initial_lr == pytest.approx(scheduler.initial_lr)


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("done", [0, 3])
def test_resuming_goes_on_without_a_warning(name, done) -> None:
    make, expected = RATES[name]
    session = open_session(learning_rate=0.5)
    make(session.optimizer)
    batch = samples(4)
    for _ in range(done):
        session.step(*batch)
        session.scheduler_step()
    again = reopened(session)
    assert again.get_learning_rate() == session.get_learning_rate()
    make(again.optimizer)
    for _ in range(done, len(expected)):
        assert again.get_learning_rate() == session.get_learning_rate()
        for one in (session, again):
            one.step(*batch)
            one.scheduler_step()


def test_a_rate_that_was_set_by_hand_is_kept_by_resuming() -> None:
    session = open_session()
    LinearLRScheduler(session.optimizer, 0, 10, 1.0)
    session.step(*samples(4))
    session.set_learning_rate(0.125)
    again = reopened(session)
    LinearLRScheduler(again.optimizer, 0, 10, 1.0)
    assert again.get_learning_rate() == 0.125
    again.scheduler_step()
    assert again.get_learning_rate() == pytest.approx(0.9)


def test_other_settings_win_with_a_warning() -> None:
    session = open_session()
    LinearLRScheduler(session.optimizer, 0, 10, 1.0)
    for _ in range(2):
        session.step(*samples(4))
    again = reopened(session)
    with pytest.warns(UserWarning, match=r"total_step_count=4 \(saved: 10\)"):
        LinearLRScheduler(again.optimizer, 0, 4, 1.0)
    assert again.get_learning_rate() == 0.5


def test_another_kind_of_scheduler_starts_anew() -> None:
    session = open_session(learning_rate=0.25)
    LinearLRScheduler(session.optimizer, 0, 10, 1.0)
    again = reopened(session)
    ExponentialLRScheduler(again.optimizer, 0.5, 0.75)
    assert again.get_learning_rate() == 0.75


def test_a_schedule_may_begin_later() -> None:
    session = open_session(learning_rate=1.0)
    for _ in range(3):
        session.step(*samples(4))
    scheduler = ExponentialLRScheduler(session.optimizer, 0.5, first_step=3)
    assert session.get_learning_rate() == 1.0
    session.step(*samples(4))
    scheduler.step()
    assert session.get_learning_rate() == 0.5


def plateau(session, values, **settings):
    """The rates after each of the values, with a scheduler or one that was attached before."""
    if settings:
        PlateauLRScheduler(session.optimizer, **settings)
    rates = []
    for value in values:
        session.scheduler_step(value)
        rates.append(session.get_learning_rate())
    return rates


def test_plateau() -> None:
    session = open_session(learning_rate=1.0)
    rates = plateau(session, [3, 2, 2, 2, 2, 1, 1, 1, 1], factor=0.5, patience=2)
    # The third value in a row that is no better is one too many.
    assert rates == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ({"mode": "max"}, [1, 2, 1, 1], [1, 1, 0.5, 0.25]),
        ({"min_lr": 0.4}, [1, 1, 1, 1], [1, 0.5, 0.4, 0.4]),
        ({"cooldown": 2}, [1, 1, 1, 1, 1, 1], [1, 0.5, 0.5, 0.5, 0.25, 0.25]),
        ({"threshold": 0.5}, [8, 5, 3], [1, 0.5, 0.5]),
        ({"threshold": 2.0, "threshold_mode": "abs"}, [8, 6.5, 5.9], [1, 0.5, 0.5]),
        ({"eps": 0.3}, [1, 1, 1, 1], [1, 0.5, 0.5, 0.5]),
        ({}, [1, float("nan"), float("inf"), 0.5], [1, 0.5, 0.25, 0.25]),
    ],
)
def test_plateau_settings(settings, values, expected) -> None:
    session = open_session(learning_rate=1.0)
    rates = plateau(session, values, **{"factor": 0.5, "patience": 0, **settings})
    np.testing.assert_allclose(rates, expected, rtol=1e-7)


@pytest.mark.parametrize("done", range(1, 8))
def test_plateau_resumes(done) -> None:
    values = [3, 2.5, 2.5, 2.6, 2.5, 2, 2.1, 2.1, 2.0, 2.0]
    settings = {"factor": 0.7, "patience": 1, "cooldown": 1}
    session = open_session(learning_rate=1.0)
    plateau(session, values[:done], **settings)
    again = reopened(session)
    assert again.get_learning_rate() == session.get_learning_rate()
    assert plateau(again, values[done:], **settings) == plateau(session, values[done:])


def test_plateau_respects_a_rate_set_by_hand() -> None:
    session = open_session(learning_rate=1.0)
    plateau(session, [1], factor=0.5, patience=0)
    session.set_learning_rate(0.2)
    assert plateau(session, [1])[0] == pytest.approx(0.1)


def test_plateau_with_other_settings_goes_on_counting() -> None:
    session = open_session(learning_rate=1.0)
    plateau(session, [2, 3, 3], factor=0.5, patience=5)
    again = reopened(session)
    with pytest.warns(UserWarning, match=r"patience=2 \(saved: 5\)"):
        PlateauLRScheduler(again.optimizer, factor=0.5, patience=2)
    assert plateau(again, [3]) == [0.5]
    other = reopened(session)
    with pytest.warns(UserWarning, match=r"initial_lr=0.25"):
        PlateauLRScheduler(other.optimizer, factor=0.5, patience=5, initial_lr=0.25)
    assert other.get_learning_rate() == 0.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda opt: LinearLRScheduler(opt, 10, 2, 1.0), "is more than total_step_count"),
        (lambda opt: LinearLRScheduler(opt, -1, 2, 1.0), "warmup_step_count must be a whole"),
        (lambda opt: LinearLRScheduler(opt, 1, 2.5, 1.0), "total_step_count must be a whole"),
        (lambda opt: LinearLRScheduler(opt, 1, 2, -1.0), "initial_lr must not be negative"),
        (lambda opt: LinearLRScheduler(opt, 1, 2, float("nan")), "initial_lr must be a finite"),
        (lambda opt: LinearLRScheduler(opt, 1, 2, "fast"), "initial_lr must be a finite"),
        (lambda opt: LinearLRScheduler(opt, True, 2, 1.0), "warmup_step_count must be a whole"),
        (lambda opt: ConstantLRScheduler(opt, first_step=-1), "first_step must be"),
        (lambda opt: CosineLRScheduler(opt, 1, 5, 0.1, min_lr=0.2), "more than the highest rate"),
        (lambda opt: CosineLRScheduler(opt, 1, 5, 0.1, cycles=0), "cycles must be more than 0"),
        (lambda opt: StepLRScheduler(opt, 0), "step_size must be a whole number of at least 1"),
        (lambda opt: StepLRScheduler(opt, 1, 0.0), "gamma must be more than 0"),
        (lambda opt: MultiStepLRScheduler(opt, []), "milestones must be"),
        (lambda opt: MultiStepLRScheduler(opt, [3, 1]), "in rising order"),
        (lambda opt: ExponentialLRScheduler(opt, float("inf")), "gamma must be a finite"),
        (lambda opt: OneCycleLRScheduler(opt, 1.0, 0), "steps must be"),
        (lambda opt: OneCycleLRScheduler(opt, 1.0, 9, pct_start=1.5), "pct_start must be from 0"),
        (lambda opt: OneCycleLRScheduler(opt, 1.0, 9, 0.6, three_phase=True), "at most 0.5"),
        (lambda opt: OneCycleLRScheduler(opt, 1.0, 9, anneal_strategy="cosine"), "one of 'cos'"),
        (lambda opt: PlateauLRScheduler(opt, "least"), "mode must be one of"),
        (lambda opt: PlateauLRScheduler(opt, factor=1.0), "factor must be less than 1"),
        (lambda opt: PlateauLRScheduler(opt, threshold_mode="both"), "threshold_mode must be"),
    ],
)  # fmt: skip
def test_wrong_arguments(make, message) -> None:
    session = open_session(learning_rate=0.5)
    with pytest.raises(ArgumentError, match=message):
        make(session.optimizer)
    assert session.get_learning_rate() == 0.5


def test_numbers_of_numpy_can_be_saved() -> None:
    session = open_session()
    CosineLRScheduler(session.optimizer, np.int64(1), np.int32(8), np.float32(0.5), np.float64(0.1))
    session.step(*samples(4))
    session.scheduler_step()
    assert reopened(session).get_learning_rate() == 0.5


def test_a_damaged_state_is_refused() -> None:
    session = open_session()
    PlateauLRScheduler(session.optimizer)
    again = reopened(session)
    again.state._training.saved_scheduler["state"]["bad_steps"] = "many"
    with pytest.raises(CheckpointError, match="'many' as bad_steps"):
        PlateauLRScheduler(again.optimizer)
    again = reopened(session)
    del again.state._training.saved_scheduler["state"]["initial_lr"]
    with pytest.raises(CheckpointError, match="initial_lr"):
        PlateauLRScheduler(again.optimizer)


def test_every_scheduler_has_a_name_and_says_what_it_is() -> None:
    assert {name.partition("-")[0] for name in RATES} | {"plateau"} == set(SCHEDULERS)
    session = open_session()
    text = repr(LinearLRScheduler(session.optimizer, 1, 2, 0.5))
    assert text.startswith("LinearLRScheduler(warmup_step_count=1, total_step_count=2")


def test_the_schedules_of_the_front_door() -> None:
    from onnxtrain.schedules import cosine, linear

    import onnxtrain

    assert onnxtrain.schedules.cosine is cosine
    rates = [linear(1.0, 4, warmup=2, end=0.5)(step) for step in range(6)]
    assert rates == [0.0, 0.5, 1.0, 0.75, 0.5, 0.5]
    with pytest.raises(ArgumentError, match=r"warmup \(5\) is more than all steps \(4\)"):
        cosine(1.0, 4, warmup=5)
