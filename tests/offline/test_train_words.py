"""What trains, by one word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.errors import ArgumentError, ArgumentTypeError, OnnxTrainError, UnknownNameError
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.patterns import choose
from onnxtrain.offline.selection import survey

SHAPES = {
    "stem.weight": (4, 3, 3, 3), "stem.bias": (4,), "bn.weight": (4,), "bn.bias": (4,),
    "mean": (4,), "var": (4,), "fc1.weight": (6, 4), "fc1.bias": (6,), "ln.weight": (6,),
    "ln.bias": (6,), "fc2.weight": (5, 6), "fc2.bias": (5,),
}  # fmt: skip


def network(heads: int = 1, renamed: dict[str, str] | None = None) -> onnx.ModelProto:
    """Conv, BatchNormalization, Gemm, LayerNormalization, and one or two Gemm as heads."""
    nodes = [
        helper.make_node("Conv", ["x", "stem.weight", "stem.bias"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "bn.weight", "bn.bias", "mean", "var"], ["n"]),
        helper.make_node("GlobalAveragePool", ["n"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fc1.weight", "fc1.bias"], ["g"], transB=1),
        helper.make_node("LayerNormalization", ["g", "ln.weight", "ln.bias"], ["l"]),
        helper.make_node("Gemm", ["l", "fc2.weight", "fc2.bias"], ["y"], transB=1),
    ]
    shapes = dict(SHAPES)
    if heads == 2:
        shapes |= {"box.weight": (2, 6), "box.bias": (2,)}
        nodes.append(helper.make_node("Gemm", ["l", "box.weight", "box.bias"], ["z"], transB=1))
        nodes.append(helper.make_node("Concat", ["y", "z"], ["both"], axis=1))
    random = np.random.default_rng(0)
    tensors = {n: random.random(shape).astype(np.float32) for n, shape in shapes.items()}
    names = renamed or {}
    for node in nodes:
        node.input[:] = [names.get(n, n) for n in node.input]
    graph = helper.make_graph(
        nodes, "network", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3, 8, 8])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, names.get(n, n)) for n, v in tensors.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def trained(model: onnx.ModelProto, *words: Any) -> set[str]:
    canonical = canonical_model(model)
    return set(choose(survey(canonical, canonical.graph.outputs[0]), words, None)[0])


FC2 = {"fc2.weight", "fc2.bias"}
LAST = {
    1: FC2,
    2: {"fc1.weight", "fc1.bias", "ln.weight", "ln.bias", *FC2},
    3: SHAPES.keys() - {"mean", "var"},
}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bias"], {n for n in SHAPES if n.endswith("bias")}),
        (["norm"], {"bn.weight", "bn.bias", "ln.weight", "ln.bias"}),
        (["head"], FC2),
        *(([f"last:{count}"], names) for count, names in LAST.items()),
        (["head", "bn.*"], {*FC2, "bn.weight", "bn.bias"}),
        (["Bias", "stem.weight"], {"stem.weight", *(n for n in SHAPES if n.endswith("bias"))}),
    ],
    ids=lambda given: "" if isinstance(given, set) else str(given),
)
def test_a_word_means_weights(words: list[str], expected: set[str]) -> None:
    assert trained(network(), *words) == set(expected)


def test_each_of_two_heads_is_one() -> None:
    assert trained(network(2), "head") == {*FC2, "box.weight", "box.bias"}


def test_a_name_that_is_a_word_is_the_name() -> None:
    assert trained(network(renamed={"fc1.bias": "bias"}), "bias") == {"bias"}


@pytest.mark.parametrize(
    ("word", "error", "text"),
    [
        ("last:0", ArgumentError, "a whole number from 1 on, as in 'last:3'"),
        ("last:many", ArgumentError, "a whole number from 1 on"),
        ("last", ArgumentError, "a whole number from 1 on"),
        ("last:4", OnnxTrainError, "the model has 3 layers with weights that train"),
        ("biass", UnknownNameError, "Did you mean the word 'bias'?"),
        ("norms", UnknownNameError, "Did you mean the word 'norm'?"),
        ("lasts:2", UnknownNameError, "Did you mean the word 'last:3'?"),
        ("loral:rank=3", UnknownNameError, "Did you mean the word 'lora'?"),
    ],
)
def test_a_wrong_word_is_named(word: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        trained(network(), word)
    assert text in str(caught.value)


def test_a_model_without_a_norm() -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [numpy_helper.from_array(np.ones((3, 4), np.float32), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    with pytest.raises(OnnxTrainError, match="nothing in this model is a scale or bias of a norm"):
        trained(model, "norm")
    assert trained(model, "head") == {"w"}


@pytest.mark.parametrize(
    ("train", "error", "text"),
    [
        ("lora:rank=0", ArgumentError, "the rank of lora is a whole number from 1 on, not 0"),
        ("lora:alpha=-1", ArgumentError, "alpha of lora is a number above 0"),
        ("lora:dropout=1", ArgumentError, "dropout of lora is a number from 0 to below 1"),
        ("lora:scaling=odd", ArgumentError, "'standard' or 'rslora', not 'odd'"),
        ("lora:ranks=3", ArgumentError, "but lora has no ranks: it has rank, alpha"),
        ("lora:layers=*.fc9", UnknownNameError, "no layer matches '*.fc9'. The model has 'fc"),
        ([3], ArgumentTypeError, "not 3"),
    ],
)
def test_a_wrong_setting_of_lora(train: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        onnxtrain.prepare(network(), None, train=train)
    assert text in str(caught.value)


def test_lora_and_words_together(tmp_path: Path) -> None:
    made = onnxtrain.prepare(
        network(), tmp_path, train=[onnxtrain.Lora(rank=2, layers=["fc1", "stem"]), "bias"]
    )
    expected = {f"{n}.lora_{letter}.weight" for n in ("fc1", "stem") for letter in "AB"}
    expected |= {n for n in SHAPES if n.endswith("bias")}
    assert set(made.trainable) == expected
    x, labels = np.ones((2, 3, 8, 8), np.float32), np.array([1, 2])
    session = onnxtrain.TrainingSession(tmp_path)
    losses = [float(session.step(x, labels)[0]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def test_a_rank_for_each_group_of_layers(tmp_path: Path) -> None:
    loras = [onnxtrain.Lora(rank=1, layers="fc2"), onnxtrain.Lora(rank=3, layers="fc*")]
    made = onnxtrain.prepare(network(), tmp_path, train=loras)
    assert made.trainable == {
        "fc1.lora_A.weight": 12, "fc1.lora_B.weight": 18,
        "fc2.lora_A.weight": 6, "fc2.lora_B.weight": 5,
    }  # fmt: skip


def test_all_linear_leaves_the_head_out() -> None:
    made = onnxtrain.offline.passes.lora.add.add_lora(network(), None, [onnxtrain.Lora()], ["y"])
    assert [pair.layer for pair in made.pairs] == ["fc1"]


def test_an_adapted_model_can_be_adapted_again(tmp_path: Path) -> None:
    first = tmp_path / "first"
    onnxtrain.prepare(network(), first, train="lora:rank=1")
    session = onnxtrain.TrainingSession(first)
    session.export_model_for_inferencing(tmp_path / "again.onnx", ["y"])
    made = onnxtrain.prepare(tmp_path / "again.onnx", tmp_path / "second", train="lora:layers=fc1*")
    assert len(made.trainable) > 1 and not made.trainable.keys() & {"fc1.lora_A.weight"}


def test_layers_that_are_left_out_are_counted(tmp_path: Path) -> None:
    model = network()
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    body = helper.make_graph(
        [helper.make_node("Gemm", ["y", "square"], ["inner"])], "body", [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, ["b", 5])],
    )  # fmt: skip
    same = helper.make_graph(
        [helper.make_node("Identity", ["y"], ["same"])], "other", [],
        [helper.make_tensor_value_info("same", TensorProto.FLOAT, ["b", 5])],
    )  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.eye(5, dtype=np.float32), "square"))
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    node = helper.make_node("If", ["flag"], ["z"], then_branch=body, else_branch=same)
    model.graph.node.append(node)
    model.graph.output[0].name = "z"
    conv.attribute.append(helper.make_attribute("group", 1))
    made = onnxtrain.prepare(model, tmp_path, train="lora:layers=fc*")
    assert any("1 layers inside If, Loop or Scan" in note for note in made.notes)
    session = onnxtrain.TrainingSession(tmp_path)
    x, labels = np.ones((2, 3, 8, 8), np.float32), np.array([1, 2])
    losses = [float(session.step(x, np.array(True), labels)[0]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def test_a_model_without_layers_says_so() -> None:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])], "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
        [numpy_helper.from_array(np.ones(3, np.float32), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    with pytest.raises(OnnxTrainError, match="lora finds no layer in this model"):
        onnxtrain.prepare(model, None, train="lora")


def test_layers_that_the_loss_does_not_depend_on_have_no_factors(tmp_path: Path) -> None:
    model = network(2)
    del model.graph.node[-1], model.graph.output[:]
    for name in ("y", "z"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    made = onnxtrain.prepare(model, tmp_path, train="lora:layers=*", of="z")
    layers = {name.partition(".lora")[0] for name in made.trainable}
    assert layers == {"stem", "fc1", "box"}


@pytest.mark.slow
def test_many_factors_are_updated_together(tmp_path: Path) -> None:
    """The sizes of so many tensors are more than a kilobyte, which the graph has to hold itself."""
    count, random = 70, np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", [f"v{i}", f"layer{i}.weight"], [f"v{i + 1}"])
        for i in range(count)
    ]
    graph = helper.make_graph(
        nodes, "deep", [helper.make_tensor_value_info("v0", TensorProto.FLOAT, ["b", 4])],
        [helper.make_tensor_value_info(f"v{count}", TensorProto.FLOAT, ["b", 4])],
        [
            numpy_helper.from_array(np.linalg.qr(random.random((4, 4)))[0].astype(np.float32), n)
            for n in (f"layer{i}.weight" for i in range(count))
        ],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    made = onnxtrain.prepare(model, tmp_path, train="lora:rank=1", loss="mse")
    assert len(made.trainable) == 2 * (count - 1)
    session = onnxtrain.TrainingSession(tmp_path)
    x = random.random((3, 4)).astype(np.float32)
    losses = [float(session.step(x, x)[0]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
