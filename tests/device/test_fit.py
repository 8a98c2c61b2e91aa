"""The training loop: data, evaluation, schedulers, accumulation, early stopping, callbacks."""

import io
import sys
import threading

import numpy as np
import pytest
from small_runs import GOLDEN, assert_same, open_session, parameters, samples

from onnxtrain.device import random_state, schedules
from onnxtrain.device.loop import EarlyStopping, evaluate, fit
from onnxtrain.device.loop.batches import make_source
from onnxtrain.device.loop.metrics import Accuracy, FunctionMetric
from onnxtrain.device.random_state import set_seed
from onnxtrain.device.schedulers import LinearLRScheduler, PlateauLRScheduler
from onnxtrain.device.session import TrainingSession
from onnxtrain.errors import ArgumentError, InputError
from onnxtrain.format.model.file import ValueType

QUIET = {"progress": False}


def in_batches(data, size):
    return [tuple(a[i : i + size] for a in data) for i in range(0, len(data[0]), size)]


# ---- data ------------------------------------------------------------------------------------


def memory_mapped(data, folder):
    mapped = []
    for name, array in zip("xy", data, strict=True):
        np.save(folder / f"{name}.npy", array)
        mapped.append(np.load(folder / f"{name}.npy", mmap_mode="r"))
    return tuple(mapped)


