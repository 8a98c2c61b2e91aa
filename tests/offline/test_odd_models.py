"""Models that are unusual but valid, or that runtimes put up with: the gradient is the same."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import onnxtrain
from gradcheck import check_emitted
from graphs import linear, model, value
from onnxtrain.errors import ShapeInferenceError

X = np.array([[0.3, -0.5, 0.8], [1.0, 0.2, -0.1]], np.float32)


def run(extended: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    """Run with all that is fed, also what has a default."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        extended.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return dict(zip([o.name for o in extended.graph.output], session.run(None, feeds), strict=True))


EXPECTED = run(onnxtrain.gradient(linear(), ["w", "x"]), {"x": X})


def check(given: onnx.ModelProto, wrt: tuple[str, ...] = ("w", "x"), **feeds: Any) -> None:
    """See that a variation of the linear model has its gradients, and is left as it was."""
    before = given.SerializeToString(deterministic=True)
    extended = onnxtrain.gradient(given, wrt)
    assert given.SerializeToString(deterministic=True) == before, "the given model was changed"
    check_emitted(extended)
    actual = run(extended, {"x": X, **feeds})
    for name, original in zip(wrt, ("w_grad", "x_grad"), strict=True):
        np.testing.assert_allclose(actual[f"{name}_grad"], EXPECTED[original], rtol=1e-5)


def as_inputs(given: onnx.ModelProto) -> None:
    for tensor in given.graph.initializer:
        given.graph.input.append(value(tensor.name, list(tensor.dims), tensor.data_type))


def as_constants(given: onnx.ModelProto) -> None:
    for tensor in given.graph.initializer:
        node = helper.make_node("Constant", [], [tensor.name], value=tensor)
        given.graph.node.insert(0, node)
    del given.graph.initializer[:]


def in_reverse(given: onnx.ModelProto) -> None:
    nodes = list(given.graph.node)[::-1]
    del given.graph.node[:]
    given.graph.node.extend(nodes)


def without_node_names(given: onnx.ModelProto) -> None:
    for node in given.graph.node:
        node.name = ""


def with_other_operators(given: onnx.ModelProto) -> None:
    """A node of ai.onnx.ml, one that makes nothing, and domains that nobody uses."""
    scaler = helper.make_node(
        "Scaler", ["x"], ["scaled"], domain="ai.onnx.ml", offset=[0.0] * 3, scale=[1.0] * 3
    )
    given.graph.node.append(scaler)
    given.graph.node.append(helper.make_node("Log", ["x"], [], domain="my.own"))
    for domain in ("ai.onnx.ml", "my.own", "never.used"):
        given.opset_import.append(helper.make_opsetid(domain, 1))


