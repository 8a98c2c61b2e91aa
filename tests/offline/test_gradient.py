"""The public function `onnxtrain.gradient`."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from gradcheck import check_emitted, run
from graphs import linear, model, value


def expected_of_linear(x: np.ndarray) -> dict[str, np.ndarray]:
    w, b = (numpy_helper.to_array(t) for t in linear().graph.initializer)
    h = x @ w + b
    dh = np.where(h > 0, 1.0 / h.size, 0.0).astype(np.float32)
    return {
        "loss": np.maximum(h, 0).mean(), "w_grad": x.T @ dh, "b_grad": dh.sum(0),
        "x_grad": dh @ w.T, "h_grad": dh,
    }  # fmt: skip


def run_named(extended: onnx.ModelProto, feeds: dict) -> dict[str, np.ndarray]:
    return dict(zip([o.name for o in extended.graph.output], run(extended, feeds), strict=True))


@pytest.mark.parametrize("batch", [1, 4])
def test_of_inputs_initializers_and_values_in_between(batch: int) -> None:
    names = ["w", "x", "h", "b"]
    extended = onnxtrain.gradient(linear(), names)
    check_emitted(extended)
    outputs = [o.name for o in extended.graph.output]
    assert outputs == ["loss", "y", "w_grad", "x_grad", "h_grad", "b_grad"]
    assert [i.name for i in extended.graph.input] == ["x"], "initializers stay initializers"
    x = np.random.default_rng(batch).standard_normal((batch, 3)).astype(np.float32)
    actual = run_named(extended, {"x": x})
    for name, wanted in expected_of_linear(x).items():
        np.testing.assert_allclose(actual[name], wanted, rtol=1e-5, atol=1e-7, err_msg=name)


def test_an_output_that_is_no_scalar_gains_a_cotangent() -> None:
    extended = onnxtrain.gradient(linear(), "x", of="y")
    assert [i.name for i in extended.graph.input] == ["x", "y_grad"]
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    ct = np.full((4, 2), 1 / 8, np.float32)  # what the mean would have sent back
    actual = run_named(extended, {"x": x, "y_grad": ct})
    np.testing.assert_allclose(actual["x_grad"], expected_of_linear(x)["x_grad"], rtol=1e-5)


def test_the_given_model_is_not_changed() -> None:
    given = linear()
    constant = numpy_helper.from_array(np.ones(2, np.float32), "inside")
    given.graph.node.insert(0, helper.make_node("Identity", ["b"], ["b_too"], "share"))
    given.graph.node.insert(0, helper.make_node("Constant", [], ["c"], "constant", value=constant))
    given.graph.node.append(helper.make_node("Sum", ["b_too", "c", "y"], ["z"], "sum"))
    given.graph.output.append(value("z", ["batch", 2]))
    before = given.SerializeToString(deterministic=True)
    onnxtrain.gradient(given, ["w", "x", "b_too", "c"], of="z")
    assert given.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_taken(tmp_path: Path, kind: type) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(linear(), file)
    assert onnxtrain.gradient(kind(file), "w") == onnxtrain.gradient(linear(), "w")


def test_external_data_is_taken_along(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    onnx.save(linear(), file, save_as_external_data=True, location="weights.bin", size_threshold=0)
    extended = onnxtrain.gradient(file, "w")
    x = np.ones((2, 3), np.float32)
    actual = run_named(extended, {"x": x})
    np.testing.assert_allclose(actual["w_grad"], expected_of_linear(x)["w_grad"], rtol=1e-5)


def test_a_model_over_two_gigabytes_by_path(tmp_path: Path) -> None:
    """The weights lie in a sparse file that is never read."""
    file = tmp_path / "large.onnx"
    rows = 300_000_000
    large = model(
        [
            helper.make_node("Gather", ["table", "i"], ["picked"]),
            helper.make_node("Mul", ["picked", "s"], ["y"]),
        ],
        [value("i", ["n"], TensorProto.INT64), value("s", [])],
        [value("y", ["n", 2])],
    )
    table = large.graph.initializer.add(name="table", data_type=1, dims=[rows, 2])
    table.data_location = TensorProto.EXTERNAL
    table.external_data.add(key="location", value="large.bin")
    with open(tmp_path / "large.bin", "wb") as sparse:
        sparse.truncate(rows * 2 * 4)
    onnx.save(large, file)
    extended = onnxtrain.gradient(file, "s")
    assert extended.ByteSize() < 10_000
    onnx.save(extended, tmp_path / "gradient.onnx")
    stored = onnx.load(tmp_path / "gradient.onnx", load_external_data=False)
    assert [e.value for t in stored.graph.initializer for e in t.external_data][:1] == ["large.bin"]


def test_names_extend_and_make_way() -> None:
    """A value in the model that is called as the gradient will be is renamed."""
    given = model(
        [helper.make_node("Neg", ["x"], ["x_grad"]), helper.make_node("Exp", ["x_grad"], ["y"])],
        [value("x", [2])],
        [value("y", [2])],
    )
    feeds = {"x": np.zeros(2, np.float32), "y_grad": np.ones(2, np.float32)}
    actual = run_named(onnxtrain.gradient(given, "x"), feeds)
    np.testing.assert_allclose(actual["x_grad"], [-1, -1])


def test_a_value_that_only_zero_operators_use_has_zeros() -> None:
    given = model(
        [helper.make_node("Round", ["x"], ["r"]), helper.make_node("Add", ["r", "b"], ["y"])],
        [value("x", [3]), value("b", [3])],
        [value("y", [3])],
    )
    feeds = {n: np.ones(3, np.float32) for n in ("x", "b", "y_grad")}
    assert not run_named(onnxtrain.gradient(given, "x"), feeds)["x_grad"].any()
    through = onnxtrain.gradient(given, ["x", "b"], straight_through=["Round"])
    np.testing.assert_array_equal(run_named(through, feeds)["x_grad"], np.ones(3))


def test_second_derivatives() -> None:
    """What is emitted is a model like any other: differentiate it again."""
    given = model(
        [helper.make_node("Sin", ["x"], ["s"]),
         helper.make_node("ReduceSum", ["s"], ["e"], keepdims=0)],
        [value("x", ["n"])],
        [value("e", [])],
    )  # fmt: skip
    first = onnxtrain.gradient(given, "x")
    second = onnxtrain.gradient(first, "x", of="x_grad")
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    actual = run_named(second, {"x": x, "x_grad_grad": np.ones(5, np.float32)})
    np.testing.assert_allclose(actual["x_grad"], np.cos(x), rtol=1e-5)
    np.testing.assert_allclose(actual["x_grad_1"], -np.sin(x), rtol=1e-5)


def test_initializers_that_were_shared_through_identity_are_untied() -> None:
    """torch stores equal tensors once; each use has a gradient of its own."""
    given = model(
        [
            helper.make_node("Identity", ["a"], ["b"]),
            helper.make_node("Mul", ["x", "a"], ["xa"]),
            helper.make_node("Add", ["xa", "b"], ["y"]),
        ],
        [value("x", [2])],
        [value("y", [2])],
        {"a": np.ones(2, np.float32)},
    )
    extended = onnxtrain.gradient(given, ["a", "b"])
    assert {t.name for t in extended.graph.initializer} >= {"a", "b"}
    feeds = {"x": np.array([3, 5], np.float32), "y_grad": np.ones(2, np.float32)}
    actual = run_named(extended, feeds)
    np.testing.assert_array_equal(actual["a_grad"], [3, 5])
    np.testing.assert_array_equal(actual["b_grad"], [1, 1])


def test_initializers_that_the_dynamo_exporter_shared_are_untied() -> None:
    """It notes the module of each node. What is truly shared, or not constant, stays shared."""

    def node(op: str, inputs: list[str], output: str, module: str) -> onnx.NodeProto:
        made = helper.make_node(op, inputs, [output], output)
        scopes = f"['', '{module}', '{op.lower()}']"
        made.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
        return made

    given = model(
        [
            node("Mul", ["x", "n1.weight"], "a", "n1"),
            node("Mul", ["a", "n1.weight"], "b", "n2"),
            node("Mul", ["b", "n1.weight"], "c", "n1"),
            node("Mul", ["c", "e.weight"], "d", "e"),
            node("Mul", ["d", "e.weight"], "y", "out"),
        ],
        [value("x", [2])],
        [value("y", [2])],
        {"n1.weight": np.ones(2, np.float32), "e.weight": np.array([1, 2], np.float32)},
    )
    extended = onnxtrain.gradient(given, ["n1.weight", "n2.weight", "e.weight"])
    feeds = {"x": np.array([3, 5], np.float32), "y_grad": np.ones(2, np.float32)}
    actual = run_named(extended, feeds)
    np.testing.assert_array_equal(actual["n1.weight_grad"], [2 * 3, 2 * 5 * 4])
    np.testing.assert_array_equal(actual["n2.weight_grad"], [3, 5 * 4])
    np.testing.assert_array_equal(actual["e.weight_grad"], [2 * 3, 2 * 5 * 2])


@pytest.mark.parametrize("axes", ["constant", "input"])
def test_pads_of_some_axes_next_to_transposes(axes: str) -> None:
    """onnxruntime moves Transpose past Pad as if it had no axes; the model must not ask for it."""
    pads = np.array([1, 0, 0, 2])
    given = model(
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=[2, 0, 1]),
            helper.make_node("Pad", ["t", "pads", "", "axes"], ["p"]),
            helper.make_node("Transpose", ["p"], ["y"], perm=[1, 2, 0]),
        ],
        [value("x", [2, 3, 4])] + ([value("pads", [4], 7)] if axes == "input" else []),
        [value("y", None)],
        {"axes": np.array([1, 2])} | ({"pads": pads} if axes == "constant" else {}),
    )
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    expected = np.pad(x, [(1, 0), (0, 2), (0, 0)])
    actual = run_named(
        onnxtrain.gradient(given, "x"), {"x": x, "pads": pads, "y_grad": 2 * expected}
    )
    np.testing.assert_array_equal(actual["y"], expected)
    np.testing.assert_array_equal(actual["x_grad"], 2 * x)


@pytest.mark.parametrize("kind", [TensorProto.DOUBLE, TensorProto.FLOAT16])
def test_other_float_types(kind: int) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    given = linear()
    for info in (*given.graph.input, *given.graph.output):
        info.type.tensor_type.elem_type = kind
    for tensor in given.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype),
                                                tensor.name))  # fmt: skip
    extended = onnxtrain.gradient(given, ["w", "b", "x"])
    check_emitted(extended)
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(dtype)
    actual = run_named(extended, {"x": x})
    for name in ("w_grad", "b_grad", "x_grad"):
        assert actual[name].dtype == dtype
        wanted = expected_of_linear(x.astype(np.float32))[name]
        np.testing.assert_allclose(actual[name], wanted, rtol=1e-2, atol=1e-3)


def test_sizes_that_tracing_left_at_an_output_are_not_believed() -> None:
    """The torchscript exporter declares (3,) for the output of squeeze: its example had 3 rows."""
    nodes = [helper.make_node("Squeeze", ["x"], ["s"]), helper.make_node("Mul", ["s", "s"], ["y"])]
    given = model(nodes, [value("x", ["batch", 1])], [value("y", [3])])
    extended = onnxtrain.gradient(given, "x")
    check_emitted(extended)
    x = np.arange(5, dtype=np.float32)[:, None]
    actual = run_named(extended, {"x": x, "y_grad": np.ones(5, np.float32)})
    np.testing.assert_array_equal(actual["x_grad"], 2 * x)
