"""Specs of rules/activation.py."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from gradcheck import Spec, check_spec, ids, run, special_values

SPECS = [
    Spec("Relu", [(3, 4)], away_from=(0,)),
    Spec("LeakyRelu", [(3, 4)], {"alpha": 0.3}, away_from=(0,)),
    Spec("LeakyRelu", [(3, 4)], {"alpha": -0.3}, id="negative", away_from=(0,)),
    Spec("PRelu", [(3, 4), (4,)], away_from=(0,)),
    Spec("PRelu", [(2, 3, 4), (3, 1)], id="per-channel", away_from=(0,)),
    Spec("ThresholdedRelu", [(3, 4)], {"alpha": 0.7}, away_from=(0.7,)),
    Spec("Shrink", [(3, 4)], {"lambd": 0.8, "bias": 0.3}, away_from=(-0.8, 0.8)),
    Spec("HardSigmoid", [(3, 4)], {"alpha": 0.5, "beta": 0.4}, away_from=(-0.8, 1.2)),
    Spec("HardSwish", [(3, 4)], domain=(-5, 5), away_from=(-3, 3)),
    Spec("Sigmoid", [(3, 4)]),
    Spec("Elu", [(3, 4)], {"alpha": 0.7}, away_from=(0,)),
    Spec("Selu", [(3, 4)], away_from=(0,)),
    Spec("Selu", [(3, 4)], {"alpha": 1.2, "gamma": 0.9}, id="attributes", away_from=(0,)),
    Spec("Celu", [(3, 4)], {"alpha": 0.7}, away_from=(0,), second_opinion=False),  # float32 only
    Spec("Softplus", [(3, 4)]),
    Spec("Softsign", [(3, 4)]),
    Spec("Mish", [(3, 4)]),
    Spec("Gelu", [(3, 4)], opset=20, second_opinion=False),  # it computes Erf in float32
    Spec("Gelu", [(3, 4)], {"approximate": "tanh"}, id="tanh", opset=20),
    Spec("Swish", [(3, 4)], {"alpha": 1.3}, opset=24),
    Spec("Swish", [(3, 4)], id="plain", opset=24),
    Spec("Dropout", [(3, 4)], id="inference", eps=1.0),
    Spec("Dropout", [(3, 4), np.array(0.3, np.float32), np.array(False)],
         id="off", wrt=[0], eps=1.0),
    Spec("Dropout", [(3, 4), np.array(0.3, np.float32), np.array(False)],
         id="off-constant", wrt=[0], constants=(1, 2), eps=1.0),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


@pytest.mark.parametrize(
    ("op", "inputs", "expected"),
    [
        ("Relu", [[-1, 0, 1, np.inf]], [[0, 0, 1, 1]]),
        ("LeakyRelu", [[-1, 0, 1]], [[0.01, 0.01, 1]]),
        ("Sigmoid", [[-1000, 0, 1000]], [[0, 0.25, 0]]),
        ("Softplus", [[-1000, 0, 1000]], [[0, 0.5, 1]]),
        ("Elu", [[-1000, 0, 1000]], [[0, 1, 1]]),
        ("Celu", [[-1000, 0, 1000]], [[0, 1, 1]]),
        ("Mish", [[-1000, 1000]], [[0, 1]]),
        ("HardSwish", [[-4, -3, 0, 3, 4]], [[0, 0, 0.5, 1, 1]]),
        ("Shrink", [[-0.5, 0, 0.6]], [[0, 0, 1]]),
    ],
)
def test_special_values(op: str, inputs: list, expected: list) -> None:
    special_values(op, inputs, expected)


@pytest.mark.parametrize("masked", [True, False], ids=["with-mask", "without-mask"])
@pytest.mark.parametrize("training", ["constant", "input"])
@pytest.mark.parametrize("ratio", [0.25, None], ids=["ratio", "default-ratio"])
def test_dropout_in_training_passes_what_it_kept(masked, training, ratio) -> None:
    model = _dropout_model(masked, training == "constant", ratio)
    extended = onnxtrain.gradient(model, "x", of="y")
    x = np.random.default_rng(0).uniform(1, 2, (20, 30)).astype(np.float32)
    feeds = {"x": x, "y_grad": np.full_like(x, 3.0)}
    y, dx = run(extended, {**feeds, "training": np.array(True)})
    kept = y != 0
    assert 0.3 < kept.mean() < 0.9
    np.testing.assert_allclose(dx, np.where(kept, 3.0 / (1 - (ratio or 0.5)), 0), rtol=1e-6)
    if training == "input":
        y, dx = run(extended, {**feeds, "training": np.array(False)})
        np.testing.assert_array_equal(y, x)
        np.testing.assert_array_equal(dx, 3.0)


def _dropout_model(masked: bool, constant: bool, ratio: float | None) -> onnx.ModelProto:
    node = helper.make_node(
        "Dropout", ["x", "ratio" if ratio else "", "training"], ["y", "m"] if masked else ["y"]
    )
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 30])]
    initializers = []
    if ratio:
        initializers.append(numpy_helper.from_array(np.array(ratio, np.float32), "ratio"))
    if constant:
        initializers.append(numpy_helper.from_array(np.array(True), "training"))
    else:
        inputs.append(helper.make_tensor_value_info("training", TensorProto.BOOL, []))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 30])]
    graph = helper.make_graph([node], "dropout", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
