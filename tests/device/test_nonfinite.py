"""A step that is not finite changes nothing: training goes on as if its batch were not there."""

import io

import numpy as np
import pytest
from small_runs import assert_same, open_session, samples

from onnxtrain.api import CheckpointState
from onnxtrain.device.loop import SaveCheckpoint, evaluate, fit
from onnxtrain.device.loop.batches import loss_of
from onnxtrain.device.loop.progress import Lines
from onnxtrain.device.random_state import set_seed
from onnxtrain.errors import ArgumentError, NonFiniteError

QUIET = {"progress": False, "shuffle": False, "batch_size": 4}
MODELS = ["mlp", "cnn", "head"]


def opened(model="mlp"):
    set_seed(3)
    return open_session(model)


def everything(session) -> bytes:
    """Parameters, statistics, moments, step count, learning rate, and the random numbers' place."""
    return session.state.to_bytes(include_optimizer_state=True, allow_nonfinite=True)


def stepped(session, batch) -> float:
    return loss_of(session.step(*batch))


def batches(count, model="mlp"):
    return [samples(4, model, seed) for seed in range(count)]


def spoiled(batch, value=np.nan):
    x, y = batch
    x = x.copy()
    x[1].flat[3] = value
    return x, y


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("model", MODELS)
def test_a_fused_step(model, value) -> None:
    good = batches(4, model)
    session, other = opened(model), opened(model)
    for number, batch in enumerate(good):
        before = everything(session)
        if number in (0, 2):
            loss = stepped(session, spoiled(batch, value))
            assert not np.isfinite(loss)
            assert everything(session) == before
        assert stepped(session, batch) == stepped(other, batch)
    assert everything(session) == everything(other)
    assert session.skipped_steps == session.optimizer.skipped_steps == 2
    assert session.skipped_batches == session.module.skipped_batches == 2
    assert session.optimizer.step_count == 4


@pytest.mark.parametrize("model", MODELS)
def test_separate_steps(model) -> None:
    """A micro-batch that is not finite is not added; one that is alone makes no update."""
    good = batches(6, model)
    session, other = opened(model), opened(model)
    for number in range(0, 6, 2):
        first, second = good[number : number + 2]
        session.train_step(*spoiled(first))
        session.train_step(*first)
        session.train_step(*spoiled(second, np.inf))
        session.train_step(*second)
        for batch in (first, second):
            other.train_step(*batch)
        for each in (session, other):
            each.optimizer_step()
            each.lazy_reset_grad()
        before = everything(session)
        session.train_step(*spoiled(first))
        session.optimizer_step()  # the gradients of the last step are still in memory
        assert everything(session) == before
        session.lazy_reset_grad()
    assert everything(session) == everything(other)
    assert (session.skipped_batches, session.skipped_steps) == (9, 3)


def test_a_step_without_its_graph_keeps_what_was_accumulated() -> None:
    first, second = batches(2)
    session, other = opened(), opened()
    for each in (session, other):
        each._fused = None
        each.train_step(*first)
    session.step(*spoiled(second))
    assert session.optimizer.step_count == 0
    for each in (session, other):
        each.optimizer_step()
    assert everything(session) == everything(other)


def test_gradients_that_were_set() -> None:
    session = opened()
    session.train_step(*batches(1)[0])
    before = everything(session)
    gradient = session.state.parameters["fc1.weight"].grad
    gradient[0, 0] = np.inf
    session.optimizer_step()
    assert everything(session) == before
    gradient[0, 0] = 0
    session.optimizer_step()
    assert (session.optimizer.step_count, session.skipped_steps) == (1, 1)


def test_gradients_set_behind_a_batch_that_was_skipped() -> None:
    session = opened()
    session.train_step(*spoiled(batches(1)[0]))
    for _, parameter in session.state.parameters:
        parameter.grad = np.ones_like(parameter.data)
    session.optimizer_step()
    assert session.optimizer.step_count == 1


