"""Seeds: the same one gives the same run, and a run that is resumed draws on."""

import numpy as np
import pytest
from small_runs import assert_same, open_module, open_session, reopened, samples

import onnxtrain
from onnxtrain.device import random_state
from onnxtrain.device.random_state import RandomState, set_seed
from onnxtrain.errors import ArgumentError


@pytest.fixture(autouse=True)
def forget_seed():
    """Leave no seed behind."""
    yield
    random_state._process_seed = None


def draw(state, count=1):
    words = np.zeros(2, np.uint32)
    drawn = []
    for _ in range(count):
        state.next(words)
        drawn.append((int(words[1]) << 32) | int(words[0]))
    return drawn


def test_what_a_seed_draws_is_written_down() -> None:
    """The numbers are those of splitmix64, as docs/format.md has it, for other languages."""
    assert draw(RandomState({"seed": 0, "draws": 0}), 3) == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert draw(RandomState({"seed": 1234567, "draws": 0}), 2) == [
        6457827717110365317,
        3203168211198807973,
    ]


def test_a_state_goes_on_where_it_was_saved() -> None:
    set_seed(5)
    state = RandomState()
    all_ = draw(RandomState(), 6)
    first = draw(state, 2)
    assert first + draw(RandomState(state.saved()), 4) == all_


def test_seeds_differ_and_equal_ones_do_not() -> None:
    drawn = {}
    for seed in (0, 1, 2**32, -1, 2**64 - 1, np.int64(7)):
        set_seed(seed)
        drawn[int(seed) % 2**64] = tuple(draw(RandomState(), 3))
        assert tuple(draw(RandomState(), 3)) == drawn[int(seed) % 2**64]
    assert len(set(drawn.values())) == len(drawn) == 5


def test_without_a_seed_every_state_is_another() -> None:
    random_state._process_seed = None
    assert draw(RandomState()) != draw(RandomState())


def test_a_seed_that_is_set_later_counts() -> None:
    set_seed(3)
    expected = draw(RandomState(), 2)
    random_state._process_seed = None
    for state in (RandomState(), RandomState({"seed": 9, "draws": 4})):
        draw(state, 2)
        set_seed(3)
        assert draw(state, 2) == expected
    set_seed(3)
    again = RandomState()
    draw(again)
    set_seed(3)
    assert again.saved() == {"seed": 3, "draws": 0}


def test_a_saved_state_comes_before_an_earlier_seed() -> None:
    set_seed(3)
    assert draw(RandomState({"seed": 0, "draws": 1})) == [0x6E789E6AA1B965F4]


@pytest.mark.parametrize("seed", ["a", 1.0, None, True])
def test_a_seed_is_an_integer(seed) -> None:
    with pytest.raises(ArgumentError, match="a seed is an integer"):
        set_seed(seed)


def losses(session, steps=4):
    return [float(session.step(*samples(model="cnn"))[0]) for _ in range(steps)]


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for seed in (1, 1, 2):
        onnxtrain.set_seed(seed)
        session = open_session("cnn")
        runs.append((losses(session), session))
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert_same(runs[0][1], runs[1][1])


def test_other_units_are_dropped_in_every_step() -> None:
    module = open_module("cnn")
    data = samples(model="cnn")
    results = [module(*data)[1].tobytes() for _ in range(4)]
    assert len(set(results)) == 4


def test_training_and_fused_steps_draw_alike() -> None:
    sessions = []
    for _ in range(2):
        set_seed(11)
        sessions.append(open_session("cnn"))
    for step in range(4):
        loss = sessions[0].step(*samples(model="cnn", seed=step))[0]
        assert loss == sessions[1].train_step(*samples(model="cnn", seed=step))[0]
        sessions[1].optimizer_step()
        sessions[1].lazy_reset_grad()
    assert_same(*sessions)


def test_what_is_resumed_draws_on() -> None:
    session = open_session("cnn")
    losses(session, 3)
    again = reopened(session, "cnn")
    assert losses(session) == losses(again)
    assert session.state._training.random.saved() == again.state._training.random.saved()
    assert session.state._training.random.draws == 7


def test_evaluation_draws_nothing() -> None:
    session = open_session("cnn")
    session.eval_step(*samples(model="cnn"))
    assert session.state._training.random.draws == 0