KINDS = {
    "dictionary": lambda data, folder: {"labels": data[1], "input": data[0]},
    "lists": lambda data, folder: (data[0].tolist(), data[1].tolist()),
    "memory map": memory_mapped,
    "list of batches": lambda data, folder: in_batches(data, 10),
    "dictionaries": lambda data, folder: [
        {"labels": y, "input": x} for x, y in in_batches(data, 10)
    ],
    "function": lambda data, folder: lambda: iter(in_batches(data, 10)),
    "function of the epoch": lambda data, folder: lambda epoch: (b for b in in_batches(data, 10)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_data(kind, tmp_path) -> None:
    data = samples(43)
    sessions = [open_session(), open_session()]
    given = [data, KINDS[kind](data, tmp_path)]
    histories = [
        fit(session, source, 2, batch_size=10, shuffle=False, **QUIET)
        for session, source in zip(sessions, given, strict=True)
    ]
    assert_same(*sessions)
    assert histories[0].losses == histories[1].losses
    assert len(histories[0].losses) == 10


def test_an_iterator_is_good_for_one_epoch() -> None:
    data = samples(20)
    one, other = open_session(), open_session()
    fit(one, (batch for batch in in_batches(data, 8)), **QUIET)
    fit(other, data, batch_size=8, shuffle=False, **QUIET)
    assert_same(one, other)
    with pytest.raises(ArgumentError, match=r"pass f and not f\(\)"):
        fit(one, iter(in_batches(data, 8)), 2, **QUIET)
    with pytest.raises(ArgumentError, match="validation is an iterator"):
        fit(one, data, 2, validation=iter(in_batches(data, 8)), **QUIET)


def test_a_shuffled_memory_map(tmp_path) -> None:
    data = samples(43)
    one, other = open_session(), open_session()
    fit(one, data, 2, batch_size=10, seed=5, **QUIET)
    fit(other, memory_mapped(data, tmp_path), 2, batch_size=10, seed=5, **QUIET)
    assert_same(one, other)


def test_the_epoch_is_told_to_the_function() -> None:
    told = []

    def batches(epoch):
        told.append(epoch)
        return in_batches(samples(8), 4)

    fit(open_session(), batches, 3, **QUIET)
    assert told == [0, 1, 2]


INDEX = [ValueType("i", 7, ("n",))]


def order_of(epoch, seed=7, count=50, **settings):
    source = make_source(
        (np.arange(count),),
        INDEX,
        batch_size=8,
        shuffle=True,
        seed=seed,
        **settings,
    )
    return [int(i) for batch in source.epoch(epoch) for i in batch.values[0]]


def test_shuffling_takes_each_sample_once_and_follows_from_seed_and_epoch() -> None:
    assert sorted(order_of(0)) == list(range(50))
    assert order_of(0) == order_of(0)
    assert len({tuple(order) for order in (order_of(0), order_of(1), order_of(0, 8))}) == 3
    # It must stay what it is, or runs that were saved cannot be resumed within an epoch.
    assert order_of(3, seed=1, count=12) == [0, 5, 1, 9, 2, 6, 7, 8, 11, 10, 4, 3]


def test_the_last_small_batch() -> None:
    source = make_source((np.arange(11),), INDEX, batch_size=4)
    assert [list(b.values[0]) for b in source.epoch(0)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert source.batches == 3
    dropping = make_source((np.arange(11),), INDEX, batch_size=4, drop_last=True)
    assert [len(b.values[0]) for b in dropping.epoch(0)] == [4, 4]
    assert [list(b.values[0]) for b in dropping.epoch(0, skip=1)] == [[4, 5, 6, 7]]


def test_means_are_over_samples() -> None:
    data = samples(45)
    session = open_session(learning_rate=0.0)
    history = fit(session, data, batch_size=40, validation=data, **QUIET)
    together = float(session.eval_step(*data)[0])
    assert history["loss"][0] == pytest.approx(together, rel=1e-6)
    assert history["eval_loss"][0] == pytest.approx(together, rel=1e-6)
    assert history["samples"] == [45]


def test_the_same_seed_gives_the_same_run(monkeypatch) -> None:
    monkeypatch.setattr(random_state, "_process_seed", None)
    losses = []
    for seed in (1, 1, 2):
        set_seed(seed)
        losses.append(fit(open_session("cnn"), samples(40, "cnn"), 2, **QUIET).losses)
    assert losses[0] == losses[1] != losses[2]
    assert (
        fit(open_session(), samples(40), 2, seed=4, **QUIET).losses
        == fit(open_session(), samples(40), 2, seed=4, **QUIET).losses
    )


X, Y = samples(10)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:9]), "'input' has 10, 'labels' has 9"),
        ((X,), "data has 1 arrays, and the model has 2 inputs: input, labels"),
        ({"input": X}, "data lacks 'labels'"),
        ({"input": X, "labels": Y, "mask": Y}, "data has unknown 'mask'"),
        ((X[:0], Y[:0]), "data has no samples"),
        ((X, np.int64(1)), "the array for 'labels' has no axis of samples"),
        ([X, Y], "Pass a tuple of arrays"),
        ([], "data gave no batch in epoch 1"),
        ([(X, Y), (X,)], "batch 2 of epoch 1 of data has 1 arrays"),
        ([{"input": X, "label": Y}], "lacks 'labels' and has unknown 'label'"),
        ([(X[:0], Y[:0])], "batch 1 of epoch 1 of data has no samples"),
        (3, "data must be a tuple or dictionary of arrays"),
        (lambda: None, "must return an iterator of batches, not NoneType"),
        (lambda: iter(()), "data gave no batch in epoch 1"),
    ],
)
def test_wrong_data(data, message) -> None:
    session = open_session()
    with pytest.raises(ArgumentError, match=message):
        fit(session, data, **QUIET)


