"""Models that the golden folders do not have, trained on the device: odd inputs, chance, types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from graphs import model, value
from onnxtrain import artifacts, onnxblock
from onnxtrain.api import CheckpointState, Module, Optimizer, TrainingSession
from onnxtrain.device.random_state import set_seed
from onnxtrain.errors import ArgumentError, InputError, RunError, StateError

node = helper.make_node
RNG = np.random.default_rng(0)


def made(folder: Path, nodes: list, inputs: list, initializers: dict, **options) -> TrainingSession:
    """A session of a small model whose first output is its loss."""
    outputs = [value("loss", [], options.pop("kind", TensorProto.FLOAT))]
    artifacts.generate_artifacts(
        model(nodes, inputs, outputs, initializers),
        optimizer=options.pop("optimizer", onnxblock.optim.SGD()),
        artifact_directory=folder,
        **options,
    )
    return TrainingSession.from_folder(folder)


def pair(folder: Path) -> list[TrainingSession]:
    """Two sessions that draw the same random numbers."""
    sessions = []
    for _ in range(2):
        set_seed(5)
        sessions.append(TrainingSession.from_folder(folder))
    return sessions


def weights(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


# ---- gradients of inputs -------------------------------------------------------------------------


@pytest.fixture
def with_input_gradient(tmp_path) -> TrainingSession:
    """loss = sum(x·w)², with the gradients of x and w."""
    return made(
        tmp_path,
        [
            node("MatMul", ["x", "w"], ["y"]),
            node("Mul", ["y", "y"], ["yy"]),
            node("ReduceSum", ["yy"], ["loss"], keepdims=0),
        ],
        [value("x", ["N", 3])],
        {"w": weights(3, 2)},
        requires_grad=["w", "x"],
    )


def test_gradients_of_inputs(with_input_gradient) -> None:
    module = with_input_gradient.module
    w = with_input_gradient.get_parameter("w")
    assert module.input_gradients == {}
    total = 0
    for count in (1, 2):
        x = RNG.normal(size=(4, 3)).astype(np.float32)
        module(x)
        total = total + 2 * x @ w @ w.T
        found = module.input_gradients
        assert found.keys() == {"x"}
        np.testing.assert_allclose(found["x"], total, rtol=1e-5, err_msg=f"call {count}")
    module.lazy_reset_grad()
    module(x)
    np.testing.assert_allclose(module.input_gradients["x"], 2 * x @ w @ w.T, rtol=1e-5)
    # A batch of another size begins anew.
    module(x[:2])
    np.testing.assert_allclose(module.input_gradients["x"], 2 * x[:2] @ w @ w.T, rtol=1e-5)


def test_an_input_with_a_gradient_is_no_parameter(with_input_gradient) -> None:
    session = with_input_gradient
    assert [name for name, _ in session.state.parameters] == ["w"]
    assert session.input_names() == ["x"] and session.output_names() == ["loss"]
    assert session.get_parameters_size() == 6
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    before = session.get_parameter("w")
    session.train_step(x)
    session.optimizer_step()
    assert not np.array_equal(session.get_parameter("w"), before)


# ---- strings -------------------------------------------------------------------------------------


@pytest.fixture
def of_strings(tmp_path) -> Path:
    """A classifier of numbers that are given as texts."""
    artifacts.generate_artifacts(
        model(
            [
                node("Cast", ["text", ], ["x"], to=TensorProto.FLOAT),
                node("Gemm", ["x", "w", "b"], ["y"]),
            ],
            [value("text", ["N", 4], TensorProto.STRING)],
            [value("y", ["N", 2])],
            {"w": weights(4, 2), "b": weights(2)},
        ),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path,
        additional_output_names=["y"],
    )  # fmt: skip
    return tmp_path


NUMBERS = np.array([[1.0, 2.0, 3.0, 4.0], [-1.5, 0.25, 1e3, 0.0]])
TEXTS = np.array([["1.0", "2.0", "3.0", "4.0"], ["-1.5", "0.25", "1e3", "0"]])


@pytest.mark.parametrize(
    "form", [TEXTS, TEXTS.astype(object), TEXTS.tolist()], ids=["U", "O", "list"]
)
def test_inputs_may_be_strings(of_strings, form) -> None:
    session = TrainingSession.from_folder(of_strings)
    labels = np.array([0, 1])
    w, b = session.get_parameter("w"), session.get_parameter("b")
    loss, scores = session.train_step(form, labels)
    np.testing.assert_allclose(scores, NUMBERS @ w + b, rtol=1e-5)
    assert session.state.parameters["w"].grad.any()
    first = session.eval_step(form, labels)[0]
    assert first == pytest.approx(float(loss))
    session.optimizer_step()
    for _ in range(5):
        session.step(form, labels)
    assert session.eval_step(form, labels)[0] < first
    assert session.optimizer.step_count == 6


def test_fused_steps_on_strings_are_separate_steps(of_strings) -> None:
    fused, apart = pair(of_strings)
    for _ in range(3):
        apart.train_step(TEXTS, [0, 1])
        apart.optimizer_step()
        apart.lazy_reset_grad()
        fused.step(TEXTS, [0, 1])
    assert fused.state.to_bytes(True) == apart.state.to_bytes(True)


@pytest.mark.parametrize("value_", [NUMBERS, [[1, 2, 3, 4]] * 2, np.array([[None] * 4] * 2), None])
def test_what_is_no_string_is_refused(of_strings, value_) -> None:
    session = TrainingSession.from_folder(of_strings)
    with pytest.raises(InputError, match="'text' takes strings"):
        session.step(value_, [0, 1])


# ---- chance --------------------------------------------------------------------------------------


@pytest.fixture
def of_chance(tmp_path) -> Path:
    """Three Dropouts and noise, in layers that train."""
    nodes = [
        node("RandomNormalLike", ["x"], ["noise"], scale=0.1),
        node("Add", ["x", "noise"], ["h0"]),
    ]
    for k in range(3):
        nodes.append(node("Dropout", [f"h{k}", "ratio", "training"], [f"d{k}"]))
        nodes.append(node("MatMul", [f"d{k}", f"w{k}"], [f"m{k}"]))
        nodes.append(node("Tanh", [f"m{k}"], [f"h{k + 1}"]))
    nodes.append(node("ReduceMean", ["h3"], ["loss"], keepdims=0))
    made(
        tmp_path,
        nodes,
        [value("x", ["N", 6])],
        {
            **{f"w{k}": weights(6, 6) for k in range(3)},
            "ratio": np.float32(0.3),
            "training": np.array(True),
        },
        optimizer=onnxblock.optim.AdamW(),
        additional_output_names=["d0", "d1", "d2", "noise"],
    )
    return tmp_path


def test_fused_steps_draw_as_separate_ones(of_chance) -> None:
    x = np.ones((50, 6), np.float32)
    fused, apart = pair(of_chance)
    drawn = []
    for _ in range(4):
        results = fused.step(x)
        for ours, theirs in zip(results, apart.train_step(x), strict=True):
            assert np.array_equal(ours, theirs)
        apart.optimizer_step()
        apart.lazy_reset_grad()
        drawn.append([r != 0 for r in results[1:4]])
    assert fused.state.to_bytes(True) == apart.state.to_bytes(True)
    masks = np.array(drawn).reshape(12, -1)  # four steps of three nodes
    assert len({mask.tobytes() for mask in masks}) == 12
    np.testing.assert_allclose(masks.mean(), 0.7, atol=0.03)
    correlation = np.corrcoef(masks) - np.eye(12)
    assert np.abs(correlation).max() < 0.25  # 4.3 standard deviations of 300 numbers


def test_evaluation_has_no_dropout_but_what_the_model_draws_itself(of_chance) -> None:
    session = TrainingSession.from_folder(of_chance)
    x = np.ones((50, 6), np.float32)
    d0, noise = session.eval_step(x)[1], session.eval_step(x)[4]
    assert (d0 != 0).all() and noise.std() == pytest.approx(0.1, rel=0.2)


def test_a_word_that_is_not_in_the_table(tmp_path) -> None:
    """The run fails before there is a gradient, so nothing is updated, and nothing drawn."""
    made(
        tmp_path,
        [
            node("Gather", ["table", "x"], ["rows"]),
            node("Dropout", ["rows", "ratio", "training"], ["kept"]),
            node("ReduceMean", ["kept"], ["loss"], keepdims=0),
        ],
        [value("x", ["N"], TensorProto.INT64)],
        {
            "table": weights(10, 4),
            "ratio": np.float32(0.5),
            "training": np.array(True),
        },
        optimizer=onnxblock.optim.AdamW(),
    )
    session, untroubled = pair(tmp_path)
    for one in (session, untroubled):
        one.step([1, 2, 3])
    before = session.state.to_bytes(True)
    for step in (session.step, session.train_step, session.eval_step):
        with pytest.raises(RunError, match="out of data bounds"):
            step([1, 10, 3])
    assert session.state.to_bytes(True) == before
    assert session.step([4, 5]) == untroubled.step([4, 5])
    assert session.state.to_bytes(True) == untroubled.state.to_bytes(True)


# ---- types and shapes ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_parameters_of_other_types(dtype, tmp_path) -> None:
    kind = {np.float64: TensorProto.DOUBLE, np.float16: TensorProto.FLOAT16}[dtype]
    session = made(
        tmp_path,
        [
            node("MatMul", ["x", "w"], ["y"]),
            node("Mul", ["y", "y"], ["yy"]),
            node("ReduceMean", ["yy"], ["loss"], keepdims=0),
        ],
        [value("x", ["N", 3], kind)],
        {"w": weights(3, 2, dtype=dtype)},
        optimizer=onnxblock.optim.AdamW(),
        kind=kind,
    )
    session.set_learning_rate(0.01)
    x = np.ones((4, 3), np.float32)  # converted, as nothing is lost
    losses = [float(session.step(x)) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert session.get_parameter("w").dtype == dtype
    again = TrainingSession.from_folder(tmp_path, checkpoint=session.state.to_bytes(True))
    assert again.step(x) == session.step(x)
    assert again.state.to_bytes(True) == session.state.to_bytes(True)
    with pytest.raises(StateError, match="only float32 goes into a buffer"):
        session.to_buffer()


def test_a_parameter_that_is_a_single_number(tmp_path) -> None:
    session = made(
        tmp_path,
        [
            node("Mul", ["x", "w"], ["y"]),
            node("Mul", ["y", "y"], ["yy"]),
            node("ReduceMean", ["yy"], ["loss"], keepdims=0),
        ],
        [value("x", ["N"])],
        {"w": np.array(3, np.float32)},
        requires_grad=["w"],
        nominal_checkpoint=True,
    )
    session.set_learning_rate(0.1)
    session.step([1.0, 1.0])
    assert session.get_parameter("w") == pytest.approx(3 - 0.1 * 6)
    session.state.parameters["w"].data[...] = 2
    assert session.eval_step([1.0]) == 4
    buffer = session.to_buffer()
    nominal = TrainingSession(tmp_path / "nominal_checkpoint", tmp_path / "training_model.onnx")
    assert nominal.get_parameters_size() == 1
    nominal.from_buffer(buffer, trainable_only=False)
    assert nominal.get_parameter("w") == 2


def test_a_loss_of_one_element_and_inputs_named_as_arguments(tmp_path) -> None:
    artifacts.generate_artifacts(
        model(
            [node("Mul", ["self", "w"], ["y"]), node("ReduceSum", ["y"], ["loss"], keepdims=1)],
            [value("self", [3])],
            [value("loss", [1])],
            {"w": weights(3)},
        ),
        optimizer=onnxblock.optim.SGD(),
        artifact_directory=tmp_path,
    )
    session = TrainingSession.from_folder(tmp_path)
    loss = session.step({"self": np.ones(3, np.float32)})
    assert loss.shape == (1,)
    with pytest.raises(ArgumentError, match="begin with one symbolic dimension"):
        TrainingSession.from_folder(tmp_path, batch_size=3)


def test_a_large_parameter_is_updated_in_pieces(tmp_path) -> None:
    """Of more than half a million numbers; then outputs have another shape than the parameter."""
    made(
        tmp_path,
        [
            node("Gather", ["table", "x"], ["rows"]),
            node("Mul", ["rows", "rows"], ["squares"]),
            node("ReduceSum", ["squares"], ["loss"], keepdims=0),
        ],
        [value("x", ["N"], TensorProto.INT64)],
        {"table": weights(1024, 1024)},
        optimizer=onnxblock.optim.SGD(momentum=0.9),
    )
    session, apart = pair(tmp_path)
    table = session.get_parameter("table")
    rows = np.array([3, 900, 3])
    for one in (session, apart):
        one.set_learning_rate(0.25)
    for _ in range(3):
        session.step(rows)
        apart.train_step(rows)
        apart.optimizer_step()
        apart.lazy_reset_grad()
    assert session.state.to_bytes(True) == apart.state.to_bytes(True)
    changed = np.flatnonzero((session.get_parameter("table") != table).any(1))
    assert changed.tolist() == [3, 900]
    again = TrainingSession.from_folder(tmp_path, checkpoint=session.state.to_bytes(True))
    assert again.step(rows) == session.step(rows)


def test_outputs_whose_names_end_as_those_of_gradients(tmp_path) -> None:
    """Upstream hid outputs and inputs whose names end in `_grad`."""
    artifacts.generate_artifacts(
        model(
            [
                node("Mul", ["x_grad", "w"], ["y_grad"]),
                node("ReduceSum", ["y_grad"], ["loss"], keepdims=0),
            ],
            [value("x_grad", ["N", 2])],
            [value("loss", [])],
            {"w": weights(2)},
        ),
        optimizer=onnxblock.optim.SGD(),
        artifact_directory=tmp_path,
        additional_output_names=["y_grad"],
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    Optimizer(tmp_path / "optimizer_model.onnx", module)
    assert module.input_names() == ["x_grad"] and module.output_names() == ["loss", "y_grad"]
    x = np.ones((3, 2), np.float32)
    assert np.array_equal(module(x)[1], x * state.parameters["w"].data)
