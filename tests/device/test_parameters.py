"""CheckpointState, Parameters, Parameter and Properties, as upstream has them and corrected."""

import numpy as np
import pytest
from small_runs import GOLDEN, open_session, samples

from onnxtrain.api import CheckpointState, Module, Optimizer, Parameter, Parameters, Properties
from onnxtrain.errors import CheckpointError, OnnxTrainError, StateError

FC1 = ["fc1.bias", "fc1.weight"]
FC2 = ["fc2.bias", "fc2.weight"]


def state_of(model="mlp", file="checkpoint"):
    return CheckpointState.load_checkpoint(GOLDEN / model / file)


def module_of(model="mlp", file="checkpoint"):
    state = state_of(model, file)
    folder = GOLDEN / model
    return state, Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")


# ---- CheckpointState -----------------------------------------------------------------------------


def test_a_state_is_loaded_not_made() -> None:
    with pytest.raises(TypeError, match="load_checkpoint"):
        CheckpointState("checkpoint")  # type: ignore[arg-type]
    assert isinstance(state_of().parameters, Parameters)
    assert isinstance(state_of().properties, Properties)


@pytest.mark.parametrize("form", [str, bytes, bytearray, memoryview])
def test_a_checkpoint_comes_from_a_path_or_from_memory(form) -> None:
    path = GOLDEN / "mlp" / "checkpoint"
    source = str(path) if form is str else form(path.read_bytes())
    state = CheckpointState.load_checkpoint(source)
    assert [name for name, _ in state.parameters] == FC1 + FC2


@pytest.mark.parametrize("source", ["nowhere", GOLDEN / "mlp", b"", b"ODTC", b"\0" * 64])
def test_what_is_no_checkpoint_is_a_runtime_error(source) -> None:
    with pytest.raises(CheckpointError) as caught:
        CheckpointState.load_checkpoint(source)
    assert isinstance(caught.value, OnnxTrainError) and isinstance(caught.value, RuntimeError)


def test_only_a_state_is_saved(tmp_path) -> None:
    with pytest.raises(TypeError, match="CheckpointState is saved"):
        CheckpointState.save_checkpoint({}, tmp_path / "c")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_without_the_optimizer_the_file_is_small(tmp_path) -> None:
    session = open_session()
    session.step(*samples())
    CheckpointState.save_checkpoint(session.state, tmp_path / "small")
    CheckpointState.save_checkpoint(session.state, tmp_path / "whole", include_optimizer_state=True)
    small, whole = ((tmp_path / name).stat().st_size for name in ("small", "whole"))
    numbers = session.get_parameters_size()
    assert small < 4 * numbers + 1000 and whole > small + 2 * 4 * numbers
    assert not CheckpointState.load_checkpoint(tmp_path / "small")._training.groups


def test_bytes_are_what_a_file_holds(tmp_path) -> None:
    session = open_session()
    session.step(*samples())
    session.save_checkpoint(tmp_path / "c")
    assert session.state.to_bytes(include_optimizer_state=True) == (tmp_path / "c").read_bytes()


def test_a_state_says_what_it_is() -> None:
    assert repr(state_of("head")) == (
        "CheckpointState(2 trainable and 2 other parameters, 0 properties)"
    )
    assert repr(state_of("head", "nominal_checkpoint")).startswith("CheckpointState(nominal, ")


# ---- Parameters ----------------------------------------------------------------------------------


def test_parameters_are_found_by_name_and_sorted() -> None:
    parameters = state_of("head").parameters
    assert [name for name, _ in parameters] == FC1 + FC2
    assert len(parameters) == 4
    assert "fc1.weight" in parameters and "fc3.weight" not in parameters and 3 not in parameters
    assert all(isinstance(parameter, Parameter) for _, parameter in parameters)
    assert [parameter.name for _, parameter in parameters] == FC1 + FC2
    assert [parameter.requires_grad for _, parameter in parameters] == [False] * 2 + [True] * 2