def test_a_batch_that_the_model_refuses_says_where() -> None:
    with pytest.raises(InputError) as caught:
        fit(open_session(), [(X, Y), (X[:, :7], Y)], **QUIET)
    assert "in epoch 1, batch 2, of 10 samples" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": -1}, "epochs must be"),
        ({"epochs": 1.5}, "epochs must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"accumulate": 0}, "accumulate must be"),
        ({"accumulate": (2, "median")}, "accumulate must be one of"),
        ({"micro_batch_size": 0}, "micro_batch_size must be"),
        ({"micro_batch_size": 4, "accumulate": (2, "sum")}, "cannot be combined"),
        ({"seed": -1}, "seed must be"),
        ({"batch_size": 20, "drop_last": True}, "fewer than a batch of 20"),
        ({"metrics": ["accuracy"]}, "pass validation="),
        ({"callbacks": EarlyStopping("eval_loss")}, "cannot watch 'eval_loss'.*validation="),
        ({"callbacks": [EarlyStopping(), EarlyStopping()]}, "has 2 EarlyStopping; a run takes one"),
        ({"callbacks": schedules.Plateau(), "schedule": "cosine"}, "Plateau is a schedule"),
        ({"progress": "loud"}, "progress must be"),
        ({"callbacks": [3]}, "a callback is a function, or an object"),
        ({"callbacks": [Accuracy]}, "not <class '.*Accuracy'>"),
        ({"schedule": "cosinus"}, "there is no schedule 'cosinus'"),
        ({"schedule": 3}, "schedule must be"),
        ({"schedule": LinearLRScheduler}, "schedule must be"),
        ({"schedule": ("step",)}, "schedule must be"),
        ({"schedule": "step"}, "missing .*'step_size'; it takes step_size, gamma"),
        ({"schedule": {"name": "linear", "gamma": 1}}, "unexpected .*'gamma'"),
        ({"schedule": {"name": "linear", "unit": "epoch"}}, "does not take unit='epoch'"),
        ({"schedule": {"name": "step", "step_size": 1, "warmup_ratio": 0.1}}, "warmup_ratio"),
        ({"schedule": {"name": "plateau", "monitor": "f1"}}, "cannot watch 'f1'"),
        ({"schedule": lambda step: "fast"}, "rate must be a finite number, not 'fast'"),
    ],
)  # fmt: skip
def test_wrong_arguments(settings, message) -> None:
    session = open_session()
    with pytest.raises(ArgumentError, match=message):
        fit(session, (X, Y), **{**QUIET, **settings})
    assert session.optimizer.step_count == 0


def test_parts_that_a_session_lacks() -> None:
    mlp = GOLDEN / "mlp"
    train = mlp / "training_model.onnx"
    with pytest.raises(ArgumentError, match="has no optimizer"):
        fit(TrainingSession(mlp / "checkpoint", train), (X, Y), **QUIET)
    without = TrainingSession(
        mlp / "checkpoint", train, optimizer_model=mlp / "optimizer_model.onnx"
    )
    with pytest.raises(ArgumentError, match="has no evaluation model"):
        fit(without, (X, Y), validation=(X, Y), **QUIET)
    assert len(fit(without, (X, Y), 2, **QUIET).losses) == 2


# ---- evaluation ------------------------------------------------------------------------------


def test_evaluate() -> None:
    data = samples(50)
    session = open_session()
    before = parameters(session)
    values = evaluate(session, data, ["accuracy", "confusion"], batch_size=16)
    loss, outputs = session.eval_step(*data)
    assert values["eval_loss"] == pytest.approx(float(loss), rel=1e-6)
    assert values["accuracy"] == (outputs.argmax(axis=1) == data[1]).mean()
    assert np.sum(values["confusion"]) == 50
    assert list(values) == ["eval_loss", "accuracy", "confusion"]
    for name, value in parameters(session).items():
        np.testing.assert_array_equal(value, before[name])


def test_training_learns() -> None:
    data, unseen = samples(600), samples(200, seed=1)
    history = fit(
        open_session(learning_rate=0.01), data, 12, validation=unseen, metrics=["accuracy"], seed=0,
        **QUIET,
    )  # fmt: skip
    assert history["accuracy"][-1] > 0.9
    assert history["loss"][-1] < 0.4 * history["loss"][0]


