"""Runs that are interrupted and resumed go on as if nothing had happened, to the bit."""

import contextlib
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from small_runs import StopAt, assert_same, open_session, parameters, samples

from onnxtrain.device import random_state, schedules
from onnxtrain.device.loop import EarlyStopping, SaveCheckpoint, fit
from onnxtrain.device.random_state import set_seed
from onnxtrain.errors import ArgumentError, CheckpointError, StateError

# 23 samples in batches of 4 are 6 steps an epoch, the last of them with 3 samples.
STEPS = 18
COMMON = {"epochs": 3, "batch_size": 4, "progress": False}


@pytest.fixture(autouse=True)
def own_seed(monkeypatch) -> None:
    """What a test sets as seed of the process ends with it."""
    monkeypatch.setattr(random_state, "_process_seed", None)


def without_times(history):
    for record in history.epochs:
        record.seconds = 0.0
    history.stopped = ""
    return history


def whole_run(model, settings):
    set_seed(11)
    session = open_session(model, learning_rate=0.01)
    history = fit(session, samples(23, model), **COMMON, **settings)
    return session, without_times(history)


def broken_run(model, settings, stops, path):
    """The same run, stopped after some steps and resumed from the file each time."""
    set_seed(11)
    session = open_session(model, learning_rate=0.01)
    without_callbacks = {key: value for key, value in settings.items() if key != "callbacks"}
    for stop in (*stops, None):
        callbacks = [] if stop is None else [StopAt(stop)]
        history = fit(
            session, samples(23, model), **COMMON, **without_callbacks, resume=True,
            callbacks=[SaveCheckpoint(path), *settings.get("callbacks", ()), *callbacks],
        )  # fmt: skip
        # Another seed, which must not matter: all that is random follows from the checkpoint.
        set_seed(99)
        session = session if stop is None else open_session(model, path)
    return session, without_times(history)


@pytest.mark.parametrize("model", ["mlp", "cnn", "head", "int8"])
@pytest.mark.parametrize("stops", [[1], [5, 6, 7], [13, 14], [18]], ids=str)
def test_resuming_is_exact(model, stops, tmp_path) -> None:
    session, history = whole_run(model, {})
    again, resumed = broken_run(model, {}, stops, tmp_path / "run")
    assert_same(session, again)
    assert resumed == history
    assert len(history.losses) == STEPS


