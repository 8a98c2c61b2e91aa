"""Models that train for integers: their ranges, and runs that go on, rest, skip and restore."""

from itertools import pairwise

import numpy as np
import pytest
from small_runs import (
    GOLDEN,
    StopAt,
    assert_same,
    open_module,
    open_session,
    parameters,
    reopened,
    samples,
)

from onnxtrain.api import CheckpointState
from onnxtrain.device.heads import fit_head
from onnxtrain.device.loop import EarlyStopping, SaveCheckpoint, evaluate, fit
from onnxtrain.errors import CheckpointError, NonFiniteError, StateError

RANGES, MOMENTUM = "quantization.ranges", "quantization.momentum"


def open_int8(checkpoint=None, learning_rate=0.01):
    return open_session("int8", checkpoint, learning_rate)


def ranges(session):
    return session.get_parameter(RANGES)


class Watch:
    """Keeps the ranges and the momentum after each step."""

    def __init__(self) -> None:
        self.ranges, self.momenta = [], []

    def on_step_end(self, run) -> None:
        self.ranges.append(ranges(run.session))
        self.momenta.append(float(run.session.get_parameter(MOMENTUM)[0]))

    def moved(self) -> list[bool]:
        return [not np.array_equal(a, b) for a, b in pairwise(self.ranges)]


# ---- ranges --------------------------------------------------------------------------------------


def test_ranges_follow_what_training_sees() -> None:
    session = open_int8()
    before = ranges(session)
    x, y = samples(16, "int8")
    session.step(3 * x, y)
    after = ranges(session)
    # The first row is that of the input, which is three times as wide as in calibration.
    seen = np.array([3 * x.min(), 3 * x.max()])
    np.testing.assert_allclose(after[0], before[0] + 0.1 * (seen - before[0]), rtol=1e-5)
    assert session.get_parameter(MOMENTUM) == np.float32(0.1)


def test_ranges_stay_once_they_are_frozen() -> None:
    session = open_int8()
    session.step(*samples(16, "int8"))
    session.freeze_ranges()
    frozen = ranges(session)
    session.step(*samples(16, "int8", seed=1))
    session.train_step(*samples(16, "int8", seed=2))
    np.testing.assert_array_equal(ranges(session), frozen)
    again = reopened(session, "int8")
    again.step(*samples(16, "int8", seed=3))
    np.testing.assert_array_equal(ranges(again), frozen)


def test_a_model_of_floats_has_no_ranges() -> None:
    with pytest.raises(StateError, match="no ranges that follow training: prepare with quantize"):
        open_session().freeze_ranges()


@pytest.mark.parametrize(
    ("settings", "moving"),
    [
        ({"epochs": 2}, 9),
        ({"epochs": 9, "max_steps": 8}, 6),
        ({"epochs": 2, "accumulate": 2}, 5),
        ({"epochs": 2, "micro_batch_size": 3}, 9),
    ],
    ids=str,
)
def test_fit_freezes_for_its_last_quarter(settings, moving) -> None:
    session, watch = open_int8(), Watch()
    fit(session, samples(24, "int8"), batch_size=4, callbacks=watch, progress=False, **settings)
    # After the first step, nothing can be compared with what was before.
    assert watch.moved() == [n < moving for n in range(1, len(watch.ranges))]
    np.testing.assert_allclose(watch.momenta, 0.1, rtol=1e-6)
    # Another run begins with ranges that move.
    fit(session, samples(24, "int8"), batch_size=4, callbacks=watch, progress=False)
    assert any(watch.moved()[-5:])


def test_without_an_end_ranges_follow_to_the_last_step() -> None:
    session, watch = open_int8(), Watch()

    def batches():
        return (samples(4, "int8", seed=i) for i in range(8))

    fit(session, batches, callbacks=watch, progress=False)
    assert all(watch.moved())


def test_who_freezes_in_a_callback_is_heard() -> None:
    class Freeze:
        def on_epoch_end(self, run) -> None:
            run.session.freeze_ranges()

    session, watch = open_int8(), Watch()
    fit(session, samples(24, "int8"), 4, batch_size=4, callbacks=[watch, Freeze()], progress=False)
    assert watch.moved() == [n < 6 for n in range(1, 24)]
    assert session.get_parameter(MOMENTUM) == 0


