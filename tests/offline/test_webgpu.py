"""What is written for WebGPU in place of each operator that it lacks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import artifacts
from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.passes.webgpu import rewrite_for_webgpu, uncovered
from onnxtrain.offline.passes.webgpu.single import _one_minus_power
from onnxtrain.offline.passes.webgpu.unroll import MOST_STEPS

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 5, 3)).astype(np.float32)
SCORES, LABELS = X[:, :, 0], np.array([0, 4, 2, 4])
WEIGHTS = np.array([1, 2, 0.5, 1, 3], np.float32)
TIES = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.4999, 3.0, -2.6], np.float32)
FILL = numpy_helper.from_array(np.array([2.5], np.float32))

# Operator, attributes, inputs; constants are what rules ask to be known.
CASES: list[tuple[str, dict[str, Any], list[Any], dict[int, Any]]] = [
    ("Sum", {}, [X, X * 2, X[:1]], {}),
    ("Mean", {}, [X, X * 2], {}),
    ("Sign", {}, [np.array([-2, 0, 3.5], np.float32)], {}),
    ("Softsign", {}, [X], {}),
    ("Mish", {}, [X], {}),
    ("Selu", {}, [X], {}),
    ("IsNaN", {}, [np.array([-np.inf, 0, np.nan], np.float32)], {}),
    ("Round", {}, [TIES], {}),
    ("Or", {}, [X > 0, X > 1], {}),
    ("Xor", {}, [X > 0, X > 1], {}),
    ("Pow", {}, [np.abs(X), np.array(3)], {}),
    ("Pow", {}, [np.abs(X)], {1: np.array(2)}),
    ("Dropout", {}, [X], {}),
    ("ConstantOfShape", {"value": FILL}, [np.array([2, 3])], {}),
    ("LogSoftmax", {"axis": 1}, [X * 30], {}),
    ("OneHot", {"axis": 1}, [np.array([[1, -1], [0, 3]])], {1: np.array(4), 2: WEIGHTS[:2]}),
    ("OneHot", {}, [np.array([2, 1, 9])], {1: np.array(5), 2: WEIGHTS[:2]}),
    ("SpaceToDepth", {"blocksize": 2}, [X[:2, :4, :].repeat(4, 2).reshape(2, 3, 4, 4)], {}),
    ("NegativeLogLikelihoodLoss", {"reduction": "sum"}, [SCORES, LABELS], {}),
    *[
        ("SoftmaxCrossEntropyLoss", {"reduction": reduction, **ignored}, [*given, *weights], {})
        for reduction in ("mean", "sum", "none")
        for ignored in ({}, {"ignore_index": 4}, {"ignore_index": -100})
        for weights in ([], [WEIGHTS])
        for given in ([SCORES * 20, LABELS], [X, LABELS.reshape(4, 1).repeat(3, 1)])
    ],
]


def model_of(op: str, attributes: dict[str, Any], inputs: list[Any], constants: dict[int, Any]):
    """Return a model of one node, and what it is fed with."""
    names = [f"x{k}" for k in range(len(inputs) + len(constants))]
    given = [n for k, n in enumerate(names) if k not in constants]
    node = helper.make_node(op, names, ["y"], name="node", **attributes)
    types = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(given, inputs, strict=True)
    ]
    graph = helper.make_graph(
        [node], "g", types, [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(a, names[k]) for k, a in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    return model, dict(zip(given, inputs, strict=True))


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> Any:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    made = ir.from_proto(model)
    rewrite_for_webgpu(made)
    sweep(made.graph)
    proto: onnx.ModelProto = ir.to_proto(made)
    onnx.checker.check_model(proto, full_check=True)
    return proto


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)  # fmt: skip
def test_a_replacement_computes_the_same(case: Any) -> None:
    model, feeds = model_of(*case)
    made = rewritten(model)
    assert case[0] not in {n.op_type for n in made.graph.node} or case[0] == "Pow"
    assert uncovered(made) == []
    np.testing.assert_allclose(run(made, feeds), run(model, feeds), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("base", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("step", [1, 2, 10, 499, 500, 501, 5000, 1_000_000])
def test_bias_correction_keeps_its_digits(base: float, step: int) -> None:
    given = ir.Value(name="t")
    given.dtype, given.shape = ir.DataType.INT64, ir.Shape([])
    graph = ir.Graph([given], [], nodes=[], opset_imports={"": 18}, name="g")
    result = _one_minus_power(Ops(graph, 18), base, given)
    graph.outputs.append(result)
    found = run(ir.to_proto(ir.Model(graph, ir_version=8)), {"t": np.array(step)})
    assert abs(float(found) - (1 - base**step)) <= 4e-7 * (1 - base**step)


def test_a_loop_that_is_too_long_stays_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [artifacts_of_lstm(length, tmp_path / str(length)) for length in (3, MOST_STEPS + 1)]
    assert made[0].on_cpu == ()
    assert {item.op_type for item in made[1].on_cpu} == {"Scan"}
    assert "no WebGPU kernel for" in caplog.text
    assert "Scan(" in str(made[1])
    note = onnx.load(tmp_path / str(MOST_STEPS + 1) / "step_model.onnx").metadata_props[0].value
    assert '"target": "webgpu"' in note and '"on_cpu": ["Scan(' in note


def artifacts_of_lstm(length: int, folder: Path) -> artifacts.Artifacts:
    hidden = 2
    shapes = {"w": (1, 4 * hidden, 3), "r": (1, 4 * hidden, hidden)}
    nodes = [
        helper.make_node("LSTM", ["x", *shapes], ["all", "last"], hidden_size=hidden),
        helper.make_node("Squeeze", ["last", "zero"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [length, 4, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, hidden])],
        [
            *(numpy_helper.from_array(RNG.standard_normal(s).astype(np.float32), n)
              for n, s in shapes.items()),
            numpy_helper.from_array(np.array([0]), "zero"),
        ],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    with_level = logging.getLogger("onnxtrain")
    with_level.setLevel(logging.WARNING)
    return artifacts.generate_artifacts(
        model, loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.SGD,
        artifact_directory=folder, target="webgpu",
    )  # fmt: skip


def test_a_target_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    model, _ = model_of("Relu", {}, [X], {})
    with pytest.raises(OnnxTrainError, match="target is 'cpu' or 'cuda' or 'webgpu', not 'tpu'"):
        artifacts.generate_artifacts(model, artifact_directory=tmp_path, target="tpu")