SETTINGS = {
    "cosine": {"schedule": {"name": "cosine", "warmup_ratio": 0.2}},
    "onecycle": {"schedule": "onecycle"},
    "by epoch": {"schedule": {"name": "exponential", "gamma": 0.5, "unit": "epoch"}},
    "plateau": {
        "schedule": {"name": "plateau", "patience": 0, "threshold": 0.5, "factor": 0.5},
        "validation": samples(10, "cnn", seed=4),
    },
    "metrics": {
        "validation": samples(10, "cnn", seed=4),
        "metrics": ["accuracy", "confusion", "f1"],
    },
    "early stopping": {
        "validation": samples(10, "cnn", seed=4),
        "callbacks": [EarlyStopping(min_delta=0.02, patience=1, restore_best=True)],
    },
    "function": {"schedule": schedules.cosine(0.05, 18, warmup=4)},
    "micro batches": {"micro_batch_size": 3},
    "accumulation": {"accumulate": 4},
    "in order": {"shuffle": False, "drop_last": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stops", [[1, 2], [4], [6], [9, 12]], ids=str)
def test_resuming_with_settings(name, stops, tmp_path) -> None:
    session, history = whole_run("cnn", SETTINGS[name])
    again, resumed = broken_run("cnn", SETTINGS[name], stops, tmp_path / "run")
    assert_same(session, again)
    assert resumed == history


def test_resuming_batches_of_an_iterable(tmp_path) -> None:
    data = samples(20)
    batches = [(data[0][i : i + 4], data[1][i : i + 4]) for i in range(0, 20, 4)]
    one = open_session()
    fit(one, batches, 3, progress=False)
    fit(
        open_session(), batches, 3, callbacks=[SaveCheckpoint(tmp_path / "run"), StopAt(8)],
        progress=False,
    )  # fmt: skip
    again = open_session(checkpoint=tmp_path / "run")
    with pytest.raises(ArgumentError, match="batches 4 \\(before: 5\\)"):
        fit(again, batches[:4], 3, resume=True, progress=False)
    history = fit(again, batches, 3, resume=True, progress=False)
    assert_same(one, again)
    assert len(history.losses) == 15


def test_resuming_a_generator_that_became_shorter(tmp_path) -> None:
    def batches(count=5):
        return ((x[None], y[None]) for x, y in zip(*samples(count), strict=True))

    session = open_session()
    fit(session, batches, callbacks=StopAt(4), progress=False)
    with pytest.raises(ArgumentError, match="has 3 batches, but 4 were done"):
        fit(session, lambda: batches(3), resume=True, progress=False)


def test_resuming_in_memory() -> None:
    settings = SETTINGS["plateau"]
    session, history = whole_run("cnn", settings)
    set_seed(11)
    again = open_session("cnn", learning_rate=0.01)
    for stop in (5, 14, None):
        callbacks = [] if stop is None else [StopAt(stop)]
        resumed = fit(again, samples(23, "cnn"), **COMMON, **settings, resume=True,
                      callbacks=callbacks)  # fmt: skip
    assert_same(session, again)
    assert without_times(resumed) == history


def test_the_time_before_an_interruption_counts() -> None:
    session = open_session()
    fit(session, samples(23), **COMMON, callbacks=StopAt(8))
    saved = session.state._training.private["fit"]
    assert saved["seconds"] > 0
    saved["seconds"] += 100
    history = fit(session, samples(23), **COMMON, resume=True)
    assert history["seconds"][1] > 100 > history["seconds"][2]


def test_more_epochs_can_be_added(tmp_path) -> None:
    data = samples(20)
    one, other = open_session(), open_session()
    fit(one, data, 5, seed=3, progress=False)
    fit(other, data, 2, seed=3, callbacks=SaveCheckpoint(tmp_path / "run"), progress=False)
    again = open_session(checkpoint=tmp_path / "run")
    history = fit(again, data, 5, resume=True, progress=False)
    assert_same(one, again)
    assert history["epoch"] == [1, 2, 3, 4, 5]


def test_a_run_that_is_over_stays_over(tmp_path) -> None:
    data = samples(20)
    saved = SaveCheckpoint(tmp_path / "run")
    history = fit(open_session(), data, 2, callbacks=saved, progress=False)
    again = open_session(checkpoint=tmp_path / "run")
    before = parameters(again)
    resumed = fit(again, data, 2, resume=True, progress=False)
    assert without_times(resumed) == without_times(history)
    for name, value in parameters(again).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_run_that_stopped_early_stays_so_unless_it_may_wait_longer(tmp_path) -> None:
    data = samples(20)
    settings = {"shuffle": False, "progress": False}
    session = open_session(learning_rate=0.0)
    two, four = EarlyStopping(patience=2), EarlyStopping(patience=4)
    saved = SaveCheckpoint(tmp_path / "run")
    history = fit(session, data, 9, callbacks=[two, saved], **settings)
    assert len(history.epochs) == 3
    again = open_session(checkpoint=tmp_path / "run")
    resumed = fit(again, data, 9, callbacks=two, resume=True, **settings)
    assert len(resumed.epochs) == 3
    assert resumed.stopped == history.stopped
    assert len(fit(again, data, 9, callbacks=four, resume=True, **settings).epochs) == 5


def test_a_new_run_does_not_go_on(tmp_path) -> None:
    data = samples(20)
    session = open_session()
    saved = SaveCheckpoint(tmp_path / "run")
    fit(session, data, 2, schedule="linear", callbacks=saved, progress=False)
    again = open_session(checkpoint=tmp_path / "run", learning_rate=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = fit(again, data, 1, schedule="linear", progress=False)
    assert len(history.epochs) == 1
    assert again.optimizer.step_count == 3


def test_the_same_script_starts_and_resumes(tmp_path) -> None:
    path = tmp_path / "run"
    settings = {"callbacks": SaveCheckpoint(path), "resume": True, "progress": False}
    history = fit(open_session(), samples(8), 1, **settings)
    assert len(history.epochs) == 1
    with pytest.raises(ArgumentError, match="the session was not loaded from"):
        fit(open_session(), samples(8), 2, **settings)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 5}, r"batch_size 5 \(before: 4\)"),
        ({"seed": 4}, r"seed: 4 \(before: 3\)"),
        ({"shuffle": False}, "shuffle False"),
        ({"accumulate": 2}, r"accumulate 2 \(before: 1\)"),
        ({"data": samples(24)}, r"samples 24 \(before: 23\)"),
        ({"data": samples(23, seed=5)}, "data_checksum"),
        ({"drop_last": True}, "drop_last True"),
        ({"micro_batch_size": 2}, r"micro_batch_size 2 \(before: None\)"),
        ({"accumulate": (1, "sum")}, "gradients 'sum'"),
        ({"schedule": "cosine"}, r"schedule 'cosine' \(before: None\)"),
        ({"callbacks": EarlyStopping()}, r"patience 3 \(before: None\)"),
    ],
)
def test_other_settings_are_refused_within_an_epoch_and_between(changed, message, tmp_path) -> None:
    given = {"data": samples(23), "batch_size": 4, "seed": 3, "epochs": 3, "progress": False}
    for step, path in ((3, tmp_path / "within"), (6, tmp_path / "between")):
        session = open_session()
        # The place after the last step of an epoch is still within it; one evaluation later not.
        stop = [StopAt(step)] if step == 3 else [lambda run: run.stop()]
        fit(session, **given, callbacks=[SaveCheckpoint(path), *stop])
        with pytest.raises(ArgumentError, match=message):
            fit(open_session(checkpoint=path), **{**given, **changed}, resume=True)
        history = fit(open_session(checkpoint=path), **given, resume=True)
        assert len(history.epochs) == 3