def declared(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> Callable[..., object]:
    return lambda m: m.graph.value_info.append(value(name, shape, kind))


def input_of(*dims: int | str | None) -> Callable[..., object]:
    def change(given: onnx.ModelProto) -> None:
        given.graph.input[0].CopyFrom(value("x", dims))
        for dim, size in zip(given.graph.input[0].type.tensor_type.shape.dim, dims, strict=True):
            if size == -1:
                dim.dim_value = -1

    return change


def output_of(*dims: int | str) -> Callable[..., object]:
    return lambda m: m.graph.output[1].CopyFrom(value("y", dims))


def further_output(name: str, shape: Any) -> Callable[..., object]:
    return lambda m: m.graph.output.append(value(name, shape))


VARIATIONS = {
    "initializers-as-inputs": as_inputs,
    "initializers-as-constants": as_constants,
    "nodes-in-reverse": in_reverse,
    "nameless-nodes": without_node_names,
    "other-operators": with_other_operators,
    "trailing-empty-input": lambda m: m.graph.node[3].input.append(""),
    "trailing-empty-output": lambda m: m.graph.node[2].output.append(""),
    "output-used": further_output("h", ["batch", 2]),
    "output-twice": further_output("y", ["batch", 2]),
    "input-as-output": further_output("x", ["batch", 3]),
    "input-as-output-of-another-shape": further_output("x", ["batch", 2]),
    "initializer-as-output": further_output("w", [3, 2]),
    "value-info-of-another-shape": declared("h", [7, 7]),
    "value-info-of-another-rank": declared("h", ["batch", 2, 1]),
    "value-info-of-another-type": declared("h", ["batch", 2], TensorProto.DOUBLE),
    "value-info-of-the-input": declared("x", ["batch", 9]),
    "value-info-of-nothing": declared("nothing", [3]),
    "output-of-another-batch": output_of(5, 2),
    "output-unknown": output_of("?", "?"),
    "dims-question": input_of("?", 3),
    "dims-minus": input_of(-1, 3),
    "dims-none": input_of(None, None),
    "dims-expression": input_of("batch*2", "c + 1"),
    "dims-same-name": input_of("n", "n"),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_variations(name: str) -> None:
    given = linear()
    VARIATIONS[name](given)
    if name == "other-operators":  # the result has a node of the other domain, as it was asked to
        given.graph.output.append(value("x", ["batch", 3]))
        given.graph.output[-1].name = "scaled"
        extended = onnxtrain.gradient(given, "w")
        np.testing.assert_allclose(run(extended, {"x": X})["w_grad"], EXPECTED["w_grad"], rtol=1e-5)
        assert [o.domain for o in extended.opset_import] == ["", "ai.onnx.ml"]
    else:
        check(given)


def test_unused_inputs_stay() -> None:
    given = linear()
    given.graph.input.insert(0, value("before", ["k"], TensorProto.STRING))
    given.graph.input.append(value("behind", [1], TensorProto.INT64))
    check(given, before=np.array(["a"], object), behind=np.zeros(1, np.int64))


NAMES = [
    {"w": "layer/0:w", "h": "größe::h"},
    {"w": "1", "h": "2"},
    {"w": "w" * 3000},
    {"w": 'w\n"'},
    {"xw": "const/float32/1", "h": "const/int64/0", "b": "const/float32/0"},
    {"xw": "x_grad", "h": "w_grad"},
    {"xw": "loss_grad", "h": "y_grad"},
    {"xw": "mean_grad/Div", "h": "mean_grad/Div_out"},
    {"w": "y_grad", "b": "loss_grad"},
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: "-".join(names.values())[:30])
def test_names(names: dict[str, str]) -> None:
    given = linear()
    for node in given.graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
    for tensor in given.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    check(given, wrt=(names.get("w", "w"), "x"))


# ---- defaults ------------------------------------------------------------------------------------


def test_inputs_with_a_default_can_be_overridden() -> None:
    given = linear()
    as_inputs(given)
    given.graph.initializer.append(numpy_helper.from_array(X[:1], "x"))
    extended = onnxtrain.gradient(given, ["w", "x"])
    assert [i.name for i in extended.graph.input] == ["x", "w", "b"]
    assert run(extended, {})["x_grad"].shape == (1, 3)
    other = linear()
    w = np.ones((3, 2), np.float32)
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
    expected = run(onnxtrain.gradient(other, ["w", "x"]), {"x": X})
    actual = run(extended, {"x": X, "w": w})
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-6, err_msg=name)


def test_a_default_is_not_taken_for_the_only_value() -> None:
    given = model(
        [helper.make_node("Gather", ["x", "i"], ["y"])],
        [value("x", ["n", 2]), value("i", ["k"], TensorProto.INT64)],
        [value("y", None)],
        {"i": np.array([0, 1])},
    )
    extended = onnxtrain.gradient(given, "x")
    feeds = {"x": np.ones((3, 2), np.float32), "i": np.array([2, 2, 0])}
    actual = run(extended, {**feeds, "y_grad": np.ones((3, 2), np.float32)})
    np.testing.assert_array_equal(actual["x_grad"], [[1, 1], [0, 0], [2, 2]])


def test_a_default_that_decides_a_shape_is_a_constant() -> None:
    given = model(
        [helper.make_node("Reshape", ["x", "shape"], ["r"]),
         helper.make_node("ReduceSum", ["r", "axes"], ["y"], keepdims=0)],
        [value("x", ["n", 6]), value("shape", [3], TensorProto.INT64),
         value("axes", [1], TensorProto.INT64)],
        [value("y", None)],
        {"shape": np.array([-1, 2, 3]), "axes": np.array([2])},
    )  # fmt: skip
    extended = onnxtrain.gradient(given, "x")
    assert [i.name for i in extended.graph.input] == ["x", "y_grad"]
    feeds = {"x": np.ones((1, 6), np.float32), "y_grad": np.array([[1, 2]], np.float32)}
    np.testing.assert_array_equal(run(extended, feeds)["x_grad"], [[1, 1, 1, 2, 2, 2]])


@pytest.mark.parametrize("opset", [7, 8])
def test_ir_version_3(opset: int) -> None:
    """There, every initializer had to be an input."""
    given = linear(opset)
    as_inputs(given)
    given.ir_version = 3
    check(given)


def test_a_batch_size_that_was_renamed_in_the_input_alone() -> None:
    given = linear()
    given.graph.input[0].CopyFrom(value("x", [1, 3]))
    given.graph.output[1].CopyFrom(value("y", [1, 2]))
    given = onnx.shape_inference.infer_shapes(given)
    given.graph.input[0].CopyFrom(value("x", ["batch", 3]))
    check(given)


# ---- branches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
def test_branches_with_initializers_of_the_same_name(known: bool) -> None:
    """The tensors are the caller's; they keep their name."""
    branches = {
        branch: helper.make_graph(
            [helper.make_node(op, ["x", "k"], [branch])], branch, [], [value(branch, None)],
            [numpy_helper.from_array(np.array([2, 3], np.float32), "k")],
        )
        for branch, op in (("then_branch", "Mul"), ("else_branch", "Add"))
    }  # fmt: skip
    given = model(
        [helper.make_node("If", ["c"], ["y"], **branches)],
        [value("x", [2]), *([] if known else [value("c", [], TensorProto.BOOL)])],
        [value("y", None)],
        {"c": np.array(True)} if known else {},
    )
    before = given.SerializeToString(deterministic=True)
    extended = onnxtrain.gradient(given, "x")
    assert given.SerializeToString(deterministic=True) == before
    feeds = {"x": np.ones(2, np.float32), "y_grad": np.ones(2, np.float32)}
    actual = run(extended, feeds if known else {**feeds, "c": np.array(True)})
    np.testing.assert_array_equal(actual["x_grad"], [2, 3])


def nested(depth: int) -> onnx.ModelProto:
    inner = helper.make_graph(
        [helper.make_node("Sin", ["x"], ["r0"])], "g", [], [value("r0", None)]
    )
    for level in range(1, depth + 1):
        other = helper.make_node("Cos", ["x"], [f"o{level}"])
        node = helper.make_node(
            "If", ["c"], [f"r{level}"], then_branch=inner,
            else_branch=helper.make_graph([other], "o", [], [value(f"o{level}", None)]),
        )  # fmt: skip
        inner = helper.make_graph([node], "g", [], [value(f"r{level}", None)])
    return model(
        list(inner.node),
        [value("x", [1]), value("c", [], TensorProto.BOOL)],
        [value(f"r{depth}", [1])],
    )


def test_deeply_nested_branches() -> None:
    """The limit of protobuf is a little over 30."""
    extended = onnxtrain.gradient(nested(20), "x")
    feeds = {"x": np.zeros(1, np.float32), "r20_grad": np.ones(1, np.float32)}
    assert run(extended, {**feeds, "c": np.array(True)})["x_grad"] == [1]


# ---- size ----------------------------------------------------------------------------------------


def test_a_deep_chain() -> None:
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(3000)]
    given = model(nodes[::-1], [value("v0", [1])], [value("v3000", [1])])
    extended = onnxtrain.gradient(given, "v0")
    assert len(extended.graph.node) == 6000