def test_metrics_choose_output_and_labels() -> None:
    data = samples(20)
    session = open_session()
    plain = evaluate(session, data, ["accuracy"])
    named = evaluate(session, data, Accuracy(output="output", labels="labels"))
    assert plain == named
    with pytest.raises(ArgumentError, match=r"compares the output 'logits' .* outputs are output"):
        evaluate(session, data, Accuracy(output="logits"))
    with pytest.raises(ArgumentError, match=r"with the input 'y'; .* the inputs input, labels"):
        evaluate(session, data, Accuracy(labels="y"))


def test_metrics_start_anew_with_each_evaluation() -> None:
    session = open_session(learning_rate=0.0)
    data = samples(20)
    metrics = [Accuracy(), "confusion"]
    history = fit(session, data, 2, validation=data, metrics=metrics, **QUIET)
    assert history["confusion"][0] == history["confusion"][1]
    assert evaluate(session, data, metrics)["accuracy"] == history["accuracy"][1]


def test_values_of_metrics_are_numbers() -> None:
    class Words(Accuracy):
        def value(self):
            return "good"

    with pytest.raises(ArgumentError, match="'accuracy' is not made of numbers: 'good'"):
        evaluate(open_session(), samples(4), Words())


def test_a_metric_that_fails_says_where() -> None:
    with pytest.raises(ArgumentError, match="at least 5 classes") as caught:
        evaluate(open_session(), samples(20), ["top5"], batch_size=8)
    assert caught.value.__notes__ == ["in evaluation, batch 1, metric 'top5'"]


# ---- schedulers ------------------------------------------------------------------------------


class Rates:
    """Notes the learning rate after each step."""

    def __init__(self, session):
        self.rates = [session.get_learning_rate()]

    def on_step_end(self, run) -> None:
        self.rates.append(run.session.get_learning_rate())


def rates_of(scheduler, session=None, epochs=2, **settings):
    """The rate before each of the steps, 5 of them in an epoch."""
    session = session or open_session(learning_rate=1.0)
    noted = Rates(session)
    fit(session, samples(20), epochs, batch_size=4, schedule=scheduler, callbacks=[noted],
        **QUIET, **settings)  # fmt: skip
    return noted.rates[1:]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("linear", [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
        (("linear", {"warmup_step_count": 5}), [
            0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0]),
        ({"name": "linear", "warmup_ratio": 0.5, "initial_lr": 2.0}, [
            0.4, 0.8, 1.2, 1.6, 2.0, 1.6, 1.2, 0.8, 0.4, 0.0]),
        ({"name": "constant", "warmup_ratio": 0.2}, [0.5] + [1.0] * 9),
        ({"name": "step", "step_size": 1, "gamma": 0.5, "unit": "epoch"}, [
            1.0] * 4 + [0.5] * 5 + [0.25]),
        ({"name": "exponential", "gamma": 0.5, "unit": "epoch"}, [1.0] * 4 + [0.5] * 5 + [0.25]),
        ({"name": "multistep", "milestones": [3, 6]}, [1.0] * 2 + [0.1] * 3 + [0.01] * 5),
    ],
)  # fmt: skip
def test_named_schedulers(scheduler, expected) -> None:
    np.testing.assert_allclose(rates_of(scheduler), expected, rtol=1e-6, atol=1e-7)


def test_one_cycle_peaks_at_the_rate_of_the_session() -> None:
    rates = rates_of("onecycle")
    assert max(rates) == 1.0
    assert rates[-1] < 1e-4


def test_a_second_run_has_a_schedule_of_its_own() -> None:
    session = open_session(learning_rate=1.0)
    first = rates_of({"name": "linear", "initial_lr": 1.0}, session)
    assert rates_of({"name": "linear", "initial_lr": 1.0}, session) == first


def test_steps_of_the_schedule_are_updates() -> None:
    rates = rates_of("linear", accumulate=2)
    np.testing.assert_allclose(rates, [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0], rtol=1e-6)