# ---- checkpoints -----------------------------------------------------------------------------


class Watch:
    """Notes at which steps the file was another one than before."""

    def __init__(self, path) -> None:
        self.path, self.seen, self.last = path, [], None

    def look(self, run) -> None:
        now = self.path.read_bytes() if self.path.exists() else None
        if now != self.last:
            self.seen.append(run.step)
            self.last = now

    on_step_end = on_epoch_end = on_train_end = look


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ("epoch", [3, 6, 9]),
        (2, [2, 4, 6, 8, 9]),
        ((4, "epoch"), [3, 4, 6, 8, 9]),
        (100, [9]),
    ],
)
def test_when_checkpoints_are_saved(every, steps, tmp_path) -> None:
    watch = Watch(tmp_path / "run")
    fit(open_session(), samples(12), 3, batch_size=4, progress=False,
        callbacks=[SaveCheckpoint(watch.path, every), watch])  # fmt: skip
    assert watch.seen == steps
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_best_epoch_has_a_file_of_its_own(tmp_path) -> None:
    kept = []
    session = open_session(learning_rate=0.5)
    history = fit(
        session, samples(12), 6, validation=samples(30, seed=9), progress=False, seed=1,
        callbacks=[
            SaveCheckpoint(tmp_path / "run", "best"),
            lambda run: kept.append(parameters(run.session)),
        ],
    )  # fmt: skip
    best = int(np.argmin(history["eval_loss"]))
    assert history.best_epoch == best + 1 < 6
    for name, value in parameters(open_session(checkpoint=tmp_path / "run.best")).items():
        np.testing.assert_array_equal(value, kept[best][name])
    for name, value in parameters(open_session(checkpoint=tmp_path / "run")).items():
        np.testing.assert_array_equal(value, kept[-1][name])


def test_the_best_is_restored_after_resuming(tmp_path) -> None:
    settings = {
        "data": samples(12), "epochs": 6, "validation": samples(30, seed=9), "seed": 1,
        "progress": False,
    }  # fmt: skip
    early = EarlyStopping(patience=5, restore_best=True)
    one = open_session(learning_rate=0.5)
    history = fit(one, **settings, callbacks=early)
    assert history.best_epoch < 4
    path = tmp_path / "run"
    both = [SaveCheckpoint(path), early]
    fit(open_session(learning_rate=0.5), **settings,
        callbacks=[*both, lambda run: run.epoch == 4 and run.stop()])  # fmt: skip
    again = open_session(checkpoint=path)
    fit(again, **settings, callbacks=both, resume=True)
    assert_same(one, again)
    (tmp_path / "run.best").unlink()
    lost = open_session(checkpoint=path)
    with pytest.raises(ArgumentError, match=r"run\.best' is missing"):
        fit(lost, **settings, callbacks=both, resume=True)


class SaveAt(StopAt):
    """Saves a checkpoint at a step in one of two ways, and goes on."""

    def __init__(self, step, path, outside) -> None:
        self.step, self.path, self.outside = step, path, outside

    def on_step_end(self, run) -> None:
        if run.step == self.step:
            (run.session.save_checkpoint if self.outside else run.save)(self.path)