@pytest.mark.parametrize(("op", "attributes"), [("Concat", {"axis": 0}), ("Sum", {}), ("Max", {})])
def test_a_wide_node(op: str, attributes: dict[str, int]) -> None:
    names = [f"x{i}" for i in range(500)]
    given = model(
        [helper.make_node(op, [*names, "x0"], ["y"], **attributes)],
        [value(name, [2]) for name in names],
        [value("y", None)],
    )
    extended = onnxtrain.gradient(given, names)
    assert len(extended.graph.output) == 501


# ---- types ---------------------------------------------------------------------------------------


def of_type(dtype: Any) -> onnx.ModelProto:
    given = linear()
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for info in (*given.graph.input, *given.graph.output):
        info.type.tensor_type.elem_type = kind
    for tensor in given.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return given


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(np.float64, 1e-5), (np.float16, 1e-2), (ml_dtypes.bfloat16, 5e-2)]
)
def test_types(dtype: Any, rtol: float) -> None:
    extended = onnxtrain.gradient(of_type(dtype), ["w", "x"])
    check_emitted(extended)
    results = ReferenceEvaluator(extended).run(None, {"x": X.astype(dtype)})
    for output, result in zip(extended.graph.output, results, strict=True):
        assert result.dtype == dtype
        expected = EXPECTED[output.name]
        np.testing.assert_allclose(result.astype(np.float32), expected, rtol, atol=rtol * 0.01)


