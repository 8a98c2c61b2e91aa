"""Losses of shape [1], models with a fixed batch, and data of wider types than the model takes."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain.errors import ArgumentError, InputError, NotDifferentiableError

RNG = np.random.default_rng(1)
WEIGHT = RNG.normal(size=(4, 3)).astype(np.float32)
X = RNG.normal(size=(24, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, 24)


def linear(batch="N"):
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [value("x", onnx.TensorProto.FLOAT, [batch, 4])],
        [value("y", onnx.TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def session_of(folder, batch="N", loss="cross_entropy"):
    onnxtrain.prepare(linear(batch), folder, loss=loss, optimizer="sgd")
    session = onnxtrain.TrainingSession(folder)
    session.set_learning_rate(0.1)
    return session


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"micro_batch_size": 3}], ids=str)
def test_a_loss_of_one_element_has_any_shape(shape, settings, tmp_path) -> None:
    model = linear()
    value, node = helper.make_tensor_value_info, helper.make_node
    model.graph.input.append(value("target", onnx.TensorProto.FLOAT, ["N", 3]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), "shape"))
    model.graph.node.extend(
        [
            node("Sub", ["y", "target"], ["difference"]),
            node("Abs", ["difference"], ["distance"]),
            node("ReduceMean", ["distance"], ["mean"], keepdims=0),
            node("Reshape", ["mean", "shape"], ["loss"]),
        ]
    )
    model.graph.output.insert(0, value("loss", onnx.TensorProto.FLOAT, shape))
    onnxtrain.prepare(model, tmp_path, loss=None, of="loss", outputs="y", optimizer="sgd")
    session = onnxtrain.TrainingSession(tmp_path)
    target = np.zeros((24, 3), np.float32)
    expected = np.abs(X @ WEIGHT).mean()
    found = onnxtrain.evaluate(session, (X, target), "mae")
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)
    history = onnxtrain.fit(
        session, (X, target), 2, batch_size=24, validation=(X, target), progress=False, **settings
    )
    assert history.losses[0] == pytest.approx(expected, rel=1e-5)
    assert isinstance(history.losses[0], float)


def test_a_loss_of_more_elements_is_refused(tmp_path) -> None:
    with pytest.raises(NotDifferentiableError, match=r"has the shape \[N\]"):
        session_of(tmp_path, loss=onnxtrain.losses.CrossEntropy(reduction="none"))
    session = session_of(tmp_path)
    session.step = lambda *batch: np.zeros(4, np.float32)  # graphs of another program
    with pytest.raises(ArgumentError, match=r"the loss has the shape \[4\].*reduction='mean'"):
        onnxtrain.fit(session, (X, LABELS), progress=False)


def test_a_fixed_batch_says_what_to_pass(tmp_path) -> None:
    fixed, free = session_of(tmp_path / "fixed", 1), session_of(tmp_path / "free")
    with pytest.raises(InputError, match=r"pass batch_size=1 .and accumulate=8 to fit."):
        onnxtrain.fit(fixed, (X, LABELS), batch_size=8, progress=False)
    settings = {"shuffle": False, "progress": False}
    onnxtrain.fit(
        fixed, (X, LABELS), batch_size=1, accumulate=8, validation=(X, LABELS), **settings
    )
    onnxtrain.fit(free, (X, LABELS), batch_size=8, **settings)
    np.testing.assert_allclose(fixed.get_parameter("w"), free.get_parameter("w"), rtol=1e-5)
    five = session_of(tmp_path / "five", 5)
    with pytest.raises(InputError, match=r"pass batch_size=5 .and drop_last=True to fit."):
        onnxtrain.fit(five, (X, LABELS), batch_size=5, progress=False)


# ---- types -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["arrays", "batches", "memory map"])
def test_float64_is_rounded_with_a_word(kind, tmp_path, capfd) -> None:
    wide = RNG.normal(size=(24, 4))
    expected = session_of(tmp_path / "a")
    settings = {"batch_size": 8, "shuffle": False}
    narrow = (wide.astype(np.float32), LABELS)
    onnxtrain.fit(expected, narrow, 2, validation=narrow, progress="lines", **settings)
    assert "float64" not in capfd.readouterr().err
    labels = LABELS.astype(np.int32)
    data = (wide, labels)
    if kind == "memory map":
        np.save(tmp_path / "wide.npy", wide)
        data = (np.load(tmp_path / "wide.npy", mmap_mode="r"), labels)
    if kind == "batches":
        data = [(wide[i : i + 8], labels[i : i + 8]) for i in range(0, 24, 8)]
    session = session_of(tmp_path / "b")
    onnxtrain.fit(session, data, 2, validation=data, progress="lines", **settings)
    np.testing.assert_array_equal(session.get_parameter("w"), expected.get_parameter("w"))
    assert capfd.readouterr().err.count("'x' is given as float64 and rounded to float") == 1


@pytest.mark.parametrize(
    ("value", "becomes"), [(1e300, "inf"), (2.0**24 + 1, "16777216"), (1e-60, "0.0")]
)
def test_what_would_be_lost_is_refused(value, becomes, tmp_path) -> None:
    wide = X.astype(np.float64)
    wide[3, 2] = value
    session = session_of(tmp_path)
    before = session.get_parameter("w")
    with pytest.raises(InputError, match=rf"would become .*{becomes}.*astype\('float32'\)"):
        onnxtrain.fit(session, (wide, LABELS), shuffle=False, progress=False)
    np.testing.assert_array_equal(session.get_parameter("w"), before)
    with pytest.raises(InputError, match="'labels' is int64, but the array is float64"):
        onnxtrain.fit(session, (X, LABELS + 0.5), progress=False)
