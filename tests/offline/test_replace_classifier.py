"""A new last layer: the rest of the model stays as it is."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import TrainingSession
from onnxtrain.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.errors import ArgumentError, ModelError, UnknownNameError
from onnxtrain.offline.passes.replace_classifier import new_head, replace_classifier
from onnxtrain.offline.prepare import prepare

OLD, NEW = 4, 3
SHAPES = {
    "w0": (6, 6), "w": (6, OLD), "wt": (OLD, 6), "b": (OLD,), "column": (OLD, 1),
    "kernel": (OLD, 6, 1, 1), "wide": (OLD, 6, 3, 3), "grouped": (OLD, 3, 1, 1),
    "batched": (1, 6, OLD), "map": (1, OLD, 1, 1),
}  # fmt: skip


def value(name, dims=None, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, dims)


def node(op, *inputs, to="y", **attributes):
    return helper.make_node(op, list(inputs), [to], f"{op}_{to}", **attributes)


def ints(name, *numbers):
    return helper.make_node("Constant", [], [name], value_ints=numbers)


def model(*nodes, dims=("batch", 6), outputs=("y",), version=18) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()}
    tensors["w16"] = tensors["w"].astype(np.float16)
    tensors["w8"], tensors["scale"] = np.arange(24, dtype=np.int8).reshape(6, OLD), np.float32(0.1)
    first = node("MatMul", "x", "w0", to="h") if dims[-1] == 6 else node("Neg", "x", to="h")
    used = {name for n in (first, *nodes) for name in n.input}
    graph = helper.make_graph(
        [first, *nodes], "g", [value("x", dims)], [value(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in tensors.items() if n in used],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@dataclass
class Case:
    """A model, its old weight and where that has the classes, its bias, and its scores."""

    model: onnx.ModelProto
    weight: str
    axis: int
    bias: str = ""
    scores: str = "y"
    class_axis: int = 1  # of the scores


MAP = ("batch", 6, 5, 5)
LINEAR_CASES = {
    "gemm": Case(model(node("Gemm", "h", "w", "b")), "w", 1, "b"),
    "gemm-transB": Case(model(node("Gemm", "h", "wt", "b", transB=1)), "wt", 0, "b"),
    "gemm-weight-first": Case(
        model(node("Gemm", "wt", "h", "column", transB=1)), "wt", 0, "column", class_axis=0
    ),
    "gemm-weight-first-transA": Case(
        model(node("Gemm", "w", "h", transA=1, transB=1)), "w", 1, class_axis=0
    ),
    "matmul": Case(model(node("MatMul", "h", "w")), "w", 1),
    "matmul-add-softmax": Case(
        model(
            node("MatMul", "h", "w", to="m"), node("Add", "m", "b", to="s"), node("Softmax", "s")
        ), "w", 1, "b", "s",
    ),
    "add-matmul-sigmoid": Case(
        model(
            node("MatMul", "h", "w", to="m"), node("Add", "b", "m", to="s"), node("Sigmoid", "s")
        ), "w", 1, "b", "s",
    ),
    "matmul-weight-first": Case(
        model(
            node("Transpose", "h", to="t"), node("MatMul", "wt", "t", to="m"),
            node("Add", "column", "m", to="a"), node("Transpose", "a"),
        ), "wt", 0, "column",
    ),
    "sequence": Case(model(node("MatMul", "h", "w"), dims=("n", "t", 6)), "w", 1, class_axis=2),
    "batched-weight": Case(
        model(node("MatMul", "h", "batched"), dims=("n", 5, 6)), "batched", 2, class_axis=2
    ),
    "weight-in-a-constant": Case(
        model(
            helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(
                np.random.default_rng(1).normal(size=(6, OLD)).astype(np.float32))),
            node("MatMul", "h", "c"),
        ), "c", 1,
    ),
    "weight-behind-transpose-and-identity": Case(
        model(
            node("Identity", "wt", to="i"), node("Transpose", "i", to="t"),
            node("MatMul", "h", "t", to="m"), node("Identity", "b", to="ib"),
            node("Add", "m", "ib"),
        ), "t", 1, "ib",
    ),
    "weight-behind-cast": Case(
        model(
            helper.make_node("Cast", ["w16"], ["c"], to=TensorProto.FLOAT), node("MatMul", "h", "c")
        ), "c", 1,
    ),
    "quantized-weight": Case(
        model(node("DequantizeLinear", "w8", "scale", to="c"), node("Gemm", "h", "c", "b")),
        "c", 1, "b",
    ),
    "reshape-that-states-the-classes": Case(
        model(
            ints("two", -1, OLD), node("MatMul", "h", "w", to="m"), node("Reshape", "m", "two"),
        ), "w", 1,
    ),
    "reshape-to-a-computed-shape": Case(
        model(
            node("MatMul", "h", "w", to="m"), node("Shape", "x", to="s", start=0, end=1),
            ints("rest", OLD, 1), helper.make_node("Concat", ["s", "rest"], ["shape"], axis=0),
            node("Reshape", "m", "shape"),
        ), "w", 1,
    ),
    "cast-behind": Case(
        model(node("MatMul", "h", "w", to="m"), helper.make_node("Cast", ["m"], ["y"], to=1)),
        "w", 1,
    ),
    "temperature": Case(
        model(node("MatMul", "h", "w", to="m"), node("Mul", "m", "scale")), "w", 1
    ),
}  # fmt: skip
CONV_CASES = {
    "conv-on-pooled-map": Case(
        model(
            node("GlobalAveragePool", "h", to="p"), node("Conv", "p", "kernel", "b", to="c"),
            node("Flatten", "c"), dims=MAP,
        ), "kernel", 0, "b",
    ),
    "conv-then-pool-squeeze-softmax": Case(
        model(
            node("Conv", "h", "kernel", "b", to="c"), node("Relu", "c", to="r"),
            node("GlobalAveragePool", "r", to="p"), ints("axes", 2, 3),
            node("Squeeze", "p", "axes", to="s"), node("Softmax", "s"), dims=MAP,
        ), "kernel", 0, "b", "s",
    ),
    "conv-3x3-then-mean": Case(
        model(
            node("Conv", "h", "wide", to="c", pads=[1, 1, 1, 1]), ints("axes", 2, 3),
            node("ReduceMean", "c", "axes", keepdims=0), dims=MAP,
        ), "wide", 0,
    ),
    "conv-valid-reshape": Case(
        model(
            node("Conv", "h", "wide", "b", to="c"), ints("shape", 0, -1),
            node("Reshape", "c", "shape"),
            dims=("batch", 6, 3, 3),
        ), "wide", 0, "b",
    ),
    "conv-with-its-bias-behind-a-view": Case(
        model(
            node("GlobalAveragePool", "h", to="p"), node("Conv", "p", "kernel", to="c"),
            node("Flatten", "c", to="f"), node("Add", "f", "b"), dims=MAP,
        ), "kernel", 0, "b",
    ),
    "conv-and-a-map-of-biases": Case(
        model(
            node("Conv", "h", "kernel", to="c"), node("Add", "map", "c", to="a"),
            node("GlobalMaxPool", "a", to="p"), node("Flatten", "p"), dims=MAP,
        ), "kernel", 0, "map",
    ),
    "segmentation": Case(
        model(node("Conv", "h", "wide", "b", pads=[1, 1, 1, 1]), dims=("n", 6, "h", "w")),
        "wide", 0, "b",
    ),
    "last-layer-of-channels-last": Case(
        model(
            node("Conv", "h", "kernel", to="c"), node("Transpose", "c", to="t", perm=[0, 2, 3, 1]),
            node("Add", "t", "b", to="a"), ints("axes", 1, 2),
            node("ReduceMean", "a", "axes", keepdims=0),
            dims=MAP,
        ), "kernel", 0, "b",
    ),
}  # fmt: skip
CASES = LINEAR_CASES | CONV_CASES


def run(given: onnx.ModelProto, feeds, *wanted: str):
    seen = onnx.ModelProto()
    seen.CopyFrom(given)
    have = {v.name for v in seen.graph.output}
    stored = {t.name: numpy_helper.to_array(t) for t in given.graph.initializer}
    inferred = onnx.shape_inference.infer_shapes(seen).graph.value_info
    seen.graph.output.extend(v for v in inferred if v.name in wanted and v.name not in have)
    asked = [name for name in wanted if name not in stored]
    session = ort.InferenceSession(seen.SerializeToString(), providers=["CPUExecutionProvider"])
    return stored | dict(zip(asked, session.run(asked, feeds), strict=True))


def batch(given: onnx.ModelProto, seed=2):
    dims = given.graph.input[0].type.tensor_type.shape.dim
    sizes = [5 if i == 0 else d.dim_value or 7 for i, d in enumerate(dims)]
    return {"x": np.random.default_rng(seed).normal(size=sizes).astype(np.float32)}


def dims_of(info: onnx.ValueInfoProto):
    return [d.dim_value or None for d in info.type.tensor_type.shape.dim]


@pytest.mark.parametrize("name", CASES)
def test_with_the_old_weights_of_some_classes_the_scores_are_the_old_ones(name) -> None:
    case = CASES[name]
    replaced = replace_classifier(case.model, NEW)
    made = replaced.model
    onnx.checker.check_model(made, full_check=True)
    feeds = batch(case.model)
    wanted = [case.weight, case.scores, *([case.bias] if case.bias else [])]
    before = run(case.model, feeds, *wanted)
    some = np.arange(NEW)
    parameters = {t.name: t for t in made.graph.initializer}
    weight = before[case.weight].take(some, case.axis)
    bias = before[case.bias].reshape(-1)[some] if case.bias else np.zeros(NEW, np.float32)
    for key, array in zip(replaced.parameters, (weight, bias), strict=True):
        shape = list(parameters[key].dims)
        assert int(np.prod(shape)) == array.size and len(shape) >= array.ndim
        parameters[key].CopyFrom(numpy_helper.from_array(array.reshape(shape), key))
    scores = run(made, feeds, replaced.output)[replaced.output]
    np.testing.assert_allclose(scores, before[case.scores].take(some, case.class_axis), atol=1e-5)
    assert replaced.removed_outputs == ()
    (declared,) = made.graph.output
    assert len(dims_of(declared)) == scores.ndim
    assert dims_of(declared)[case.class_axis] == NEW
    assert all(d in (None, n) for d, n in zip(dims_of(declared), scores.shape, strict=True))


@pytest.mark.parametrize("name", ["gemm", "matmul-weight-first", "conv-then-pool-squeeze-softmax"])
def test_the_new_layer_trains(name, tmp_path: Path) -> None:
    replaced = replace_classifier(CASES[name].model, NEW)
    made = generate_artifacts(
        replaced.model, replaced.parameters, loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW, artifact_directory=tmp_path,
    )  # fmt: skip
    assert set(made.trainable) == set(replaced.parameters)
    session = TrainingSession.from_folder(tmp_path)
    session.set_learning_rate(0.05)
    x, labels = batch(replaced.model)["x"], np.array([0, 1, 2, 0, 1])
    losses = [float(session.step(x, labels)) for _ in range(40)]
    assert losses[-1] < 0.7 * losses[0]


def test_the_given_model_is_not_changed_and_the_seed_decides() -> None:
    given = CASES["gemm"].model
    before = given.SerializeToString()
    one, same, other = (replace_classifier(given, 3, seed=s).model for s in (1, 1, 2))
    assert given.SerializeToString() == before
    assert one.SerializeToString() == same.SerializeToString() != other.SerializeToString()


def test_nothing_of_the_old_layer_is_left() -> None:
    given = CASES["weight-behind-transpose-and-identity"].model
    replaced = replace_classifier(given, NEW)
    assert {t.name for t in replaced.model.graph.initializer} == {"w0", *replaced.parameters}
    assert [n.op_type for n in replaced.model.graph.node] == ["MatMul", "MatMul", "Add"]


def test_names_that_are_taken_are_left_alone() -> None:
    once = replace_classifier(CASES["gemm"].model, 3)
    assert (once.weight, once.bias, once.output) == ("head.weight", "head.bias", "scores")
    assert replace_classifier(once.model, 5).parameters == once.parameters
    taken = model(node("Identity", "h", to="scores"), node("Gemm", "scores", "w", "b"))
    assert replace_classifier(taken, 2).output == "head.scores"
    taken = model(node("Identity", "h", to="head.x"), node("Gemm", "head.x", "w", "b"))
    assert replace_classifier(taken, 2).parameters == ["head1.weight", "head1.bias"]


def test_outputs_stay_unless_they_come_from_the_old_layer() -> None:
    given = model(
        node("Relu", "h", to="features"), node("Gemm", "h", "w", "b", to="logits"),
        node("Softmax", "logits", to="probabilities"),
        node("MatMul", "features", "w0", to="other"),
        outputs=("features", "probabilities", "logits", "other"),
    )  # fmt: skip
    feeds = batch(given)
    before = run(given, feeds, "features", "other")
    replaced = replace_classifier(given, NEW, of="probabilities")
    assert [v.name for v in replaced.model.graph.output] == ["features", "scores", "other"]
    assert replaced.removed_outputs == ("logits",)
    after = run(replaced.model, feeds, "features", "other")
    for name in ("features", "other"):
        np.testing.assert_array_equal(before[name], after[name])


def test_prepare_computes_the_loss_from_the_new_scores(tmp_path: Path) -> None:
    given = model(node("Gemm", "h", "w", "b"), outputs=("h", "y"))
    made = prepare(given, tmp_path, classes=NEW, of="y")
    assert set(made.trainable) == {"head.weight", "head.bias"}
    assert {"h", "scores"} <= set(made.outputs)


def test_a_sum_inside_the_model_is_no_bias() -> None:
    given = model(node("Gemm", "h", "w", "b", to="g"), node("Add", "g", "g2"))
    given.graph.node.insert(1, node("MatMul", "x", "w", to="g2"))
    with pytest.raises(ModelError, match=r"Add \(node 'Add_y'\).*after='...'"):
        replace_classifier(given, NEW)


BAD = {
    "Exp": (model(node("Exp", "h")), "the model has Exp"),
    "a computed weight": (
        model(node("MatMul", "h", "h"), dims=(6, 6)), "computed from the model's"
    ),
    "an input": (model(node("Identity", "x")), "an input or constant"),
    "a scale for each class": (
        model(node("MatMul", "h", "w", to="m"), node("Mul", "m", "b")),
        "for each of the old classes",
    ),
    "classes that are split": (
        model(ints("s", -1, 2, 2), node("MatMul", "h", "w", to="m"), node("Reshape", "m", "s")),
        "would change from the shape",
    ),
    "classes that are as many as the batch": (
        model(ints("s", 4, 4), node("MatMul", "h", "w", to="m"), node("Reshape", "m", "s"),
              dims=(4, 6)), "has 4 more than once",
    ),
    "groups": (model(node("Conv", "h", "grouped", group=2), dims=MAP), "2 groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_replaced_is_refused_with_a_way_out(name) -> None:
    given, words = BAD[name]
    with pytest.raises(ModelError, match=words) as raised:
        replace_classifier(given, NEW)
    assert "after=" in str(raised.value)


def test_bad_arguments(tmp_path: Path) -> None:
    given = CASES["gemm"].model
    with pytest.raises(UnknownNameError, match="its outputs are 'y'"):
        replace_classifier(given, 3, of="z")
    with pytest.raises(ArgumentError, match="at least 1"):
        replace_classifier(given, 0)
    with pytest.raises(ModelError, match="no model file"):
        replace_classifier(tmp_path / "none.onnx", 3)


def test_the_layer_can_go_behind_any_value_of_known_width() -> None:
    whole = model(node("Relu", "h", to="hidden"), node("Gemm", "hidden", "w", "b"))
    replaced = replace_classifier(whole, 2, after="h")
    assert [n.op_type for n in replaced.model.graph.node] == ["MatMul", "MatMul", "Add"]
    assert dims_of(replaced.model.graph.output[0]) == [None, 2]
    on_map = model(node("Conv", "h", "kernel"), dims=MAP)
    replaced = replace_classifier(on_map, 2, after="h")
    assert [n.op_type for n in replaced.model.graph.node] == ["Neg", "Flatten", "MatMul", "Add"]
    assert run(replaced.model, batch(on_map), replaced.output)[replaced.output].shape == (5, 2)
    with pytest.raises(UnknownNameError, match="did you mean 'hidden'"):
        replace_classifier(whole, 2, after="hiden")
    unknown = model(node("MatMul", "h", "w"), dims=("batch", "length", 6))
    with pytest.raises(ModelError, match="sizes are known"):
        replace_classifier(unknown, 2, after="h")


def test_a_model_with_its_weights_beside_it(tmp_path: Path) -> None:
    given = CASES["gemm"].model
    stored = onnx.ModelProto()
    stored.CopyFrom(given)
    onnx.save(stored, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    replaced = replace_classifier(tmp_path / "m.onnx", NEW)
    assert (
        replaced.model.SerializeToString()
        == replace_classifier(given, NEW).model.SerializeToString()
    )


def test_a_weight_that_is_an_input_with_a_default() -> None:
    given = CASES["gemm"].model
    listed = onnx.ModelProto()
    listed.CopyFrom(given)
    listed.graph.input.extend([value("w", SHAPES["w"]), value("b", SHAPES["b"])])
    replaced = replace_classifier(listed, NEW)
    assert [v.name for v in replaced.model.graph.input] == ["x"]


def test_new_head_is_deprecated() -> None:
    given = model(node("Gemm", "h", "w", "b"), outputs=("y", "h"))
    with pytest.warns(DeprecationWarning, match="replace_classifier"):
        made = new_head(given, NEW)
    assert isinstance(made, onnx.ModelProto)
    assert [v.name for v in made.graph.output] == ["scores"]