def test_a_gradient_alone() -> None:
    """The loss is finite, and so are all gradients except that of the first layer."""
    session = opened()
    x, y = batches(1)[0]
    weight = np.zeros((3, 16), np.float32)
    weight[0] = 1e20
    session.update_parameter("fc2.weight", weight)
    session.update_parameter("fc1.weight", np.zeros((16, 8), np.float32))
    session.update_parameter("fc1.bias", np.full(16, 1e-20, np.float32))
    before = everything(session)
    assert np.isfinite(stepped(session, (np.full_like(x, 1e20), y)))
    assert everything(session) == before
    assert session.module.training_state.not_finite[0] == "fc1.weight"
    assert session.skipped_steps == 1


def test_a_statistic_alone() -> None:
    """The variance of a batch overflows, and what is normalized with it is zero."""
    session = opened("cnn")
    x, y = batches(1, "cnn")[0]
    session.step(x, y)
    before = everything(session)
    assert np.isfinite(stepped(session, (x * np.float32(1e25), y)))
    assert everything(session) == before
    assert session.skipped_steps == 1
    assert np.isfinite(stepped(session, (x, y)))


def test_evaluation_changes_nothing() -> None:
    session = opened("cnn")
    x, y = spoiled(batches(1, "cnn")[0])
    before = everything(session)
    assert np.isnan(loss_of(session.eval_step(x, y)))
    with pytest.raises(NonFiniteError):
        evaluate(session, (x, y))
    assert everything(session) == before
    assert session.skipped_batches == 0


def test_a_learning_rate_that_explodes() -> None:
    """The steps after the one that moved the weights too far change nothing, and say so."""
    session = opened()
    session.set_learning_rate(1e37)
    x, y = samples(64)
    with pytest.raises(NonFiniteError):
        fit(session, (x, y), **QUIET, nonfinite=3)
    assert session.optimizer.step_count <= 2
    for _, parameter in session.state.parameters:
        assert np.isfinite(parameter.data).all()


# ---- fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}, {"micro_batch_size": 2}])
@pytest.mark.parametrize("model", MODELS)
def test_fit_skips(model, settings) -> None:
    good = batches(12, model)
    bad = spoiled(good[0])
    given = [bad, bad, bad, *good[:6], bad, bad, bad, *good[6:]]
    session, other = opened(model), opened(model)
    stream = io.StringIO()
    history = fit(session, given, 1, progress=Lines(stream), nonfinite="skip", **settings)
    plain = fit(other, good, 1, progress=False, **settings)
    for one in (session, other):
        one.module.training_state.private.clear()  # where in the data the run is
    if "micro_batch_size" not in settings:  # there, the good half of a batch counts
        assert everything(session) == everything(other)
        assert history.losses == plain.losses
    assert history.skipped == 6
    halves = 6 * 2 if "micro_batch_size" in settings else 0
    assert history.epochs[-1].samples == plain.epochs[-1].samples + halves
    assert "skipped: epoch 1, step 1" in stream.getvalue()
    assert "6 batches skipped: they were not finite" in stream.getvalue()
    assert "6 skipped" in repr(history)
    assert type(history).from_json(history.to_json()) == history


def test_fit_stops_by_default_with_everything_as_it_was() -> None:
    good = batches(6)
    session, other = opened(), opened()
    with pytest.raises(NonFiniteError, match="because the input 'input' has 1 elements"):
        fit(session, [*good, spoiled(good[0])], progress=False)
    fit(other, good, progress=False)
    for one in (session, other):
        one.module.training_state.private.clear()
    assert everything(session) == everything(other)


def test_a_schedule_does_not_go_on_with_skipped_steps() -> None:
    good = batches(4)
    session, other = opened(), opened()
    rates = []
    schedule = {"schedule": lambda step: rates.append(step) or 0.01 / (1 + step)}
    fit(session, [good[0], spoiled(good[0]), *good[1:]], progress=False, nonfinite=1, **schedule)
    first = list(rates)
    rates.clear()
    fit(other, good, progress=False, **schedule)
    assert first == rates
    assert session.get_parameter("fc1.weight").tobytes() == (
        other.get_parameter("fc1.weight").tobytes()
    )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_too_many_in_a_row(accumulate) -> None:
    bad = spoiled(batches(1)[0])
    session = opened()

    def forever():
        while True:
            yield bad

    before = everything(session)
    with pytest.raises(NonFiniteError, match="because the input"):
        fit(session, forever(), progress=False, nonfinite="skip", accumulate=accumulate)
    assert everything(session) == before
    assert session.skipped_batches == 11