@pytest.mark.parametrize("stop", [5, 17, 18, 19, 23])
def test_a_run_goes_on_to_the_bit_before_and_after_the_freeze(stop, tmp_path) -> None:
    settings = {"epochs": 4, "batch_size": 4, "progress": False, "seed": 3}
    whole, broken = open_int8(), open_int8()
    fit(whole, samples(24, "int8"), **settings)
    save = SaveCheckpoint(tmp_path / "run")
    fit(broken, samples(24, "int8"), **settings, callbacks=[save, StopAt(stop)])
    again = open_int8(tmp_path / "run", None)
    fit(again, samples(24, "int8"), **settings, resume=True)
    assert_same(whole, again)


def test_the_best_epoch_has_its_ranges() -> None:
    class Spoil:
        """Keeps the ranges of the first epoch, and makes all others worse."""

        def on_epoch_end(self, run) -> None:
            if run.epoch == 1:
                self.best = ranges(run.session)
                run.session.set_learning_rate(30.0)

    spoil, session = Spoil(), open_int8()
    early = EarlyStopping(patience=2, restore_best=True)
    history = fit(
        session, samples(24, "int8"), 4, batch_size=4, progress=False, seed=1,
        validation=samples(12, "int8", seed=5), callbacks=[early, spoil],
    )  # fmt: skip
    assert history.best_epoch == 1 and len(history.epochs) > 1
    np.testing.assert_array_equal(ranges(session), spoil.best)
    assert session.get_parameter(MOMENTUM) == np.float32(0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_batch_that_is_not_finite_changes_nothing(bad, frozen) -> None:
    session = open_int8()
    session.step(*samples(8, "int8"))
    if frozen:
        session.freeze_ranges()
    before = parameters(session)
    x, y = samples(8, "int8", seed=1)
    x[5, 0, 3, 2] = bad
    session.step(x, y)
    assert session.skipped_steps == 1
    session.train_step(x, y)
    assert session.skipped_batches == 2
    for name, array in parameters(session).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_fit_tells_of_data_that_are_not_finite() -> None:
    x, y = samples(24, "int8")
    x[13, 0, 0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="the first in sample 13 of the data"):
        fit(open_int8(), (x, y), batch_size=4, progress=False)
    history = fit(open_int8(), (x, y), batch_size=4, progress=False, nonfinite="skip")
    assert history.skipped == 1


# ---- parameters ----------------------------------------------------------------------------------


def test_ranges_go_with_all_parameters() -> None:
    one, other = open_int8(), open_int8()
    one.step(*samples(16, "int8"))
    assert one.module.statistics == (RANGES, MOMENTUM)
    other.from_buffer(one.to_buffer(trainable_only=False), trainable_only=False)
    np.testing.assert_array_equal(ranges(other), ranges(one))
    nominal = open_module("int8", "nominal_checkpoint")
    nominal.copy_buffer_to_parameters(one.to_buffer(False), trainable_only=False)
    np.testing.assert_array_equal(nominal.state.parameters[RANGES].data, ranges(one))
    other.load_parameters({RANGES: np.zeros_like(ranges(one)), MOMENTUM: np.ones(1, "f4")})
    assert not ranges(other).any()
    other.step(*samples(16, "int8"))  # momentum 1: the ranges of this batch
    assert ranges(other)[0].tolist() == [samples(16, "int8")[0].min(), samples(16, "int8")[0].max()]


def test_a_checkpoint_belongs_to_its_model() -> None:
    for model_name, other in (("int8", "cnn"), ("cnn", "int8")):
        with pytest.raises(CheckpointError, match="do not belong together"):
            open_session(model_name, GOLDEN / other / "checkpoint")
        state = CheckpointState.load_checkpoint(GOLDEN / other / "checkpoint")
        state.generation = None
        with pytest.raises(CheckpointError, match="do not belong together"):
            open_session(model_name, state)


def test_a_head_of_integers_is_fitted_without_steps() -> None:
    session, data = open_int8(), samples(200, "int8")
    before = evaluate(session, data, ["accuracy"])
    fit_head(session, data)
    after = evaluate(session, data, ["accuracy"])
    assert after["accuracy"] > before["accuracy"] and after["eval_loss"] < before["eval_loss"]
