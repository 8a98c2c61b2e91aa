"""Numbers that are infinite or NaN end a run, are explained, and never reach a checkpoint."""

import numpy as np
import pytest
from small_runs import assert_same, open_session, parameters, samples

from onnxtrain.device.loop import CheckFinite, SaveCheckpoint, evaluate, fit
from onnxtrain.errors import NonFiniteError

QUIET = {"progress": False, "shuffle": False, "batch_size": 4}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_data(bad, accumulate, tmp_path) -> None:
    x, y = samples(40)
    x[37, 2] = x[38, 0] = bad
    path = tmp_path / "run"
    settings = {"callbacks": SaveCheckpoint(path, 2), "accumulate": accumulate}
    session = open_session()
    with pytest.raises(NonFiniteError) as caught:
        fit(session, (x, y), **QUIET, **settings)
    step = {1: 10, 3: 4}[accumulate]
    text = str(caught.value)
    assert f"epoch 1, step {step} (step {step} of the run): the loss is nan" in text
    assert "the input 'input' has 2 elements that are infinite or not a number" in text
    assert "the first in sample 37 of the data" in text
    assert f"The last good checkpoint is {path}, of step {(step - 1) // 2 * 2}." in text
    assert caught.value.step == step
    good = open_session(checkpoint=path)
    assert good.optimizer.step_count == (step - 1) // 2 * 2
    assert all(np.isfinite(value).all() for value in parameters(good).values())


def test_the_sample_of_a_batch_and_of_shuffled_data() -> None:
    x, y = samples(40)
    x[23] = np.nan
    with pytest.raises(NonFiniteError, match="the first in sample 23 of the data"):
        fit(open_session(), (x, y), progress=False, seed=1)
    with pytest.raises(NonFiniteError, match="the first in sample 3 of the batch"):
        fit(open_session(), [(x[:20], y[:20]), (x[20:], y[20:])], progress=False)


def test_a_label_that_is_no_class() -> None:
    x, y = samples(40)
    y[9] = 7
    with pytest.raises(NonFiniteError) as caught:
        fit(open_session(), (x, y), **QUIET)
    text = str(caught.value)
    assert "epoch 1, step 3 (step 3 of the run): the loss is nan, and the data" in text
    assert "('labels' is from 0 to 7 in this batch): one that is no class" in text
    assert text.endswith("No checkpoint was saved: callbacks=[SaveCheckpoint(path)] keeps one.")
    assert caught.value.message == text.partition(" No checkpoint was saved")[0]
    assert "The last losses were" in text
    # They are looked at after each step, so there is no doubt about the step.
    assert "were finite after" not in text


class Spoil:
    """Makes a parameter not a number after a step."""

    def __init__(self, step, name="fc1.weight") -> None:
        self.step, self.name = step, name

    def on_step_end(self, run) -> None:
        if run.step == self.step:
            run.session.state.parameters[self.name].data.flat[5] = np.nan


def test_a_parameter_before_a_checkpoint(tmp_path) -> None:
    path = tmp_path / "run"
    session = open_session()
    with pytest.raises(NonFiniteError) as caught:
        # The epoch ends with step 10, so that no other step notices.
        fit(session, samples(40), **QUIET, epochs=1,
            callbacks=[SaveCheckpoint(path, 3), Spoil(10)])  # fmt: skip
    assert "'fc1.weight' has 1 of 128 elements" in str(caught.value)
    assert caught.value.parameters == ("fc1.weight",)
    assert open_session(checkpoint=path).optimizer.step_count == 9


def test_an_update_that_overflows() -> None:
    session = open_session("head", learning_rate=1e30)
    x, y = samples(40)
    with pytest.raises(NonFiniteError) as caught:
        fit(session, (x * np.float32(1e15), y), **QUIET)
    text = str(caught.value)
    assert "epoch 1, step 1 (step 1 of the run): the loss is finite, but after the step" in text
    assert "'fc2.weight' has" in text
    assert "lower the learning rate (1e+30)" in text
    assert "fc2.weight" in caught.value.parameters


def test_a_gradient_that_overflows_is_not_used() -> None:
    session = open_session("head")
    session.update_parameter("fc2.weight", np.zeros((3, 16), np.float32))
    weight = session.get_parameter("fc1.weight").astype(np.float64)
    # The same class in all samples: the gradients of the batches add up.
    row = weight[0] * 1e38 / np.square(weight).sum(axis=1).max()
    x = np.repeat(row[None].astype(np.float32), 400, axis=0)
    y = np.zeros(400, np.int64)
    before = parameters(session)
    with pytest.raises(NonFiniteError) as caught:
        fit(session, (x, y), **QUIET, accumulate=100)
    text = str(caught.value)
    assert "the loss is finite, but the gradient of 'fc2.weight' has" in text
    assert "The parameters were not updated" in text
    for name, value in parameters(session).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_moment_that_would_overflow(tmp_path) -> None:
    x, y = samples(8)
    path = tmp_path / "run"
    session = open_session()
    before = session.state.to_bytes(include_optimizer_state=True)
    with pytest.raises(NonFiniteError) as caught:
        fit(session, (x * np.float32(1e25), y), **QUIET, callbacks=SaveCheckpoint(path))
    text = str(caught.value)
    assert "the gradient of 'fc1.weight', 'fc2.weight' is infinite or not a number, or too" in text
    assert "Nothing was updated" in text
    assert caught.value.parameters == ("fc1.weight", "fc2.weight")
    assert not path.exists()
    assert session.state.to_bytes(include_optimizer_state=True) == before


def test_control_c_does_not_save_what_is_broken(tmp_path) -> None:
    path = tmp_path / "run"

    class Break(Spoil):
        def on_step_end(self, run) -> None:
            super().on_step_end(run)
            if run.step == self.step:
                raise KeyboardInterrupt

    with pytest.raises(NonFiniteError, match=r"fc1\.weight"):
        fit(open_session(), samples(40), **QUIET, callbacks=[SaveCheckpoint(path), Break(2)])
    assert not path.exists()


def test_rarer_looks_say_since_when() -> None:
    session = open_session()
    with pytest.raises(NonFiniteError) as caught:
        fit(session, samples(40), **QUIET, callbacks=[CheckFinite(every=3), Spoil(4)])
    text = str(caught.value)
    assert "step 5 (step 5 of the run): the loss is nan, and the data of the batch" in text
    assert "The parameters were finite after step 3; callbacks=[CheckFinite()] looks" in text


def test_looking_changes_nothing() -> None:
    one, other = open_session(), open_session()
    fit(one, samples(40), **QUIET)
    fit(other, samples(40), **QUIET, callbacks=CheckFinite(every=1000))
    assert_same(one, other)


def test_large_numbers_are_finite() -> None:
    session = open_session()
    session.update_parameter("fc2.bias", np.full(3, 1e30, np.float32))
    history = fit(session, samples(40), **QUIET)
    assert len(history.losses) == 10


def test_evaluation() -> None:
    x, y = samples(40)
    x[30] = np.nan
    with pytest.raises(NonFiniteError, match="evaluation, batch 8: the loss is nan"):
        evaluate(open_session(), (x, y), batch_size=4)
    with pytest.raises(NonFiniteError, match="evaluation, batch 8"):
        fit(open_session(), samples(40), validation=(x, y), **QUIET)
