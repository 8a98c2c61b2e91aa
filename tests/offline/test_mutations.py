"""Models damaged at random: the outcome is a model or an error of onnxtrain, nothing else.

The damage is seeded, so that a failure can be looked at: `damaged(seed)` is the model.
"""

import random

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from graphs import linear, model, value
from onnxtrain.errors import OnnxTrainError

pytestmark = pytest.mark.slow

PER_TEST = 100


def network() -> onnx.ModelProto:
    """A little of everything: a convolution, a branch, a function, a fused operator, old forms."""
    rng = np.random.default_rng(0)
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, ["c"], [name])], name, [], [value(name, None)]
        )
        for name, op in (("then_branch", "Relu"), ("else_branch", "Tanh"))
    }
    given = model(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
            helper.make_node("If", ["flag"], ["r"], "if", **branches),
            helper.make_node("Clip", ["r", "", "most"], ["k"], "clip"),
            helper.make_node("Double", ["k"], ["d"], "call", domain="my", power=2.0),
            helper.make_node("Gelu", ["d"], ["g"], "gelu", domain="com.microsoft"),
            helper.make_node("Reshape", ["g", "shape"], ["f"], "flat"),
            helper.make_node("Gemm", ["f", "v"], ["l"], "gemm", transB=1),
            helper.make_node("SoftmaxCrossEntropyLoss", ["l", "t"], ["loss"], "loss"),
        ],
        [value("x", ["n", 1, 3, 3]), value("flag", [], 9), value("t", ["n"], 7)],
        [value("loss", [])],
        {
            "w": rng.standard_normal((2, 1, 3, 3)).astype(np.float32),
            "b": rng.standard_normal(2).astype(np.float32),
            "most": np.array(0.5, np.float32),
            "shape": np.array([0, 18]),
            "v": rng.standard_normal((4, 18)).astype(np.float32),
        },
        domains=["my", "com.microsoft"],
    )
    double = helper.make_function(
        "my", "Double", ["a"], ["z"],
        [helper.make_node("Mul", ["a", "a"], ["s"]), helper.make_node("Add", ["s", "a"], ["z"])],
        [helper.make_opsetid("", 18)], ["power"],
    )  # fmt: skip
    given.functions.append(double)
    return given


def graphs_of(given: onnx.ModelProto) -> list[onnx.GraphProto]:
    graphs = [given.graph]
    for graph in graphs:
        graphs.extend(a.g for n in graph.node for a in n.attribute if a.HasField("g"))
    return graphs


def damage_bytes(rng: random.Random, given: onnx.ModelProto) -> onnx.ModelProto | None:
    data = bytearray(given.SerializeToString(deterministic=True))
    place, kind = rng.randrange(len(data)), rng.randrange(4)
    if kind == 0:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[place : place + rng.randint(1, 8)]
    elif kind == 2:
        data[place:place] = rng.randbytes(rng.randint(1, 4))
    else:
        data[place:place] = data[place : place + rng.randint(1, 40)]
    try:
        return onnx.ModelProto.FromString(bytes(data))
    except Exception:  # protobuf itself refuses it, as test_errors.py has it for files
        return None


def damage_structure(rng: random.Random, given: onnx.ModelProto) -> onnx.ModelProto:
    """Change one thing in a graph, a node, an attribute or a tensor."""
    graph = rng.choice(graphs_of(given))
    node = rng.choice(graph.node)
    names = ["", "ghost", *(n for each in given.graph.node for n in (*each.input, *each.output))]
    numbers = [0, 1, -1, 2, 7, 99, -99, 2**31, 2**62, -(2**63)]
    attribute = rng.choice(node.attribute) if node.attribute else None
    tensor = rng.choice(given.graph.initializer)
    info = rng.choice([*given.graph.input, *given.graph.output, *graph.output])
    changes = [
        lambda: graph.node.remove(node),
        lambda: graph.node.append(node),
        lambda: node.input.append(rng.choice(names)),
        lambda: node.output.append(rng.choice(names)),
        lambda: node.input and node.input.pop(),
        lambda: node.input and node.input.__setitem__(0, rng.choice(names)),
        lambda: node.output.__setitem__(0, rng.choice(names)),
        lambda: setattr(
            node, "op_type", rng.choice(["", "Nothing", "Transpose", "LSTM", "Concat"])
        ),
        lambda: setattr(node, "domain", rng.choice(["", "my", "com.microsoft", "other"])),
        lambda: attribute and node.attribute.remove(attribute),
        lambda: attribute and node.attribute.append(attribute),
        lambda: attribute and setattr(attribute, "type", rng.randrange(15)),
        lambda: attribute and setattr(attribute, "i", rng.choice(numbers)),
        lambda: attribute and attribute.ints.append(rng.choice(numbers)),
        lambda: node.attribute.append(helper.make_attribute("axis", rng.choice(numbers))),
        lambda: tensor.dims.append(rng.choice(numbers)),
        lambda: setattr(tensor, "data_type", rng.randrange(30)),
        lambda: setattr(tensor, "name", rng.choice(names)),
        lambda: setattr(tensor, "raw_data", tensor.raw_data[1:]),
        lambda: tensor.CopyFrom(numpy_helper.from_array(np.array(numbers[:6]), tensor.name)),
        lambda: given.graph.initializer.remove(tensor),
        lambda: info.type.tensor_type.shape.dim.add(dim_value=rng.choice(numbers)),
        lambda: setattr(info.type.tensor_type, "elem_type", rng.randrange(30)),
        lambda: info.ClearField("type"),
        lambda: setattr(info, "name", rng.choice(names)),
        lambda: given.graph.output.append(value(rng.choice(names), ["n"])),
        lambda: given.graph.value_info.append(value(rng.choice(names), [2], rng.randrange(1, 12))),
        lambda: setattr(given.opset_import[0], "version", rng.randrange(-1, 40)),
        lambda: setattr(given, "ir_version", rng.randrange(-1, 16)),
    ]
    rng.choice(changes)()
    return given


def damaged(seed: int) -> onnx.ModelProto | None:
    rng = random.Random(seed)
    given = rng.choice([linear, network])()
    return rng.choice([damage_bytes, damage_structure, damage_structure])(rng, given)


def test_the_network_is_sound() -> None:
    extended = onnxtrain.gradient(network(), ["x", "w", "b", "v"])
    onnx.shape_inference.infer_shapes(extended, check_type=True, strict_mode=True, data_prop=True)


@pytest.mark.parametrize("first", range(0, 8 * PER_TEST, PER_TEST))
def test_damaged_models(first: int) -> None:
    made = 0
    for seed in range(first, first + PER_TEST):
        given = damaged(seed)
        if given is None:
            continue
        try:
            extended = onnxtrain.gradient(given, ["w", "x"])
        except OnnxTrainError as error:
            assert len(str(error)) > 20, f"seed {seed}: {error}"
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        else:
            made += 1
            assert isinstance(extended, onnx.ModelProto)
    assert 0 < made < PER_TEST, "some damage does not matter, most does"
