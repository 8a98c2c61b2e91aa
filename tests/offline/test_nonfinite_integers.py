"""Data that are not finite are not hidden by rounding: such a batch changes nothing."""

import numpy as np
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain.errors import NonFiniteError

RNG = np.random.default_rng(0)
X, LABELS = RNG.normal(size=(8, 2, 6, 6)).astype(np.float32), np.arange(8) % 3


def network():
    shapes = {"c": (4, 2, 3, 3), "d": (4, 4, 3, 3), "w": (3, 64)}
    graph = helper.make_graph(
        [
            helper.make_node("Sub", ["x", "mean"], ["centred"]),
            helper.make_node("Conv", ["centred", "c"], ["a"], name="first"),
            helper.make_node("Relu", ["a"], ["r"]),
            helper.make_node("Conv", ["r", "d"], ["b"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["b"], ["s"]),
            helper.make_node("Flatten", ["s"], ["f"]),
            helper.make_node("Gemm", ["f", "w"], ["y"], transB=1),
        ],
        "graph",
        [helper.make_tensor_value_info("x", 1, ["n", 2, 6, 6])],
        [helper.make_tensor_value_info("y", 1, ["n", 3])],
        [
            *(
                numpy_helper.from_array(RNG.normal(size=shape).astype("f4") / 5, name)
                for name, shape in shapes.items()
            ),
            numpy_helper.from_array(np.full((1, 2, 1, 1), 0.25, np.float32), "mean"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    "how", ["average", "learned", "fixed", "average,first=False", "fixed,first=False"]
)
def test_a_batch_that_is_not_finite_changes_nothing(how, tmp_path) -> None:
    name = f"int8:scales={how}"
    onnxtrain.prepare(network(), tmp_path, train=["c", "d", "w"], quantize=name, calibration=[X])
    session = onnxtrain.TrainingSession(tmp_path)
    session.step(X, LABELS)
    before = {name: np.array(parameter.data) for name, parameter in session.state.parameters}
    # In places that vector instructions treat differently.
    for count, (bad, place) in enumerate(
        [(np.nan, 0), (np.nan, 17), (np.nan, -1), (np.inf, 3), (-np.inf, 40)], start=1
    ):
        spoiled = X.copy()
        spoiled.flat[place] = bad
        loss, *_ = session.step(spoiled, LABELS)
        assert np.isnan(loss) and session.skipped_steps == count
    for name, parameter in session.state.parameters:
        np.testing.assert_array_equal(parameter.data, before[name], err_msg=name)
    spoiled = np.concatenate([X, spoiled])
    with pytest.raises(NonFiniteError, match=r"'x' has 1 elements .* in sample 8 of the data"):
        onnxtrain.fit(
            session, (spoiled, np.tile(LABELS, 2)), batch_size=4, shuffle=False, progress=False
        )


@pytest.mark.parametrize("how", ["average", "learned", "fixed"])
def test_what_becomes_nan_inside_of_a_network_is_seen(how, tmp_path) -> None:
    weights = {name: RNG.normal(size=(6, 6)).astype("f4") / 3 for name in "uvw"}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "u"], ["a"]),
            helper.make_node("Abs", ["a"], ["size"]),
            helper.make_node("Div", ["a", "size"], ["d"]),  # 0 / 0 where x is 0
            helper.make_node("Relu", ["d"], ["r"]),
            helper.make_node("MatMul", ["r", "v"], ["b"]),
            helper.make_node("Relu", ["b"], ["s"]),
            helper.make_node("MatMul", ["s", "w"], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", 1, ["n", 6])],
        [helper.make_tensor_value_info("y", 1, ["n", 6])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    given = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = RNG.normal(size=(8, 6)).astype("f4")
    name = f"int8:scales={how}"
    onnxtrain.prepare(given, tmp_path, train=["u", "v", "w"], quantize=name, calibration=[x])
    session = onnxtrain.TrainingSession(tmp_path)
    assert np.isfinite(session.step(x, LABELS)[0])
    before = {name: np.array(parameter.data) for name, parameter in session.state.parameters}
    spoiled = x.copy()
    spoiled[3] = 0
    assert np.isnan(session.step(spoiled, LABELS)[0]) and session.skipped_steps == 1
    for name, parameter in session.state.parameters:
        np.testing.assert_array_equal(parameter.data, before[name], err_msg=name)


def test_evaluation_and_floats_have_no_such_nodes(tmp_path) -> None:
    onnxtrain.prepare(network(), tmp_path / "a", quantize="int8", calibration=[X])
    onnxtrain.prepare(network(), tmp_path / "b", quantize="int4-weights")
    assert b"_of_integers" not in (tmp_path / "a" / "eval_model.onnx").read_bytes()
    for file in ("eval_model.onnx", "training_model.onnx"):
        assert b"_of_integers" not in (tmp_path / "b" / file).read_bytes()