def test_a_missing_parameter_is_a_key_error() -> None:
    parameters = state_of().parameters
    with pytest.raises(KeyError, match="Parameter fc3 not found"):
        parameters["fc3"]
    with pytest.raises(KeyError, match="Parameter fc3 not found"):
        parameters["fc3"] = np.zeros(3, np.float32)


def test_parameters_say_what_they_are() -> None:
    """Upstream's repr of Parameters raised TypeError."""
    parameters = state_of("head").parameters
    assert repr(parameters) == "Parameters(fc1.bias, fc1.weight, fc2.bias, fc2.weight)"
    assert repr(parameters["fc1.bias"]) == "Parameter(name=fc1.bias, requires_grad=False)"


@pytest.mark.parametrize("name", ["name", "requires_grad"])
def test_names_and_roles_cannot_be_set(name) -> None:
    with pytest.raises(AttributeError):
        setattr(state_of().parameters["fc1.bias"], name, True)


# ---- Parameter.data ------------------------------------------------------------------------------


def test_data_is_live() -> None:
    session = open_session()
    weight = session.state.parameters["fc2.weight"]
    view, before = weight.data, weight.data.copy()
    session.step(*samples())
    assert not np.array_equal(view, before)
    assert weight.data is view
    view[:] = 0
    session.state.parameters["fc2.bias"].data[:] = [0, 1, 0]
    _, scores = session.eval_step(*samples(4))
    assert np.array_equal(scores, np.tile(np.float32([0, 1, 0]), (4, 1)))


def test_data_is_live_before_there_is_a_module() -> None:
    """Upstream crashed when a parameter was set before a Module was made."""
    state = state_of()
    state.parameters["fc2.weight"].data = np.zeros((3, 16), np.float32)
    state.parameters["fc2.bias"].data[1] = 5
    module = Module(GOLDEN / "mlp" / "training_model.onnx", state)
    _, scores = module(*samples(2))
    assert (scores[:, 1] == 5).all()


@pytest.mark.parametrize("when", ["before a Module", "after it"])
@pytest.mark.parametrize("how", ["attribute", "item"])
def test_setting_copies(when, how) -> None:
    state, _ = module_of() if when == "after it" else (state_of(), None)
    new = np.arange(48, dtype=np.float32).reshape(3, 16)
    if how == "attribute":
        state.parameters["fc2.weight"].data = new
    else:
        state.parameters["fc2.weight"] = new
    new[:] = 0
    assert np.array_equal(state.parameters["fc2.weight"].data.reshape(-1), np.arange(48))


def test_what_is_set_need_not_be_contiguous() -> None:
    state, _ = module_of()
    new = np.arange(96, dtype=np.float32).reshape(16, 6).T[::2]
    state.parameters["fc2.weight"].data = new
    assert np.array_equal(state.parameters["fc2.weight"].data, new)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((16, 3), np.float32), r"'fc2.weight' has the shape \[3, 16\], not \[16, 3\]"),
        (np.zeros((3, 16)), "'fc2.weight' is float32, not float64"),
        ([[0.0] * 16] * 3, "numpy array, not to list"),
        (1.0, "numpy array, not to float"),
    ],
    ids=["shape", "type", "list", "number"],
)
def test_what_does_not_fit_is_a_runtime_error(value, message) -> None:
    state, _ = module_of()
    before = state.parameters["fc2.weight"].data.copy()
    with pytest.raises(RuntimeError, match=message):
        state.parameters["fc2.weight"].data = value
    assert np.array_equal(state.parameters["fc2.weight"].data, before)


# ---- frozen parameters ---------------------------------------------------------------------------


def test_a_frozen_parameter_cannot_be_written_into() -> None:
    state, _ = module_of("head")
    with pytest.raises(ValueError, match="read-only"):
        state.parameters["fc1.weight"].data[0, 0] = 1