def test_an_unknown_rank_is_told() -> None:
    given = linear()
    given.graph.input[0].CopyFrom(value("x", None))
    with pytest.raises(ShapeInferenceError, match=r"rank of 'x'.*value_info"):
        onnxtrain.gradient(given, "w")


# ---- the result ----------------------------------------------------------------------------------


def test_every_opset_gives_the_same_model() -> None:
    newest = onnx.defs.onnx_opset_version()
    results = {
        onnxtrain.gradient(linear(opset), ["w", "x"]).SerializeToString()
        for opset in range(7, newest + 1)
    }
    assert len(results) == 1
    lowest = onnx.ModelProto.FromString(results.pop())
    assert [o.version for o in lowest.opset_import] == [18] and lowest.ir_version == 8


def test_notes_on_the_model_stay() -> None:
    given = linear()
    given.doc_string, given.graph.doc_string = "of the model", "of the graph"
    given.producer_name, given.producer_version, given.model_version = "me", "1.0", 7
    given.metadata_props.add(key="licence", value="free")
    extended = onnxtrain.gradient(given, "w")
    for field in ("doc_string", "producer_name", "producer_version", "model_version"):
        assert getattr(extended, field) == getattr(given, field)
    assert extended.graph.doc_string == "of the graph"
    assert [(p.key, p.value) for p in extended.metadata_props] == [("licence", "free")]


@pytest.mark.slow
def test_the_result_does_not_depend_on_hash_seeds() -> None:
    program = (
        "import hashlib, sys; sys.path[:0] = sys.argv[1:];"
        "import onnxtrain; from test_odd_models import nested, linear;"
        "made = [onnxtrain.gradient(linear(7), {'w', 'b', 'x'})];"
        "made.append(onnxtrain.gradient(nested(3), 'x'));"
        "print(hashlib.sha256(b''.join(m.SerializeToString() for m in made)).hexdigest())"
    )
    folders = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    results = {
        subprocess.run(
            [sys.executable, "-c", program, *folders],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, check=True, text=True,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert len(results) == 1


def test_threads_do_not_disturb_each_other() -> None:
    expected = onnxtrain.gradient(nested(3), "x").SerializeToString()
    results: list[bytes] = []

    def work() -> None:
        results.extend(onnxtrain.gradient(nested(3), "x").SerializeToString() for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 15