def test_a_scheduler_of_ones_own() -> None:
    session = open_session()
    own = LinearLRScheduler(session.optimizer, 0, 4, 1.0)
    np.testing.assert_allclose(rates_of(own, session, 1), [0.75, 0.5, 0.25, 0, 0])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda step: 1 / (1 + step), [1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]),
        (schedules.linear(2.0, 4), [1.5, 1.0, 0.5, 0.0, 0.0]),
        (schedules.exponential(1.0, 0.5, every=2), [1.0, 0.5, 0.5, 0.25, 0.25]),
    ],
)
def test_a_schedule_is_a_function_from_step_to_rate(function, expected) -> None:
    session = open_session(learning_rate=7.0)
    for _ in range(2):  # a second run begins anew
        np.testing.assert_allclose(rates_of(function, session, 1), expected, rtol=1e-6)


def test_plateau_follows_the_evaluation() -> None:
    settings = {"name": "plateau", "patience": 0, "factor": 0.5, "threshold": 0.9, "eps": 0}
    # Too slow for the loss to become better.
    slow = 2.0**-30
    session = open_session(learning_rate=slow)
    rates = rates_of(settings, session, 3, validation=samples(8))
    assert rates == [slow] * 10 + [slow / 2] * 5
    del settings["name"]
    session = open_session(learning_rate=slow)
    assert rates_of(schedules.Plateau(**settings), session, 3) == rates
    session = open_session(learning_rate=slow)
    noted = Rates(session)
    callbacks = [schedules.Plateau("loss", **settings), noted]
    fit(session, samples(20), 3, batch_size=4, callbacks=callbacks, **QUIET)
    assert noted.rates[1:] == rates
    session = open_session(learning_rate=slow)
    own = PlateauLRScheduler(session.optimizer, factor=0.5, patience=0, threshold=0.9, eps=0)
    assert rates_of(own, session, 3) == [slow] * 10 + [slow / 2] * 5


def test_schedules_of_data_without_a_length() -> None:
    def batches():
        return iter(in_batches(samples(8), 4))

    with pytest.raises(ArgumentError, match=r"pass schedule=.*total_step_count"):
        fit(open_session(), batches, schedule="cosine", **QUIET)
    settings = {"name": "cosine", "total_step_count": 2}
    session = open_session()
    assert fit(session, batches, schedule=settings, **QUIET).epochs[0].learning_rate == 0.0
    history = fit(session, batches, schedule="cosine", max_steps=2, **QUIET)
    assert history.epochs[0].learning_rate == 0.0


