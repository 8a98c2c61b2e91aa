"""Sessions in C++: the losses of Python, and the same checkpoints."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_runs import GOLDEN, open_session, samples
from upstream_table import Host, OrtError, Session, State

from onnxtrain.errors import OnnxTrainError

MODELS = ["mlp", "cnn", "head", "int8"]


@pytest.fixture
def sessions(host: Host) -> Iterator[list[Session]]:
    """Sessions that are closed after the test."""
    opened: list[Session] = []
    yield opened
    for session in opened:
        session.close()


def opened(host, sessions, model="mlp", checkpoint=None, fused=True):
    sessions.append(Session(host, GOLDEN / model, checkpoint, fused))
    return sessions[-1]


def assert_same_states(ours, theirs, folder: Path) -> None:
    """Both are saved, to the same bytes."""
    ours.state.save(folder / "cpp", True)
    theirs.state.save_checkpoint(theirs.state, folder / "python", True)
    assert (folder / "cpp").read_bytes() == (folder / "python").read_bytes()


def first(result):
    """The loss, where Python returns further outputs too."""
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_losses_and_checkpoints_are_pythons(host, sessions, tmp_path, model, fused) -> None:
    ours, theirs = opened(host, sessions, model, fused=fused), open_session(model)
    for session in (ours, theirs):
        session.set_learning_rate(0.05)
    for index in range(10):
        data = samples(16, model, seed=index)
        if fused:
            losses = [first(session.step(*data)) for session in (ours, theirs)]
        else:
            losses = [first(session.train_step(*data)) for session in (ours, theirs)]
            for session in (ours, theirs):
                session.optimizer_step()
                session.lazy_reset_grad()
        assert abs(losses[0] - losses[1]) <= 1e-6
        assert abs(ours.eval_step(*data) - first(theirs.eval_step(*data))) <= 1e-6
    assert_same_states(ours, theirs, tmp_path)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_on_in_the_other_language(host, sessions, tmp_path, model) -> None:
    whole = open_session(model)
    path = tmp_path / "state"
    open_session(model).save_checkpoint(path, include_optimizer_state=True)
    for index in range(6):
        data = samples(16, model, seed=index)
        whole.step(*data)
        if index % 2:
            session = open_session(model, path)
            session.step(*data)
            session.save_checkpoint(path, include_optimizer_state=True)
        else:
            own = opened(host, sessions, model, path)
            own.step(*data)
            own.state.save(path, True)
    whole.save_checkpoint(tmp_path / "whole", include_optimizer_state=True)
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_gradients_accumulate(host, sessions, tmp_path) -> None:
    ours, theirs = opened(host, sessions, fused=False), open_session()
    for session in (ours, theirs):
        for index in range(6):
            session.train_step(*samples(8, seed=index))
            if index % 3 == 2:
                session.optimizer_step()
                session.lazy_reset_grad()
    assert_same_states(ours, theirs, tmp_path)


def test_a_step_leaves_accumulated_gradients_alone(host, sessions, tmp_path) -> None:
    ours, theirs = opened(host, sessions, fused=False), open_session()
    for session in (ours, theirs):
        session.train_step(*samples(8, seed=1))
        session.step(*samples(8, seed=2))
        session.train_step(*samples(8, seed=3))
        session.optimizer_step()
    assert_same_states(ours, theirs, tmp_path)


def test_a_batch_that_is_not_finite_changes_nothing(host, sessions, tmp_path) -> None:
    bad = samples(8)
    bad[0][0, 0] = np.nan
    for fused in (True, False):
        ours, theirs = opened(host, sessions, fused=fused), open_session()
        for session in (ours, theirs):
            session.step(*samples(8))
            session.step(*bad)
            session.train_step(*bad)
            session.optimizer_step()
            session.step(*samples(8, seed=1))
        assert_same_states(ours, theirs, tmp_path)


def test_the_linear_schedule(host, sessions, tmp_path) -> None:
    ours, theirs = opened(host, sessions), open_session()
    rates, rate = [], float(np.float32(0.1))  # the interface in C has floats of 32 bits
    for session in (ours, theirs):
        session.register_linear_lr_scheduler(2, 8, rate)
        rates.append([session.get_learning_rate()])
        for index in range(10):
            session.step(*samples(8, seed=index))
            session.scheduler_step()
            rates[-1].append(session.get_learning_rate())
    assert rates[0] == rates[1]
    assert_same_states(ours, theirs, tmp_path)
    resumed = opened(host, sessions, checkpoint=tmp_path / "python")
    resumed.register_linear_lr_scheduler(2, 8, rate)
    assert resumed.get_learning_rate() == theirs.get_learning_rate()
    assert_same_states(resumed, theirs, tmp_path)


def test_parameters_properties_and_names(host, sessions, tmp_path) -> None:
    ours, theirs = opened(host, sessions, "cnn"), open_session("cnn")
    for only in (True, False):
        assert ours.parameters_size(only) == theirs.get_parameters_size(only)
        held = theirs.to_buffer(only)
        expected = held.numpy().copy()
        np.testing.assert_array_equal(ours.to_buffer(only), expected)
        for session in (ours, theirs):
            session.from_buffer(expected + np.float32(0.5), only)
    name = theirs.state._training.trainable_names()[0]
    value = theirs.get_parameter(name)
    np.testing.assert_array_equal(ours.state.get_parameter(name), value)
    ours.state.update_parameter(name, value * 2)
    theirs.update_parameter(name, value * 2)
    for key, item in (("epoch", 3), ("loss", 0.25), ("name", "trié")):
        ours.state.add_property(key, item)
        theirs.add_property(key, item)
        assert ours.state.get_property(key) == item
    assert ours.names("TrainingModelInput") == theirs.module.input_names()
    assert ours.names("TrainingModelOutput") == theirs.module.output_names()
    assert ours.names("EvalModelInput") == theirs.module.eval().input_names()
    assert_same_states(ours, theirs, tmp_path)
    data = samples(8, "cnn")
    assert abs(ours.step(*data) - first(theirs.step(*data))) < 1e-6


def test_labels_of_32_bits(host, sessions) -> None:
    inputs, labels = samples(8)
    ours = opened(host, sessions)
    assert ours.eval_step(inputs, labels.astype(np.int32)) == ours.eval_step(inputs, labels)


def test_a_nominal_state_is_completed(host, sessions) -> None:
    full = opened(host, sessions)
    nominal = opened(host, sessions, checkpoint=GOLDEN / "mlp" / "nominal_checkpoint")
    with pytest.raises(OrtError, match="nominal"):
        nominal.step(*samples(8))
    nominal.from_buffer(full.to_buffer(False), False)
    assert nominal.step(*samples(8)) == full.step(*samples(8))


INPUTS, LABELS = samples(8)
WRONG_INPUTS = [
    (),
    (INPUTS,),
    (INPUTS.astype(np.float64), LABELS),
    (INPUTS[:, :5].copy(), LABELS),
    (INPUTS, samples(9)[1]),
    (INPUTS[:0], LABELS[:0]),
]


@pytest.mark.parametrize("arrays", WRONG_INPUTS)
def test_wrong_inputs_are_refused(host, sessions, arrays) -> None:
    import onnxruntime as ort

    given = [ort.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    with pytest.raises(OnnxTrainError) as expected:
        open_session().step(*given)
    with pytest.raises(OrtError) as found:
        opened(host, sessions).step(*arrays)
    assert found.value.args[1] == str(expected.value)


def test_graphs_and_checkpoints_that_do_not_belong_together(host) -> None:
    for path in sorted((GOLDEN / "hostile" / "checkpoints").iterdir()):
        if path.suffix:
            continue
        message = None
        try:
            open_session("mlp", path).register_linear_lr_scheduler(1, 10, 0.1)
        except OnnxTrainError as error:
            message = str(error)
        try:
            session = Session(host, GOLDEN / "mlp", path)
        except OrtError as error:
            assert error.args[1] == message, path
            continue
        try:
            session.register_linear_lr_scheduler(1, 10, 0.1)
            assert message is None, path
        except OrtError as error:
            assert error.args[1] == message, path
        session.close()


def test_states_from_memory(host) -> None:
    data = (GOLDEN / "mlp" / "checkpoint").read_bytes()
    state = State(host, data)
    name = open_session().state._training.trainable_names()[0]
    np.testing.assert_array_equal(state.get_parameter(name), open_session().get_parameter(name))
    state.close()
    with pytest.raises(OrtError, match="the file ends after 3 bytes"):
        State(host, b"abc")


def test_the_slot_of_the_table_is_filled(host) -> None:
    own = host.own.onnxtrain_install_table
    own.restype, own.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    assert own(host.api, 8 * 100) is None
    table = ctypes.cast(own(host.api, 8 * 280), ctypes.POINTER(ctypes.c_void_p))
    get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(table[219])
    assert get(19) == host.own.onnxtrain_training_api(host.api)
    assert table[0] == ctypes.cast(host.api, ctypes.POINTER(ctypes.c_void_p))[0]
