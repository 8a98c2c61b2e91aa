"""Sessions of onnxruntime are freed with what uses them, without Python's cyclic collector."""

import gc
import threading

import onnxruntime as ort
import pytest
from small_runs import GOLDEN, open_module, open_session, samples

import onnxtrain
from onnxtrain.api import CosineLRScheduler, LinearLRScheduler, Optimizer, PlateauLRScheduler
from onnxtrain.errors import OnnxTrainError, StateError


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive():
    """The sessions of onnxruntime that are in memory."""
    return {id(o) for o in gc.get_objects() if type(o) is ort.InferenceSession}


def use(session, tmp_path):
    """Make and run every session that a TrainingSession can have."""
    x, labels = samples(8)
    session.step(x, labels)
    session.train_step(x, labels)
    session.optimizer_step()
    session.eval_step(x, labels)
    outputs = session.output_names(training=False)[1:]
    session.predict(x)
    session.predict(x, outputs=outputs[:1])
    session.export_model_for_inferencing(tmp_path / "m.onnx", outputs, optimize=True)
    session.register_linear_lr_scheduler(1, 10, 0.1)
    session.scheduler_step()
    CosineLRScheduler(session.optimizer, 1, 10)
    session.save_checkpoint(tmp_path / "c")


def test_a_session_is_freed_with_its_last_reference(without_collector, tmp_path) -> None:
    before = alive()
    session = open_session()
    use(session, tmp_path)
    assert len(alive() - before) > 4
    del session
    assert alive() == before


@pytest.mark.parametrize("keep", ["state", "scheduler", "run", "parameter"])
def test_what_a_user_keeps_does_not_keep_the_graphs(keep, without_collector, tmp_path) -> None:
    before = alive()
    session = open_session()
    session.step(*samples(8))
    kept = {
        "state": lambda: session.state,
        "scheduler": lambda: LinearLRScheduler(session.optimizer, 1, 10),
        "run": lambda: onnxtrain.fit(session, samples(16), progress=False),
        "parameter": lambda: next(iter(session.state.parameters))[1],
    }[keep]()
    session = None
    assert alive() == before
    assert kept is not None


def test_fit_leaves_nothing_behind(without_collector, tmp_path) -> None:
    before = alive()
    session = open_session()
    saved = onnxtrain.SaveCheckpoint(tmp_path / "c", "best")
    stop = onnxtrain.EarlyStopping(patience=1, restore_best=True)
    for schedule in ("cosine", "plateau", lambda step: 0.1):
        onnxtrain.fit(
            session, samples(32), 2, validation=samples(8), callbacks=[saved, stop],
            schedule=schedule, progress=False, cache_features=False, accumulate=2,
        )  # fmt: skip
    with open_session("head") as head:
        onnxtrain.fit(head, samples(32, "head"), progress=False, cache_features=True)
    del session, head
    assert alive() == before


def test_an_error_leaves_nothing_behind(without_collector) -> None:
    before = alive()
    session = open_session()
    x, labels = samples(8)
    for wrong in ((x[:, :3], labels), (x, labels + 1000)):
        try:
            session.step(*wrong)
        except OnnxTrainError:
            continue
    del session
    assert alive() == before


def test_a_state_keeps_the_moments_when_its_optimizer_is_gone(tmp_path) -> None:
    session = open_session()
    session.step(*samples(8))
    state, expected = session.state, session.state.to_bytes(include_optimizer_state=True)
    del session
    assert state.to_bytes(include_optimizer_state=True) == expected


def test_close_frees_what_is_still_referenced(without_collector, tmp_path) -> None:
    before = alive()
    with open_session() as session:
        use(session, tmp_path)
        assert alive() != before
    assert alive() == before
    session.close()  # twice is no error


def test_modules_and_optimizers_are_context_managers(without_collector) -> None:
    before = alive()
    with open_module() as module, Optimizer(GOLDEN / "mlp/optimizer_model.onnx", module) as updates:
        module(*samples(8))
        updates.step()
        assert alive() != before
    assert alive() == before
    with pytest.raises(StateError, match="was closed"):
        module(*samples(8))
    with pytest.raises(StateError, match="was closed"):
        updates.step()


def test_a_closed_session_says_so_and_its_state_can_be_saved(tmp_path) -> None:
    x, labels = samples(8)
    with open_session() as session:
        session.step(x, labels)
        names, outputs = session.input_names(), session.output_names(training=False)[1:]
        session.predict(x)
        session.save_checkpoint(tmp_path / "before")
    for call in (
        lambda: session.step(x, labels),
        lambda: session.train_step(x, labels),
        lambda: session.eval_step(x, labels),
        lambda: session.optimizer_step(),
        lambda: session.predict(x),
        lambda: session.predict(x, outputs=outputs),
        lambda: session.export_model_for_inferencing(tmp_path / "m", outputs),
        lambda: session.module(x, labels),
        lambda: onnxtrain.fit(session, (x, labels), progress=False),
        lambda: onnxtrain.evaluate(session, (x, labels)),
    ):
        with pytest.raises(StateError, match="was closed"):
            call()
    assert session.input_names() == names
    session.save_checkpoint(tmp_path / "after")
    assert (tmp_path / "after").read_bytes() == (tmp_path / "before").read_bytes()
    assert not (tmp_path / "m").exists()


def test_a_scheduler_without_its_optimizer_says_so() -> None:
    session = open_session()
    scheduler = PlateauLRScheduler(session.optimizer)
    assert scheduler.optimizer is session.optimizer
    del session
    gc.collect()
    with pytest.raises(StateError, match="optimizer of the scheduler is gone"):
        scheduler.restore(None)


def test_closing_waits_for_a_step_of_another_thread() -> None:
    session, errors = open_session(), []

    def train():
        try:
            while True:
                session.step(*samples(8))
        except OnnxTrainError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    while session.optimizer.step_count < 3:
        pass
    session.close()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 2 and all("was closed" in text for text in errors)