# ---- accumulation ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "head"])
@pytest.mark.parametrize("count", [32, 29, 9])
def test_accumulation_is_a_step_with_the_larger_batch(model, count) -> None:
    data = samples(count)
    parts, whole = open_session(model), open_session(model)
    history = fit(parts, data, 2, batch_size=8, accumulate=4, shuffle=False, **QUIET)
    one = fit(whole, data, 2, batch_size=32, shuffle=False, **QUIET)
    assert parts.optimizer.step_count == whole.optimizer.step_count == 2
    np.testing.assert_allclose(history.losses, one.losses, rtol=1e-5)
    for name, value in parameters(parts).items():
        np.testing.assert_allclose(value, whole.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_what_is_left_at_the_end_of_an_epoch_is_an_update() -> None:
    session = open_session()
    history = fit(session, samples(20), 2, batch_size=4, accumulate=2, **QUIET)
    assert session.optimizer.step_count == len(history.losses) == 6
    assert history["steps"] == [3, 6]
    assert history["samples"] == [20, 20]


def test_the_sum_is_what_calls_of_train_step_accumulate() -> None:
    data = samples(12)
    loop, calls = open_session("head"), open_session("head")
    fit(loop, data, 1, batch_size=4, accumulate=(3, "sum"), shuffle=False, **QUIET)
    for batch in in_batches(data, 4):
        calls.train_step(*batch)
    calls.optimizer_step()
    assert_same(loop, calls)


def test_gradients_of_before_do_not_count() -> None:
    one, other = open_session(), open_session()
    one.train_step(*samples(4))
    for session in (one, other):
        fit(session, samples(12), batch_size=4, accumulate=3, seed=1, **QUIET)
    assert_same(one, other)


# ---- early stopping --------------------------------------------------------------------------


def scripted(*values):
    """A metric that has these values in evaluation after evaluation."""
    remaining = iter(values)

    class Scripted(FunctionMetric):
        def value(self):
            return float(next(remaining))

    return Scripted(lambda outputs, labels: 0.0, "score")


def run_scripted(values, session=None, **settings):
    early = {"monitor": "score", "mode": "max", "patience": 2, **settings}
    return fit(
        session or open_session(), (X, Y), len(values), validation=(X, Y),
        metrics=scripted(*values), callbacks=EarlyStopping(**early), **QUIET,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "settings", "epochs", "best"),
    [
        ([1, 2, 3, 4, 5, 6], {}, 6, 6),
        ([1, 3, 2, 3, 9, 9], {}, 4, 2),
        ([3, 1, 2, 2, 9, 9], {"mode": "min"}, 4, 2),
        ([1, 3, 2, 4, 2, 2, 9], {}, 6, 4),
        ([1, 1.4, 1.8, 2.2, 9], {"min_delta": 0.5}, 5, 5),
        ([1, 1.4, 1.4, 9], {"min_delta": 0.5}, 3, 1),
        ([1, 0, 0, 0, 9], {"patience": 3}, 4, 1),
        ([float("nan"), float("nan"), 9], {}, 2, None),
    ],
)
def test_early_stopping(values, settings, epochs, best) -> None:
    history = run_scripted(values, **settings)
    assert len(history.epochs) == epochs
    assert history.best_epoch == best
    assert bool(history.stopped) == (epochs < len(values))
    if history.stopped:
        assert history.stopped.startswith("no better score for")


def test_restoring_the_best() -> None:
    kept = []
    session = open_session()

    def note(run):
        kept.append(parameters(run.session))

    fit(
        session, (X, Y), 6, validation=(X, Y), metrics=scripted(1, 3, 2, 2, 9, 9),
        callbacks=[note, EarlyStopping("score", 2, mode="max", restore_best=True)], **QUIET,
    )  # fmt: skip
    assert len(kept) == 4
    for name, value in parameters(session).items():
        np.testing.assert_array_equal(value, kept[1][name])
        assert not np.array_equal(value, kept[3][name])


def test_restoring_the_best_statistics() -> None:
    kept = []
    session = open_session("cnn")
    data = samples(16, "cnn")
    fit(
        session, data, 3, validation=data, metrics=scripted(1, 3, 2), progress=False,
        callbacks=[
            lambda run: kept.append(run.session.get_parameter("bn.mean")),
            EarlyStopping("score", 2, mode="max", restore_best=True),
        ],
    )  # fmt: skip
    np.testing.assert_array_equal(session.get_parameter("bn.mean"), kept[1])
    assert not np.array_equal(kept[1], kept[2])


def test_early_stopping_watches_the_loss_by_default() -> None:
    frozen = open_session(learning_rate=0.0)
    history = fit(frozen, (X, Y), 9, shuffle=False, callbacks=EarlyStopping(patience=2), **QUIET)
    assert len(history.epochs) == 3
    assert history.stopped.startswith("no better loss for 2 epochs (the best: ")
    history = fit(
        frozen, (X, Y), 9, validation=(X, Y), callbacks=EarlyStopping(patience=2), **QUIET
    )
    assert "eval_loss" in history.stopped