def test_an_epoch_of_nothing_but_bad_batches() -> None:
    bad = spoiled(batches(1)[0])
    history = fit(opened(), [bad, bad], 2, progress=False, nonfinite=5)
    assert history.losses == []
    assert history.skipped == 4
    assert all(np.isnan(record.loss) for record in history.epochs)


def test_a_run_with_skips_is_resumed(tmp_path) -> None:
    good = batches(8)
    data = [spoiled(good[0]), *good[:4], spoiled(good[0]), *good[4:]]
    whole, path = opened(), tmp_path / "run"
    expected = fit(whole, data, 2, progress=False, nonfinite="skip", seed=1)
    session = opened()
    settings = {"progress": False, "nonfinite": "skip", "callbacks": SaveCheckpoint(path, 1)}
    fit(session, data, 2, max_steps=5, seed=1, **settings)
    resumed = open_session(checkpoint=path)
    history = fit(resumed, data, 2, resume=True, **settings)
    assert history.losses == expected.losses
    assert history.skipped == expected.skipped == 4
    for name, parameter in whole.state.parameters:
        assert parameter.data.tobytes() == resumed.state.parameters[name].data.tobytes()


@pytest.mark.parametrize("value", ["ignore", -1, 1.5, None])
def test_wrong_words(value) -> None:
    with pytest.raises(ArgumentError, match="nonfinite"):
        fit(opened(), batches(1), progress=False, nonfinite=value)


# ---- artifacts of earlier versions ---------------------------------------------------------------


def test_earlier_artifacts_train_as_ever() -> None:
    session, other = opened("earlier"), opened()
    assert not session.checks_finite
    assert other.checks_finite
    for batch in batches(3):
        assert stepped(session, batch) == stepped(other, batch)
        for each in (session, other):
            each.lazy_reset_grad()
            each.train_step(*batch)
            each.optimizer_step()
    assert_same(session, other)
    with pytest.raises(NonFiniteError, match="the loss is nan, because the input"):
        fit(session, [spoiled(batches(1)[0])], progress=False)
    with pytest.raises(ArgumentError, match="generate them anew"):
        fit(session, batches(1), progress=False, nonfinite="skip")


# ---- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv.weight", "bn.mean", "moment"])
def test_saving_needs_a_word(name, tmp_path) -> None:
    session = opened("cnn")
    session.step(*batches(1, "cnn")[0])
    path, model = tmp_path / "checkpoint", tmp_path / "model.onnx"
    outputs = session.output_names(training=False)[1:] or ["output"]
    session.save_checkpoint(path)
    session.export_model_for_inferencing(model, outputs)
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    is_moment = name == "moment"
    if is_moment:
        broken = next(iter(session.optimizer._moments.values()))[0].array
    else:
        broken = session.state.parameters[name].data
    broken.flat[0] = np.inf
    with pytest.raises(NonFiniteError, match=r"1 of .* nothing was saved") as caught:
        session.save_checkpoint(path)
    assert len(caught.value.parameters) == 1
    with pytest.raises(NonFiniteError):
        session.state.to_bytes(include_optimizer_state=True)
    if not is_moment:
        with pytest.raises(NonFiniteError, match="nothing was exported"):
            session.export_model_for_inferencing(model, outputs)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files
    CheckpointState.save_checkpoint(session.state, path, True, allow_nonfinite=True)
    session.export_model_for_inferencing(model, outputs, allow_nonfinite=True)
    assert path.read_bytes() != files["checkpoint"]
    if is_moment:  # which is not part of it
        session.save_checkpoint(path, include_optimizer_state=False)
