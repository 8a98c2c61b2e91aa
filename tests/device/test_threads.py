"""Threads: two sessions do not disturb each other, and one does one thing after the other."""

import functools
import itertools
import threading

import numpy as np
import onnxruntime as ort
import pytest
from small_runs import assert_same, open_session, samples

from onnxtrain.device.random_state import set_seed

pytestmark = pytest.mark.slow

MODELS = ["mlp", "cnn", "head"]


def in_threads(*functions):
    """Run functions at the same time, and raise what one of them raised."""
    ready = threading.Barrier(len(functions))
    errors = []

    def run(function):
        ready.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def seeded(model, seed=1):
    set_seed(seed)
    return open_session(model, learning_rate=0.05)


def train(session, model, steps, seed=0):
    for step in range(steps):
        data = samples(16, model, seed=seed + step)
        if step % 2:
            session.step(*data)
        else:
            session.train_step(*data)
            session.optimizer_step()
            session.lazy_reset_grad()


@pytest.mark.parametrize("model", MODELS)
def test_two_sessions_in_two_threads(model) -> None:
    expected = [seeded(model, seed) for seed in (1, 2)]
    for number, session in enumerate(expected):
        train(session, model, 20, 100 * number)
    for _ in range(5):
        one, two = (seeded(model, seed) for seed in (1, 2))
        in_threads(lambda s=one: train(s, model, 20, 0), lambda s=two: train(s, model, 20, 100))
        assert_same(one, expected[0])
        assert_same(two, expected[1])


@functools.cache
def possible_ends(model):
    """The states after six steps, three with one batch and three with another, in any order."""
    ends = {}
    for first in itertools.combinations(range(6), 3):
        session = seeded(model)
        for place in range(6):
            session.step(*samples(16, model, seed=int(place in first)))
        ends[session.state.to_bytes(include_optimizer_state=True)] = first
    assert len(ends) == 20
    return ends


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_one_session_in_two_threads_takes_one_step_after_the_other(model, fused) -> None:
    for _ in range(8):
        session = seeded(model)
        if not fused:
            session._fused = None

        def steps(seed, session=session):
            for _ in range(3):
                session.step(*samples(16, model, seed=seed))

        in_threads(lambda: steps(0), lambda: steps(1))
        assert session.state.to_bytes(include_optimizer_state=True) in possible_ends(model)


def test_evaluation_saving_and_export_beside_training() -> None:
    """Each sees the state between two steps, never in the middle of one."""
    steps, data = 30, samples(16)
    serial = seeded("mlp")
    states, losses = [serial.state.to_bytes(True)], [float(serial.eval_step(*data)[0])]
    for _ in range(steps):
        serial.step(*data)
        states.append(serial.state.to_bytes(True))
        losses.append(float(serial.eval_step(*data)[0]))
    for _ in range(3):
        session = seeded("mlp")
        done = threading.Event()
        seen, found, exported = [], [], []

        def trains(session=session, done=done):
            try:
                for _ in range(steps):
                    session.step(*data)
            finally:
                done.set()

        def looks(session=session, done=done, seen=seen, found=found, exported=exported):
            while not done.is_set():
                seen.append(session.state.to_bytes(True))
                found.append(float(session.eval_step(*data)[0]))
                exported.append(session.export_model_for_inferencing(None, ["output"]))

        in_threads(trains, looks)
        assert set(seen) <= set(states) and set(found) <= set(losses)
        assert_same(session, serial)
        scores = [
            ort.InferenceSession(m, providers=["CPUExecutionProvider"]).run(
                None, {"input": data[0]}
            )
            for m in exported[:2]
        ]
        assert np.isfinite(scores).all()


def test_gradients_accumulate_from_two_threads() -> None:
    """Each call is whole; the sum does not depend on the order but for its rounding."""
    serial = open_session("head")
    for seed in (*range(5), *range(5)):
        serial.train_step(*samples(16, seed=seed))
    for _ in range(10):
        session = open_session("head")

        def accumulate(session=session):
            for seed in range(5):
                session.train_step(*samples(16, seed=seed))

        in_threads(accumulate, accumulate)
        for name in ("fc2.weight", "fc2.bias"):
            ours, theirs = (s.state.parameters[name].grad for s in (session, serial))
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_sessions_made_and_dropped_in_threads() -> None:
    """Frozen parameters are views of a file that several sessions map."""
    expected = seeded("head")
    train(expected, "head", 4)

    def make_and_train():
        for _ in range(4):
            session = open_session("head", learning_rate=0.05)
            train(session, "head", 4)
            assert_same(session, expected)

    in_threads(make_and_train, make_and_train)