def test_a_callback_saves_the_run(tmp_path) -> None:
    data = samples(23)
    settings = {"epochs": 2, "batch_size": 4, "seed": 1, "progress": False}
    one = open_session()
    fit(one, data, **settings, callbacks=SaveAt(8, tmp_path / "eight", False))
    again = open_session(checkpoint=tmp_path / "eight")
    assert again.optimizer.step_count == 8
    fit(again, data, **settings, resume=True)
    assert_same(one, again)


def test_parameters_and_place_of_different_steps_are_told_apart(tmp_path) -> None:
    data = samples(23)
    settings = {"epochs": 2, "batch_size": 4, "progress": False}
    callbacks = [SaveCheckpoint(tmp_path / "run"), SaveAt(8, tmp_path / "eight", True)]
    fit(open_session(), data, **settings, callbacks=callbacks)
    with pytest.raises(CheckpointError, match="at step 6, but its parameters are of step 8"):
        fit(open_session(checkpoint=tmp_path / "eight"), data, 2, resume=True, progress=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.clear(),
        lambda record: record.update(format=2),
        lambda record: record.update(epoch="two"),
        lambda record: record.update(batch=-1),
        lambda record: record.update(batch=3),
        lambda record: record.update(batch=3, samples=12),
        lambda record: record.update(loss_sum=float("nan")),
        lambda record: record.update(history=[]),
        lambda record: record["history"]["losses"].update(data="!"),
        lambda record: record["history"]["losses"].update(type="O"),
        lambda record: record.update(best={"monitor": "loss"}),
        lambda record: record.update(scheduler=3),
    ],
)
def test_a_damaged_record_is_refused(damage) -> None:
    session = open_session()
    settings = {"epochs": 2, "callbacks": EarlyStopping(), "progress": False}
    fit(session, samples(8), **settings)
    damage(session.state._training.private["fit"])
    with pytest.raises(CheckpointError, match="record"):
        fit(session, samples(8), **settings, resume=True)


def test_a_long_history_is_kept_in_little_room(tmp_path) -> None:
    session = open_session()
    settings = {"batch_size": 1, "progress": False}
    fit(session, samples(2000), callbacks=SaveCheckpoint(tmp_path / "run"), **settings)
    empty = open_session()
    fit(empty, samples(1), callbacks=SaveCheckpoint(tmp_path / "one"), **settings)
    added = (tmp_path / "run").stat().st_size - (tmp_path / "one").stat().st_size
    assert added < 6 * 2000


# ---- interruptions ---------------------------------------------------------------------------


@pytest.fixture
def control_c():
    """Let Ctrl-C be what it is in a terminal; where tests run in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class InterruptAt(StopAt):
    def on_step_end(self, run) -> None:
        if run.step == self.step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("control_c")
@pytest.mark.parametrize("step", [1, 6, 8])
def test_control_c_saves_and_returns(step, tmp_path, capfd) -> None:
    path = tmp_path / "run"
    one, other = open_session(), open_session()
    fit(one, samples(23), **COMMON, seed=2)
    history = fit(other, samples(23), **{**COMMON, "progress": None}, seed=2,
                  callbacks=[SaveCheckpoint(path), InterruptAt(step)])  # fmt: skip
    assert history.interrupted
    assert len(history.losses) == step
    assert f"interrupted; saved to {path}" in capfd.readouterr().err
    again = open_session(checkpoint=path)
    resumed = fit(again, samples(23), **COMMON, resume=True)
    assert not resumed.interrupted
    assert_same(one, again)


@pytest.mark.usefixtures("control_c")
def test_control_c_in_the_middle_of_a_step_waits_for_its_end() -> None:
    def batches():
        for number, (x, y) in enumerate(zip(*samples(12), strict=True)):
            if number == 4:
                signal.raise_signal(signal.SIGINT)
            yield x[None], y[None]

    session = open_session()
    history = fit(session, batches, 2, accumulate=3, progress=False)
    assert history.interrupted
    assert len(history.losses) == session.optimizer.step_count == 2


@pytest.mark.usefixtures("control_c")
def test_control_c_twice_does_not_wait(tmp_path) -> None:
    def batches():
        for number, (x, y) in enumerate(zip(*samples(12), strict=True)):
            if number == 4:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            yield x[None], y[None]

    with pytest.raises(KeyboardInterrupt):
        fit(open_session(), batches, 2, accumulate=3, progress=False,
            callbacks=SaveCheckpoint(tmp_path / "run"))  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("control_c")
def test_control_c_that_gets_lost_ends_the_run_all_the_same() -> None:
    """As when it comes while a destructor runs, out of which no exception leads."""

    class LoseIt:
        def on_step_end(self, run) -> None:
            if run.step == 1:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)

    history = fit(open_session(), samples(23), **COMMON, callbacks=LoseIt())
    assert history.interrupted
    assert len(history.losses) == 2


@pytest.mark.usefixtures("control_c")
def test_control_c_during_evaluation() -> None:
    data = samples(23)
    calls = []

    def evaluation():
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return [data]

    one, other = open_session(), open_session()
    whole = fit(one, data, **COMMON, seed=2, validation=data)
    history = fit(other, data, **COMMON, seed=2, validation=evaluation)
    assert history.interrupted
    assert (len(history.losses), len(history.epochs)) == (12, 1)
    resumed = fit(other, data, **COMMON, seed=2, validation=evaluation, resume=True)
    assert_same(one, other)
    np.testing.assert_allclose(resumed["eval_loss"], whole["eval_loss"], rtol=1e-6)


def test_a_handler_of_ones_own_is_left_alone() -> None:
    caught = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        history = fit(open_session(), samples(8), 2, progress=False, callbacks=InterruptAt(1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [signal.SIGINT]
    assert not history.interrupted


RUN = """
import sys
from small_runs import open_session, samples
from onnxtrain.device.loop import SaveCheckpoint, fit
from onnxtrain.device.random_state import set_seed
from pathlib import Path