@pytest.mark.parametrize("name", ["fc1.weight", "fc1.bias"], ids=["external", "inside"])
def test_a_frozen_parameter_can_be_set(name) -> None:
    """The graphs have it as a constant: they are made anew, and compute with the new value."""
    session, other = open_session("head"), open_session("mlp")
    new = np.random.default_rng(1).normal(size=session.get_parameter(name).shape)
    data = samples(5)
    for step in ("train_step", "eval_step"):  # the sessions are there before the change
        getattr(session, step)(*data)
    session.step(*data)
    session.update_parameter(name, new.astype(np.float32))
    other.update_parameter(name, new.astype(np.float32))
    for shared in FC2:
        other.update_parameter(shared, session.get_parameter(shared))
    for step in ("train_step", "eval_step", "step"):
        ours, theirs = getattr(session, step)(*data)[1], getattr(other, step)(*data)[1]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.array_equal(session.get_parameter(name), new.astype(np.float32))


def test_setting_a_frozen_parameter_to_what_it_is_makes_nothing_anew() -> None:
    state, _ = module_of("head")
    state.parameters["fc1.weight"] = state.parameters["fc1.weight"].data.copy()
    assert state._training.frozen.version == 0
    state.parameters["fc1.weight"] = -state.parameters["fc1.weight"].data
    assert state._training.frozen.version == 1


def test_a_frozen_parameter_that_was_set_is_saved(tmp_path) -> None:
    session = open_session("head")
    session.update_parameter("fc1.weight", np.ones((16, 8), np.float32))
    session.save_checkpoint(tmp_path / "c")
    again = open_session("head", tmp_path / "c")
    assert (again.get_parameter("fc1.weight") == 1).all()
    np.testing.assert_array_equal(
        again.eval_step(*samples(3))[1], session.eval_step(*samples(3))[1]
    )


def test_a_running_statistic_is_live_and_can_be_set() -> None:
    session = open_session("cnn")
    mean = session.state.parameters["bn.mean"]
    assert not mean.requires_grad and mean.grad is None
    session.step(*samples(model="cnn"))
    view = mean.data
    assert view.any()
    mean.data = np.full(4, 7, np.float32)
    assert (view == 7).all()
    session.train_step(*samples(model="cnn"))
    assert ((view > 5) & (view < 7)).all()  # nine tenths of the old one


# ---- Parameter.grad ------------------------------------------------------------------------------


def test_there_is_no_gradient_before_a_module_and_zeros_after() -> None:
    state = state_of("head")
    assert all(parameter.grad is None for _, parameter in state.parameters)
    Module(GOLDEN / "head" / "training_model.onnx", state)
    for name, parameter in state.parameters:
        if name in FC1:
            assert parameter.grad is None
        else:
            assert parameter.grad.shape == parameter.data.shape and not parameter.grad.any()


def test_gradients_are_live_and_writable() -> None:
    state, module = module_of("head")
    optimizer = Optimizer(GOLDEN / "head" / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.5)
    bias = state.parameters["fc2.bias"]
    view, before = bias.grad, bias.data.copy()
    module(*samples())
    assert view.any()
    view[:] = [1, 2, 3]
    optimizer.step()
    np.testing.assert_allclose(bias.data, before - np.float32([0.5, 1, 1.5]), rtol=1e-6)


def test_a_gradient_can_be_set() -> None:
    state, _ = module_of("head")
    state.parameters["fc2.bias"].grad = np.ones(3, np.float32)
    assert (state.parameters["fc2.bias"].grad == 1).all()
    with pytest.raises(StateError, match="shape"):
        state.parameters["fc2.bias"].grad = np.ones(4, np.float32)
    with pytest.raises(StateError, match="no gradient"):
        state.parameters["fc1.bias"].grad = np.ones(16, np.float32)


# ---- nominal -------------------------------------------------------------------------------------


