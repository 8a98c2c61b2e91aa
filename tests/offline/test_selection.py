"""Which initializers are weights, told by what the graph does with them, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxtrain
from graphs import model, value
from onnxtrain.errors import OnnxTrainError, TrainingWarning, UnknownNameError

rng = np.random.default_rng(0)


def array(*dims: int) -> np.ndarray:
    return rng.standard_normal(dims).astype(np.float32)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), outputs.split()[0], **attributes)


def network(
    nodes: list[onnx.NodeProto], tensors: dict[str, np.ndarray], width: int = 4, **options: Any
) -> onnx.ModelProto:
    """A model from x [batch, 4] to y, which a Linear with the weight w ends."""
    nodes = [*nodes, node("MatMul", "h w", "y")]
    tensors = {**tensors, "w": array(width, 3)}
    return model(nodes, [value("x", ["batch", 4])], [value("y", ["batch", 3])], tensors, **options)


# Each case: the nodes from x to h, the tensors, and those of them that train beside w.
CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], set[str]]] = {
    "mean and deviation of inputs": (
        [node("Sub", "x mean", "a"), node("Div", "a std", "h")],
        {"mean": array(4), "std": array(4)}, set(),
    ),
    "positions added to an embedding": (
        [node("Cast", "x", "i", to=TensorProto.INT64), node("Gather", "table i", "g"),
         node("Add", "g positions", "p"), node("ReduceMean", "p axes", "h", keepdims=0)],
        {"table": array(9, 4), "positions": array(1, 4, 4), "axes": np.array([1])}, {"table"},
    ),
    "positions added behind a layer": (
        [node("MatMul", "x a", "l"), node("Reshape", "l shape", "r"), node("Add", "r p", "s"),
         node("ReduceSum", "s axes", "h", keepdims=0)],
        {"a": array(4, 8), "shape": np.array([-1, 2, 4]), "p": array(1, 2, 3, 1)[..., 0, 0, None],
         "axes": np.array([1])}, {"a"},
    ),
    "bias behind views": (
        [node("MatMul", "x a", "l"), node("Reshape", "l shape", "r"),
         node("Transpose", "r", "t", perm=[0, 2, 1]), node("Add", "b t", "s"),
         node("Flatten", "s", "h")],
        {"a": array(4, 4), "shape": np.array([-1, 2, 2]), "b": array(2, 2)}, {"a", "b"},
    ),
    "scale and shift of a folded normalization": (
        [node("MatMul", "x a", "l"), node("Mul", "l s", "m"), node("Add", "m t", "n"),
         node("Relu", "n", "h")],
        {"a": array(4, 4), "s": array(4), "t": array(1, 4)}, {"a", "s", "t"},
    ),
    "bounds, exponent and numbers": (
        [node("MatMul", "x a", "l"), node("Clip", "l low high", "c"), node("Max", "c least", "d"),
         node("Pow", "d two", "e"), node("Div", "e root", "h")],
        {"a": array(4, 4), "low": np.float32(-1), "high": np.float32(1), "least": array(4),
         "two": np.float32(2), "root": np.float32(3)}, {"a"},
    ),
    "weights through views and a weight norm": (
        [node("Transpose", "a", "at"), node("Cast", "at", "ac", to=TensorProto.FLOAT),
         node("ReduceL2", "ac axes", "norm", keepdims=1), node("Div", "ac norm", "unit"),
         node("Mul", "unit gain", "weight"), node("MatMul", "x weight", "h")],
        {"a": array(4, 4), "axes": np.array([0]), "gain": array(1, 4)}, {"a", "gain"},
    ),
    "weights joined and cut": (
        [node("Concat", "a b", "ab", axis=1), node("Slice", "ab zero four one", "part"),
         node("MatMul", "x part", "h")],
        {"a": array(4, 3), "b": array(4, 3), "zero": np.array([0]), "four": np.array([4]),
         "one": np.array([1])}, {"a", "b"},
    ),
    "a product of two factors": (
        [node("MatMul", "down up", "delta"), node("Add", "a delta", "whole"),
         node("MatMul", "x whole", "h")],
        {"a": array(4, 4), "down": array(4, 2), "up": array(2, 4)}, {"a", "down", "up"},
    ),
    "quantization scales": (
        [node("QuantizeLinear", "x sx zx", "q"), node("DequantizeLinear", "q sx zx", "d"),
         node("DequantizeLinear", "wq sw zw", "wd"), node("MatMul", "d wd", "h")],
        {"sx": np.float32(0.1), "zx": np.uint8(128), "wq": np.ones((4, 4), np.int8),
         "sw": np.float32(0.02), "zw": np.int8(0)}, set(),
    ),
    "a weight that is quantized on the way": (
        [node("QuantizeLinear", "a s z", "q"), node("DequantizeLinear", "q s z", "d"),
         node("MatMul", "x d", "h")],
        {"a": array(4, 4), "s": np.float32(0.1), "z": np.int8(0)}, {"a"},
    ),
    "norm with the scale before the product": (
        [node("MatMul", "x a", "l"), node("Mul", "l l", "sq"),
         node("ReduceMean", "sq axes", "var", keepdims=1), node("Add", "var eps", "v"),
         node("Sqrt", "v", "dev"), node("Reciprocal", "dev", "inv"), node("Mul", "inv g", "scale"),
         node("Mul", "l scale", "n"), node("Add", "n b", "h")],
        {"a": array(4, 4), "axes": np.array([-1]), "eps": np.float32(1e-5), "g": array(4),
         "b": array(4)}, {"a", "g", "b"},
    ),
    "a mask and a scale of attention": (
        [node("MatMul", "x a", "l"), node("Unsqueeze", "l axes", "q"),
         node("Transpose", "q", "k", perm=[0, 2, 1]), node("MatMul", "q k", "s"),
         node("Mul", "s factor", "t"), node("Add", "t mask", "u"), node("Softmax", "u", "p"),
         node("MatMul", "p q", "o"), node("Squeeze", "o axes", "h")],
        {"a": array(4, 4), "axes": np.array([1]), "factor": np.float32(0.5),
         "mask": array(1, 1)}, {"a"},
    ),
    "the table of a sinusoidal encoding": (
        [node("Cast", "x", "i", to=TensorProto.INT64), node("Gather", "sines i", "g"),
         node("ReduceMean", "g axes", "h", keepdims=0)],
        {"sines": np.sin(np.arange(32)[:, None] * [1, 0.5, 0.1, 0.01]).astype(np.float32),
         "axes": np.array([1])}, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_trains(name: str) -> None:
    nodes, tensors, trained = CASES[name]
    report = onnxtrain.inspect(network(nodes, tensors))
    assert set(report.weights) == trained | {"w"}
    assert report.reasons["w"] == "weight of MatMul 'y'"


def test_reasons() -> None:
    nodes, tensors, _ = CASES["quantization scales"]
    found = onnxtrain.inspect(network(nodes, tensors))
    assert found.reasons["sx"] == "quantization scale of QuantizeLinear 'q'"
    assert found.reasons["wq"] == "quantized weight of DequantizeLinear"
    assert any("DequantizeLinear are integers" in note for note in found.notes)
    nodes, tensors, _ = CASES["bounds, exponent and numbers"]
    found = onnxtrain.inspect(network(nodes, tensors))
    assert found.reasons["low"] == "bound of Clip 'c'"
    assert found.reasons["two"] == "exponent of Pow 'e'"
    nodes, tensors, _ = CASES["mean and deviation of inputs"]
    found = onnxtrain.inspect(network(nodes, tensors))
    assert "that no layer made" in found.reasons["std"]
    assert found.reasons["std"].endswith("name it in train= to train it")
    assert "('mean'): name it in train=" in str(found)


def test_what_is_named_trains_whatever_it_is(tmp_path: Path) -> None:
    nodes, tensors, _ = CASES["mean and deviation of inputs"]
    given = network(nodes, tensors)
    assert set(onnxtrain.prepare(given, tmp_path / "a").trainable) == {"w"}
    made = onnxtrain.prepare(given, tmp_path / "b", train=["mean", "std"])
    assert set(made.trainable) == {"mean", "std"}


def test_what_is_in_doubt_is_told(tmp_path: Path) -> None:
    nodes, tensors, _ = CASES["mean and deviation of inputs"]
    given = network(nodes, tensors)
    (note,) = onnxtrain.prepare(given, tmp_path / "doubt", loss="mse").notes
    assert note.startswith("what may be learned or fixed does not train: 'mean', 'std'.")
    decided = onnxtrain.prepare(given, tmp_path / "decided", loss="mse", freeze=["mean", "st?"])
    assert not decided.notes
    named = onnxtrain.prepare(given, tmp_path / "named", loss="mse", train=["w", "mean"])
    assert named.notes == ()


def test_weights_in_constant_nodes() -> None:
    def constant(name: str, content: np.ndarray) -> onnx.NodeProto:
        return helper.make_node(
            "Constant", [], [name], value=onnx.numpy_helper.from_array(content, name)
        )

    kernel = constant("blur", array(4, 4))
    nodes = [kernel, node("MatMul", "x blur", "b"), node("MatMul", "b a", "h")]
    few = onnxtrain.inspect(network(nodes, {"a": array(4, 40)}, width=40))
    assert set(few.weights) == {"a", "w"}  # a filter that the code of the network made
    assert few.reasons["blur"].startswith("Constant node, weight of MatMul")
    all_ = [constant("a", array(4, 40)), node("MatMul", "x a", "h"), constant("v", array(40, 3))]
    nodes = [*all_, node("MatMul", "h v", "y")]
    given = model(nodes, [value("x", ["n", 4])], [value("y", ["n", 3])])
    assert set(onnxtrain.inspect(given).weights) == {"a", "v"}


def body(name: str, weight: str) -> onnx.GraphProto:
    product = helper.make_node("MatMul", ["x", weight], [f"{name}_out"], name)
    return helper.make_graph([product], name, [], [value(f"{name}_out", ["batch", 4])])


def test_weights_in_branches() -> None:
    branch = helper.make_node(
        "If", ["flag"], ["h"], "if", then_branch=body("then", "a"), else_branch=body("else", "b")
    )
    given = network([branch], {"a": array(4, 4), "b": array(4, 4)})
    given.graph.input.append(value("flag", [], TensorProto.BOOL))
    report = onnxtrain.inspect(given)
    assert set(report.weights) == {"a", "b", "w"}
    assert report.reasons["a"] == "weight of MatMul 'then'"


def test_weights_in_a_scan_and_its_initial_state() -> None:
    step = helper.make_graph(
        [node("MatMul", "state a", "sa"), node("Add", "sa item", "s"), node("Add", "s bias", "t"),
         node("Tanh", "t", "next")],
        "body", [value("state", [1, 4]), value("item", [4])], [value("next", [1, 4])],
    )  # fmt: skip
    scan = helper.make_node("Scan", ["start", "x"], ["h"], "scan", num_scan_inputs=1, body=step)
    given = network([scan], {"start": array(1, 4), "a": array(4, 4), "bias": array(4)})
    given.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    report = onnxtrain.inspect(given)
    assert set(report.weights) == {"a", "bias", "w"}
    assert report.reasons["start"].startswith("initial state of Scan 'scan'")


# ---- an operator without a gradient --------------------------------------------------------------


def blocked() -> onnx.ModelProto:
    nodes = [
        node("MatMul", "x a", "l"),
        helper.make_node("Strange", ["l"], ["h"], "strange", domain="my.own"),
    ]
    given = network(nodes, {"a": array(4, 4)}, domains=["my.own"])
    given.graph.value_info.append(value("h", ["batch", 4]))
    return given


def test_the_weights_behind_an_operator_without_gradient_train(tmp_path: Path) -> None:
    report = onnxtrain.inspect(blocked())
    assert report.can_train and report.blocked == ("a",)
    assert report.verdict.startswith("trains in part: 1 of 2 weights")
    assert "my.own.Strange (node 'strange')" in report.verdict
    with pytest.warns(TrainingWarning, match=r"1 weights do not train.*my\.own\.Strange"):
        made = onnxtrain.prepare(blocked(), tmp_path)
    assert set(made.trainable) == {"w"} and "my.own.Strange" in " ".join(made.notes)
    with pytest.raises(OnnxTrainError, match="Strange"):
        onnxtrain.prepare(blocked(), tmp_path, train=["a", "w"])


def test_scales_of_weights_that_the_graph_dequantizes() -> None:
    nodes = [node("MatMulNBits", "x wq scales", "h", domain="com.microsoft", K=4, N=4, bits=4,
                  block_size=16)]  # fmt: skip
    tensors = {"wq": np.ones((4, 1, 8), np.uint8), "scales": array(4)}
    given = network(nodes, tensors, domains=["com.microsoft"])
    given.graph.value_info.append(value("h", ["batch", 4]))
    assert set(onnxtrain.inspect(given).weights) == {"w"}
    nodes = [node("Cast", "wq", "f", to=TensorProto.FLOAT), node("Mul", "f scales", "d"),
             node("MatMul", "x d", "h")]  # fmt: skip
    tensors = {"wq": np.ones((4, 4), np.int8), "scales": array(4)}
    report = onnxtrain.inspect(network(nodes, tensors))
    assert set(report.weights) == {"w"}
    assert report.reasons["scales"] == "quantization scale in Mul 'd'"


def test_nothing_to_train_names_what_was_left_out(tmp_path: Path) -> None:
    given = network(*CASES["mean and deviation of inputs"][:2])
    with pytest.raises(OnnxTrainError, match="every weight is frozen"):
        onnxtrain.prepare(given, tmp_path, freeze=["w"])
    tensors = {"wq": np.ones((4, 3), np.int8), "s": np.float32(1), "z": np.int8(0), "m": array(4)}
    nodes = [node("Sub", "x m", "c"), node("DequantizeLinear", "wq s z", "d"),
             node("MatMul", "c d", "y")]  # fmt: skip
    given = model(nodes, [value("x", ["n", 4])], [value("y", ["n", 3])], tensors)
    with pytest.raises(OnnxTrainError, match=r"integers, of DequantizeLinear.*name 'm' in train"):
        onnxtrain.prepare(given, tmp_path)
    assert "its weights are integers" in onnxtrain.inspect(given).verdict


def test_the_operator_that_ends_the_gradient_is_named(tmp_path: Path) -> None:
    def ended(last: onnx.NodeProto, *, tail: bool) -> onnx.ModelProto:
        nodes = [node("MatMul", "x v", "h"), node("ArgMax", "h", "i", keepdims=0, axis=1), last]
        tensors = {"v": array(4, 4)} | ({"t": array(4, 3)} if tail else {})
        return model(nodes, [value("x", ["n", 4])], [value("y", ["n", 3] if tail else ["n"])],
                     tensors)  # fmt: skip

    nothing = ended(node("Cast", "i", "y", to=TensorProto.FLOAT), tail=False)
    with pytest.raises(OnnxTrainError, match=r"no gradient comes to 'v' \(ArgMax ends it\)"):
        onnxtrain.prepare(nothing, tmp_path, loss="mse")
    assert "'v' (ArgMax ends it)" in onnxtrain.inspect(nothing).verdict
    rest = ended(node("Gather", "t i", "y"), tail=True)
    written = onnxtrain.prepare(rest, tmp_path, loss="mse")
    assert set(written.trainable) == {"t"}
    assert any("1 weights do not train, because ArgMax ends" in note for note in written.notes)
    assert "trains in part" in onnxtrain.inspect(rest).verdict


def test_the_bias_of_a_product_of_integers_trains(tmp_path: Path) -> None:
    nodes = [node("DynamicQuantizeLinear", "x", "q s z"), node("MatMulInteger", "q wq z", "i"),
             node("Cast", "i", "f", to=TensorProto.FLOAT), node("Mul", "s ws", "sw"),
             node("Mul", "f sw", "d"), node("Add", "d b", "y")]  # fmt: skip
    tensors = {"wq": np.ones((4, 3), np.int8), "ws": np.float32(0.1), "b": array(3)}
    given = model(nodes, [value("x", ["n", 4])], [value("y", ["n", 3])], tensors)
    written = onnxtrain.prepare(given, tmp_path)
    assert set(written.trainable) == {"b"}
    assert any("1 weights of MatMulInteger are integers" in note for note in written.notes)


# ---- patterns ------------------------------------------------------------------------------------


def layers() -> onnx.ModelProto:
    nodes = [node("MatMul", "x net.matrix", "l"), node("Add", "l body.b", "h")]
    return network(nodes, {"net.matrix": array(4, 4), "body.b": array(4)})


@pytest.mark.parametrize("argument", ["train", "freeze"])
def test_a_pattern_takes_no_bias_without_its_matrix(argument: str, tmp_path: Path) -> None:
    message = rf"{argument}='body\.\*' takes the bias 'body\.b' but not its matrix.*'net\.matrix'"
    with pytest.raises(UnknownNameError, match=message):
        onnxtrain.prepare(layers(), tmp_path, **{argument: "body.*"})
    both = onnxtrain.prepare(layers(), tmp_path / "a", **{argument: ["body.*", "net.*"]})
    assert ("w" in both.trainable) == (argument == "freeze")
    exact = onnxtrain.prepare(layers(), tmp_path / "b", **{argument: ["body.b"]})
    assert ("body.b" in exact.trainable) == (argument == "train")
    ending = onnxtrain.prepare(layers(), tmp_path / "c", **{argument: "*.b"})
    assert ("body.b" in ending.trainable) == (argument == "train")


# ---- losses that take scores ---------------------------------------------------------------------


@pytest.mark.parametrize("last", ["Softmax", "Sigmoid"])
def test_probabilities_before_a_loss_that_takes_scores(last: str, tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "scores"), node(last, "scores", "p"), node("Flatten", "p", "y")]
    given = model(nodes, [value("x", ["n", 4])], [value("y", ["n", 3])], {"w": array(4, 3)})
    assert any("'scores'" in note and last in note for note in onnxtrain.inspect(given).notes)
    with pytest.warns(TrainingWarning, match=rf"comes out of a {last}.*'scores'"):
        onnxtrain.prepare(given, tmp_path / "a")
    onnxtrain.prepare(given, tmp_path / "b", of="scores")
    direct = model(nodes[:2], [value("x", ["n", 4])], [value("p", ["n", 3])], {"w": array(4, 3)})
    with pytest.warns(TrainingWarning, match=last):
        onnxtrain.prepare(direct, tmp_path / "c", loss=onnxtrain.losses.CrossEntropyLoss())