path = Path(sys.argv[1])
set_seed(5)
session = open_session("cnn", path if path.exists() else None)

class Tell:
    def on_step_end(self, run):
        print(run.step, flush=True)

fit(session, samples(23, "cnn"), 34, batch_size=4, callbacks=[SaveCheckpoint(path, 3), Tell()],
    resume=True, schedule={"name": "cosine", "initial_lr": 0.02}, progress=False)
print("done", flush=True)
"""


def start(path):
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )


@pytest.mark.slow
def test_killing_the_process_at_any_moment(tmp_path) -> None:
    with start(tmp_path / "whole") as whole:
        assert whole.stdout.read().split()[-1] == "done"
    moments = random.Random(8)
    steps, kills, line = 0, 0, ""
    while line != "done" and kills < 60:
        process = start(tmp_path / "run")
        # Killed some steps later, which may be in a step, between two, or while it is saving.
        for _ in range(moments.randint(15, 60)):
            line = process.stdout.readline().strip()
            if line == "done":
                break
            steps = max(steps, int(line or 0))
        else:
            process.kill()
            kills += 1
        process.communicate()
    assert steps == 204
    assert kills >= 3
    one, other = (open_session("cnn", tmp_path / name) for name in ("whole", "run"))
    assert_same(one, other)
    records = [session.state._training.private["fit"] for session in (one, other)]
    assert records[0]["history"]["losses"] == records[1]["history"]["losses"]


def test_the_record_of_a_long_run_does_not_grow(tmp_path) -> None:
    """It is the same whether the run was interrupted or not, and so is what was trained."""

    def run(name: str, stops: tuple[int, ...]):
        session = open_session("head", learning_rate=0.01)
        for stop in (*stops, 2600):
            history = fit(
                session, samples(16, "head"), 1300, batch_size=8, seed=3, progress=False,
                callbacks=[SaveCheckpoint(tmp_path / name, every=10**6), StopAt(stop)], resume=True,
            )  # fmt: skip
            session = open_session("head", tmp_path / name)
        return session, history

    (whole, all_losses), (broken, some_losses) = run("whole", ()), run("broken", (700, 1500, 1501))
    assert_same(whole, broken)
    assert len(all_losses.losses) == all_losses.steps == some_losses.steps == 2600
    assert len(some_losses.losses) < 2000
    records = [session.state._training.private["fit"]["history"] for session in (whole, broken)]
    for record in records:
        record["epochs"] = [{**epoch, "seconds": 0} for epoch in record["epochs"]]
    assert records[0] == records[1]
    assert len(records[0]["kept_steps"]) <= 1002 and len(records[0]["epochs"]) <= 1002


def test_a_state_that_cannot_be_saved_is_an_error(tmp_path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with pytest.raises((CheckpointError, StateError)):
        fit(open_session(), samples(8), callbacks=SaveCheckpoint(path), progress=False)
    assert list(path.iterdir()) == []