def test_a_nominal_state_has_names_and_no_values(tmp_path) -> None:
    state, _ = module_of("head", "nominal_checkpoint")
    assert len(state.parameters) == 4 and "fc1.weight" in state.parameters
    with pytest.raises(RuntimeError, match="Please load the parameter states first"):
        state.parameters["fc1.weight"]
    with pytest.raises(RuntimeError, match="Please load the parameter states first"):
        list(state.parameters)
    with pytest.raises(RuntimeError, match="Please load the parameter states first"):
        state.parameters["fc1.weight"] = np.ones((10, 10), np.float32)
    state.properties["epoch"] = 3
    CheckpointState.save_checkpoint(state, tmp_path / "again", include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(tmp_path / "again")
    assert again.nominal and dict(again.properties) == {"epoch": 3}


# ---- Properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (-1, -1), (0, 0), (1234567890, 1234567890), (-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1),
        (2**63, 2.0**63), (0.1, float(np.float32(0.1))), (-1.0, -1.0), (1e300, float("inf")),
        ("hello", "hello"), ("été ", "été "), ("", ""), (b"bytes", "bytes"), (True, 1), (False, 0),
        (np.int32(-7), -7), (np.uint64(2**63), 2.0**63), (np.int64(2**40), 2**40),
        (np.float64(0.1), float(np.float32(0.1))), (np.float16(0.5), 0.5), (np.bool_(True), 1),
        (np.array(3), 3), (np.array(2.5), 2.5), (np.str_("text"), "text"),
        # Upstream made the integer 2 of this one.
        (np.float32(2.75), 2.75),
    ],
    ids=repr,
)  # fmt: skip
def test_properties_survive_a_file(value, kept, tmp_path) -> None:
    state = state_of()
    state.properties["p"] = value
    assert state.properties["p"] == kept and type(state.properties["p"]) is type(kept)
    CheckpointState.save_checkpoint(state, tmp_path / "c")
    again = CheckpointState.load_checkpoint(tmp_path / "c").properties
    assert again["p"] == kept and type(again["p"]) is type(kept)
    assert len(again) == 1


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, TypeError), ([1], TypeError), (1j, TypeError), (np.zeros(2), TypeError),
        (10**400, ValueError), (b"\xff", ValueError), ("\ud800", ValueError),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_property_is_refused_at_once(value, error) -> None:
    properties = state_of().properties
    with pytest.raises(error, match="'p'"):
        properties["p"] = value
    assert "p" not in properties


def test_properties_are_like_a_dictionary() -> None:
    properties = state_of().properties
    properties["b"], properties["a"] = 1, "one"
    properties["b"] = "two"  # another type
    assert list(properties) == [("a", "one"), ("b", "two")] and len(properties) == 2
    assert repr(properties) == "Properties({'a': 'one', 'b': 'two'})"
    assert "a" in properties and "c" not in properties
    with pytest.raises(KeyError, match="Property c not found"):
        properties["c"]
    del properties["a"]
    assert "a" not in properties
    with pytest.raises(KeyError, match="Property a not found"):
        del properties["a"]


@pytest.mark.parametrize("name", ["", 3, "__onnxtrain__.mine", "\ud800"])
def test_names_of_properties_are_checked(name) -> None:
    with pytest.raises((TypeError, ValueError)):
        state_of().properties[name] = 1


def test_what_the_program_keeps_is_no_property_of_the_user(tmp_path) -> None:
    session = open_session("cnn", learning_rate=0.25)
    session.step(*samples(model="cnn"))
    session.state._training.private["place"] = {"epoch": 3}
    session.save_checkpoint(tmp_path / "c")
    again = open_session("cnn", tmp_path / "c")
    assert len(again.state.properties) == 0 and again.get_learning_rate() == 0.25
    assert again.state._training.private == {"place": {"epoch": 3}}


def test_what_users_see_of_a_state() -> None:
    seen = [name for name in dir(CheckpointState) if not name.startswith("_")]
    assert seen == [
        "generation", "has_parameter", "load_checkpoint", "nominal", "parameters", "properties",
        "save_checkpoint", "to_bytes",
    ]  # fmt: skip
    state = open_session().state
    assert [name for name in vars(state) if not name.startswith("_")] == []
    assert state.has_parameter("fc1.weight") and not state.has_parameter("fc9.weight")
