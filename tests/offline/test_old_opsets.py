"""Models of every opset train: operators of opset 1 to 6 mean today what they meant, losses too.

onnxruntime has no kernels for most operators of that time, so the results are compared with numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import onnxblock
from onnxtrain.errors import ModelError
from onnxtrain.offline.frontend.canonical_model import canonical_model
from onnxtrain.offline.frontend.upgrade import upgraded
from onnxtrain.offline.frontend.upgrade.rewrite import ADAPTERS

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4, 4)).astype(np.float32)
Y = RNG.uniform(0.5, 2.0, (2, 3, 4, 4)).astype(np.float32)
C = RNG.uniform(0.5, 2.0, 3).astype(np.float32)
M = RNG.standard_normal((2, 3)).astype(np.float32)
CHANNEL = C[:, None, None]
FORGOTTEN = {"consumed_inputs": [0, 0]}


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def normal(x: np.ndarray) -> np.ndarray:
    return (x - CHANNEL) / np.sqrt(CHANNEL + 1e-5) * CHANNEL + CHANNEL


def instance_normal(x: np.ndarray) -> np.ndarray:
    deviation = np.sqrt(x.var((2, 3), keepdims=True) + 1e-5)
    return (x - x.mean((2, 3), keepdims=True)) / deviation * CHANNEL + CHANNEL


# operator, opset, inputs, attributes, what it computes
CASES: list[tuple[str, int, list[np.ndarray], dict[str, Any], Any]] = [
    ("Pad", 1, [X], {"paddings": [0, 0, 1, 0, 0, 0, 0, 2]},
     np.pad(X, ((0, 0), (0, 0), (1, 0), (0, 2)))),
    ("LpPool", 1, [X], {"p": 2.0, "kernel_shape": [2, 2], "strides": [2, 2]},
     np.sqrt(np.square(X).reshape(2, 3, 2, 2, 2, 2).sum((3, 5)))),
    ("GlobalLpPool", 1, [X], {"p": 2.0}, np.sqrt(np.square(X).sum((2, 3), keepdims=True))),
    ("Concat", 1, [X, Y], {}, np.concatenate([X, Y], 1)),
    ("Concat", 3, [X, Y], {"axis": 2}, np.concatenate([X, Y], 2)),
    ("Reshape", 1, [X], {"shape": [2, -1], "consumed_inputs": [0]}, X.reshape(2, -1)),
    ("Cast", 1, [X], {"to": "INT32"}, X.astype(np.int32)),
    ("Cast", 5, [X], {"to": "FLOAT16"}, X.astype(np.float16)),
    ("Selu", 1, [X], {}, 1.0507 * np.where(X > 0, X, 1.6732 * (np.exp(X) - 1))),
    ("Tile", 1, [X, np.float32(3), np.float32(1)], {}, np.tile(X, (1, 3, 1, 1))),
    ("Upsample", 1, [X], {"height_scale": 2.0, "width_scale": 1.0, "mode": "nearest"},
     X.repeat(2, 2)),
    ("Abs", 1, [X], FORGOTTEN, np.abs(X)),
    ("Ceil", 1, [X], FORGOTTEN, np.ceil(X)),
    ("Clip", 1, [X], {**FORGOTTEN, "max": 0.5}, np.minimum(X, 0.5)),
    ("Clip", 5, [X], {"min": -0.5, "max": 0.5}, np.clip(X, -0.5, 0.5)),
    ("Dropout", 1, [X], {**FORGOTTEN, "is_test": 1}, X),
    ("Dropout", 6, [X], {"is_test": 1, "ratio": 0.3}, X),
    ("Elu", 1, [X], FORGOTTEN, np.where(X > 0, X, np.exp(X) - 1)),
    ("Exp", 1, [X], FORGOTTEN, np.exp(X)),
    ("Floor", 1, [X], FORGOTTEN, np.floor(X)),
    ("HardSigmoid", 1, [X], FORGOTTEN, np.clip(0.2 * X + 0.5, 0, 1)),
    ("LeakyRelu", 1, [X], {**FORGOTTEN, "alpha": 0.1}, np.where(X > 0, X, 0.1 * X)),
    ("Log", 1, [Y], FORGOTTEN, np.log(Y)),
    ("Max", 1, [X, Y], FORGOTTEN, np.maximum(X, Y)),
    ("Mean", 1, [X, Y], FORGOTTEN, (X + Y) / 2),
    ("Min", 1, [X, Y], FORGOTTEN, np.minimum(X, Y)),
    ("Neg", 1, [X], FORGOTTEN, -X),
    ("Reciprocal", 1, [Y], FORGOTTEN, 1 / Y),
    ("Relu", 1, [X], FORGOTTEN, relu(X)),
    ("Sigmoid", 1, [X], FORGOTTEN, 1 / (1 + np.exp(-X))),
    ("Sqrt", 1, [Y], FORGOTTEN, np.sqrt(Y)),
    ("Sum", 1, [X, Y], FORGOTTEN, X + Y),
    ("Tanh", 1, [X], FORGOTTEN, np.tanh(X)),
    ("BatchNormalization", 1, [X, C, C, C, C], {**FORGOTTEN, "is_test": 1}, normal(X)),
    ("BatchNormalization", 6, [X, C, C, C, C], {"is_test": 1}, normal(X)),
    ("InstanceNormalization", 1, [X, C, C], FORGOTTEN, instance_normal(X)),
    ("Gemm", 1, [M, M.T.copy(), C[:2]], {"broadcast": 1}, M @ M.T + C[:2]),
    ("Gemm", 6, [M, M.T.copy(), C[:2]], {"broadcast": 1}, M @ M.T + C[:2]),
    ("PRelu", 1, [X, C], FORGOTTEN, np.where(X > 0, X, X * CHANNEL)),
    ("PRelu", 6, [X, C[:1]], {}, np.where(X > 0, X, X * C[0])),
    *(
        (op, opset, [X, C], {"broadcast": 1, "axis": 1, **(FORGOTTEN if opset < 6 else {})},
         function(X, CHANNEL))
        for op, function in (
            ("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide),
        )
        for opset in (1, 6)
    ),
    ("Add", 6, [X, X[0, 0, 0]], {"broadcast": 1}, X + X[0, 0, 0]),  # without an axis: the last
    ("Add", 6, [X, X[0, :, :1, 0]], {"broadcast": 1, "axis": -3}, X + X[0, :, :1, :1]),
    ("Add", 6, [X, C[:1]], {"broadcast": 1, "axis": 0}, X + C[0]),
    ("Add", 6, [X, Y], {}, X + Y),
    ("Pow", 6, [Y, C], {"broadcast": 1, "axis": 1}, Y**CHANNEL),
    ("Equal", 6, [X.astype(np.int32), C.astype(np.int32)], {"broadcast": 1, "axis": 1},
     X.astype(np.int32) == CHANNEL.astype(np.int32)),
    ("Greater", 6, [X, C], {"broadcast": 1, "axis": 1}, X > CHANNEL),
    ("Less", 6, [X, C], {"broadcast": 1, "axis": 1}, X < CHANNEL),
    *(
        (op, 6, [X > 0, C > 1], {"broadcast": 1, "axis": 1}, function(X > 0, CHANNEL > 1))
        for op, function in (("And", np.logical_and), ("Or", np.logical_or), ("Xor", np.not_equal))
    ),
]  # fmt: skip


def model_of(
    op: str, opset: int, inputs: list[np.ndarray], attributes: dict[str, Any], result: np.ndarray
) -> onnx.ModelProto:
    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(name, kind, array.shape)

    arrays = [np.asarray(array) for array in inputs]
    names = [f"x{i}" for i in range(len(arrays))]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)],
        "old",
        [info(name, array) for name, array in zip(names, arrays, strict=True)],
        [info("y", result)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_an_operator_means_what_it_meant(case: tuple[Any, ...]) -> None:
    expected = case[4]
    model = upgraded(model_of(*case))
    onnx.checker.check_model(model, full_check=True)
    feeds = {f"x{i}": np.asarray(array) for i, array in enumerate(case[2])}
    (result,) = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["GRU", "LSTM", "RNN"])
def test_recurrent_layers(op: str) -> None:
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[op]
    x, w, r = (RNG.standard_normal(s).astype(np.float32)
               for s in ((5, 2, 3), (1, 4 * gates, 3), (1, 4 * gates, 4)))  # fmt: skip
    attributes = {"hidden_size": 4, "output_sequence": 1}
    old = model_of(op, 1, [x, w, r], attributes, np.zeros((5, 1, 2, 4), np.float32))
    new = model_of(op, 17, [x, w, r], {"hidden_size": 4}, np.zeros((5, 1, 2, 4), np.float32))
    new.ir_version = 8
    feeds = {"x0": x, "x1": w, "x2": r}
    results = [
        ort.InferenceSession(m.SerializeToString()).run(None, feeds)[0]
        for m in (upgraded(old), new)
    ]
    np.testing.assert_array_equal(*results)


def test_every_adapter_of_the_first_opsets_is_run() -> None:
    recurrent = {("GRU", 7), ("LSTM", 7), ("RNN", 7)}
    for op, version in ADAPTERS.keys() - recurrent:
        if version <= 7:
            assert any(c[0] == op and c[1] < version for c in CASES), f"{op} to {version}"


def test_a_rank_that_is_not_known_is_told() -> None:
    model = model_of("Add", 6, [X, C], {"broadcast": 1, "axis": 1}, X)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match="the rank of its input 'x0' is not known"):
        canonical_model(model)


# ---- networks ------------------------------------------------------------------------------------


def network(opset: int) -> onnx.ModelProto:
    """A small convolutional network as exporters of the time wrote it."""
    old = opset < 7
    hint: dict[str, Any] = {"consumed_inputs": [0]} if opset < 6 else {}
    broadcast: dict[str, Any] = {"broadcast": 1, "axis": 1} if old else {}
    rng = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) * 0.3, name)

    bias = weight("conv.bias", 4) if old else weight("conv.bias", 4, 1, 1)
    weights = [weight("conv.weight", 4, 1, 3, 3), bias, weight("fc.weight", 36, 3),
               weight("fc.bias", 3)]  # fmt: skip
    shape = numpy_helper.from_array(np.array([-1, 36]), "shape")
    reshape = (
        helper.make_node("Reshape", ["r"], ["flat"], shape=[-1, 36], **hint)
        if opset < 5
        else helper.make_node("Reshape", ["r", "shape"], ["flat"])
    )
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "conv.weight"], ["c"], kernel_shape=[3, 3]),
            helper.make_node("Add", ["c", "conv.bias"], ["b"], **broadcast, **hint),
            helper.make_node("Relu", ["b"], ["r"], **hint),
            reshape,
            helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["scores"],
                             **({"broadcast": 1} if old else {})),
        ],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 5, 5])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 3])],
        [*weights, *([shape] if opset >= 5 else [])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)
    if opset == 1:  # nobody stated opsets yet, and every initializer was an input
        model.ir_version = 2
        del model.opset_import[:]
        model.graph.input.extend(
            helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in weights
        )
    return model


def trained(model: onnx.ModelProto, folder: Path, loss: str) -> list[float]:
    written = onnxtrain.prepare(model, folder, loss=loss, optimizer="sgd")
    assert set(written.trainable) == {"conv.weight", "conv.bias", "fc.weight", "fc.bias"}
    session = onnxtrain.TrainingSession.from_folder(folder)
    session.set_learning_rate(0.1)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, 1, 5, 5)).astype(np.float32)
    labels = rng.integers(0, 3, 6)
    target = labels if loss == "cross_entropy" else np.eye(3, dtype=np.float32)[labels]
    return [float(session.step(x, target)[0]) for _ in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_every_opset_trains_alike(loss: str, tmp_path: Path) -> None:
    opsets = (1, 2, 4, 5, 6, 7, 9, 11, 13)
    runs = [trained(network(opset), tmp_path / str(opset), loss) for opset in opsets]
    assert runs[0][-1] < runs[0][0]
    for run in runs[1:]:
        np.testing.assert_allclose(run, runs[0], rtol=1e-5)


@pytest.mark.parametrize("opset", [1, 6, 9, 11])
def test_the_conversion_is_noted(opset: int, tmp_path: Path) -> None:
    given = network(opset)
    before = given.SerializeToString(deterministic=True)
    written = onnxtrain.prepare(given, tmp_path)
    assert f"The model has opset {opset}: it was converted to opset 18." in written.notes
    assert given.SerializeToString(deterministic=True) == before
    assert onnxtrain.inspect(given).can_train


def test_a_recent_opset_needs_no_word(tmp_path: Path) -> None:
    assert onnxtrain.prepare(network(13), tmp_path).notes == ()


def test_blocks_upgrade_the_model_that_they_add_to() -> None:
    with onnxblock.base(network(9)) as accessor:
        onnxblock.loss.CrossEntropyLoss()("scores")
        assert [o.version for o in accessor.model.opset_import] == [18]
        onnx.checker.check_model(accessor.model, full_check=True)