def test_what_can_be_watched() -> None:
    with pytest.raises(ArgumentError, match="Pass mode='max' or mode='min'"):
        run_scripted([1], mode="auto")
    for monitor in ("confusion", "f2"):
        with pytest.raises(ArgumentError, match="there is loss, eval_loss, accuracy"):
            fit(
                open_session(), (X, Y), validation=(X, Y), metrics=["accuracy", "confusion"],
                callbacks=EarlyStopping(monitor), **QUIET,
            )  # fmt: skip


# ---- callbacks -------------------------------------------------------------------------------


class Notes:
    def __init__(self) -> None:
        self.events = []

    def on_train_begin(self, run) -> None:
        self.events.append(("begin", run.epoch, run.step))

    def on_step_end(self, run) -> None:
        self.events.append(("step", run.epoch, run.step))
        assert run.loss == run.history.losses[-1]

    def on_evaluate(self, run) -> None:
        self.events.append(("evaluate", run.epoch, run.values["accuracy"]))

    def on_epoch_end(self, run) -> None:
        self.events.append(("epoch", run.epoch, run.record["accuracy"]))

    def on_train_end(self, run) -> None:
        self.events.append(("end", run.epoch, run.step))


def test_the_order_of_callbacks() -> None:
    notes, plain = Notes(), []
    history = fit(
        open_session(), (X, Y), 2, batch_size=5, validation=(X, Y), metrics=["accuracy"],
        callbacks=[notes, lambda run: plain.append(run.epoch)], **QUIET,
    )  # fmt: skip
    first, second = history["accuracy"]
    assert notes.events == [
        ("begin", 0, 0),
        ("step", 1, 1),
        ("step", 1, 2),
        ("evaluate", 1, first),
        ("epoch", 1, first),
        ("step", 2, 3),
        ("step", 2, 4),
        ("evaluate", 2, second),
        ("epoch", 2, second),
        ("end", 2, 4),
    ]
    assert plain == [1, 2]


class StopAt:
    def __init__(self, step) -> None:
        self.step = step

    def on_step_end(self, run) -> None:
        if run.step == self.step:
            run.stop("enough")


@pytest.mark.parametrize(("step", "epochs"), [(1, 0), (3, 1), (4, 1)])
def test_a_callback_stops_within_an_epoch(step, epochs) -> None:
    history = fit(open_session(), (X, Y), 3, batch_size=5, callbacks=StopAt(step), **QUIET)
    assert len(history.losses) == step
    assert len(history.epochs) == epochs
    assert history.stopped == "enough"
    assert not history.interrupted


def test_a_callback_stops_after_an_epoch() -> None:
    history = fit(open_session(), (X, Y), 3, callbacks=lambda run: run.stop(), **QUIET)
    assert len(history.epochs) == 1
    assert history.stopped == "a callback stopped training"


def test_an_error_in_a_callback_is_raised() -> None:
    def broken(run):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(open_session(), (X, Y), callbacks=broken, **QUIET)


# ---- what is shown ---------------------------------------------------------------------------


def test_lines_on_standard_error(capfd) -> None:
    fit(open_session(), (X, Y), 3, validation=(X, Y), metrics=["accuracy"])
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("epoch 2/3  loss ")
    assert "  eval_loss " in lines[1]
    assert "  accuracy 0" in lines[1]


def test_silence(capfd) -> None:
    fit(open_session(), (X, Y), 3, progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_bar(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    fit(open_session(), (X, Y), 2, batch_size=2, callbacks=EarlyStopping(patience=5))
    text = terminal.getvalue()
    assert "\repoch 1/2  [==" in text
    assert "5/5" in text
    assert text.count("\n") == 2


def test_training_in_a_thread() -> None:
    histories = []
    thread = threading.Thread(target=lambda: histories.append(fit(open_session(), (X, Y), **QUIET)))
    thread.start()
    thread.join()
    assert len(histories[0].losses) == 1


def test_no_epochs() -> None:
    session = open_session()
    history = fit(session, (X, Y), 0, **QUIET)
    assert history.losses == []
    assert repr(history) == "History(0 epochs, 0 steps)"
