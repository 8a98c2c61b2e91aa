"""The graphs of optimizers: updates in place, plain operators, the interface as blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from allowed_ops import EMITTED_OPS
from onnxtrain import onnxblock
from onnxtrain.errors import BlockError, OnnxTrainError
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.optimizers import chunked, multi_tensor
from onnxtrain.onnxblock.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ClipGradNorm,
    ClipGradValue,
    Lion,
    Optimizer,
    RMSprop,
    late_readers,
    write_update,
)
from optimizer_cases import (
    RATE,
    TYPES,
    Case,
    norm_to,
    of_cases,
    sized,
    values,
    values_to,
)
from optimizing import Training, optimizer_graph, optimizer_model

# ---- in place -----------------------------------------------------------------------------------

LEVELS = [
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
]


@pytest.fixture(params=["whole", "chunked", "multi"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tensors of a few hundred elements are updated."""
    monkeypatch.setattr(chunked, "CHUNK", 32)
    monkeypatch.setattr(multi_tensor, "SMALL", 4096 if request.param == "multi" else 0)
    return str(request.param)


@pytest.mark.parametrize("dtype", TYPES)
@of_cases
def test_in_place(case: Case, way: str, dtype: Any) -> None:
    """Bound to the memory of the inputs, the outputs are bit for bit the same."""
    start, gradients = sized(0, dtype), [sized(i + 1, dtype) for i in range(3)]
    expected = Training(case.optimizer, start)
    for step in gradients:
        expected.step(step, RATE)
    for level in LEVELS:
        training = Training(
            case.optimizer,
            start,
            in_place=True,
            chunked=way == "chunked",
            level=level,
            threads=2,
        )
        for step in gradients:
            training.step(step, RATE)
        for name, array in expected.arrays.items():
            np.testing.assert_array_equal(training.arrays[name], array, err_msg=name)


@of_cases
def test_nothing_reads_what_was_overwritten(case: Case, way: str) -> None:
    for dtype in TYPES:
        graph = optimizer_graph(case.optimizer, sized(0, dtype), way == "chunked")
        inputs = {value.name: value for value in graph.inputs}
        assert len(graph.outputs) == 1 + 3 * (1 + case.states + (dtype == np.float16))
        for updated in graph.outputs[1:]:
            old = inputs[str(updated.name).removesuffix(".updated")]
            assert not late_readers(old, updated), updated.name


def test_late_readers_are_found() -> None:
    """Also through views, and in bodies."""
    x, y, flag = (ir.Value(name=n) for n in ("x", "y", "flag"))
    x.dtype = y.dtype = ir.DataType.FLOAT
    x.shape = y.shape = ir.Shape([4])
    flag.dtype, flag.shape = ir.DataType.BOOL, ir.Shape([])
    graph = ir.Graph([x, y, flag], [], nodes=[], name="g", opset_imports={"": 18})
    op = Ops(graph, 18)
    before = op.Mul(x, 2.0)
    view = op.Reshape(x, [2, 2])
    updated = op.Sub(x, before)
    late = op.Exp(view)
    body = op.body([], lambda: [op.Neg(x)])
    nested = op.call("If", flag, then_branch=body, else_branch=op.body([], lambda: [op.Neg(y)]))[0]
    assert set(late_readers(x, updated)) == {
        n for n in (view.producer(), late.producer(), nested.producer())
    }
    assert not late_readers(y, nested)


@pytest.mark.parametrize(
    ("elements", "size"),
    [
        (4_718_592, 262_144),
        (30_522 * 128, 30_522 * 8),
        (524_288, 262_144),
        (524_287, None),
        (1_000_003, None),
        (1_000_000, 250_000),
        (0, None),
    ],
)
def test_chunk_size(elements: int, size: int | None) -> None:
    assert chunked.chunk_size(elements) == size


# ---- the graph ----------------------------------------------------------------------------------


def assert_plain(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    used = {(n.domain, n.op_type) for n in ir.from_proto(model).graph.all_nodes()}
    assert {domain for domain, _ in used} == {""}
    assert {op for _, op in used} <= EMITTED_OPS | {"ReduceSumSquare"}


@pytest.mark.parametrize("dtype", TYPES)
@of_cases
def test_graph_is_plain(case: Case, way: str, dtype: Any) -> None:
    model = optimizer_model(case.optimizer, sized(0, dtype), way == "chunked")
    assert_plain(model)
    kinds = [node.op_type for node in ir.from_proto(model).graph.all_nodes()]
    assert kinds.count("Pow") <= 2, "bias corrections are computed once for all parameters"
    cut = kinds.count("Scan")
    assert cut == 2 * (way == "chunked"), "the table and the vector; 31 elements cannot be cut"
    assert kinds.count("Split") == (way == "multi") * (1 + case.states + (dtype == np.float16))


@pytest.mark.parametrize(
    ("optimizer", "passes"),
    [
        (AdamW(), 12),
        (AdamW(weight_decay=0.1), 13),
        (AdamW(clip_grad=ClipGradNorm(1.0)), 12),
        (AdamW.torch(), 13),
        (Adam(), 12),
        (Adam(weight_decay=0.1), 14),
        (SGD(), 2),
        (SGD(ClipGradNorm(1.0)), 2),
        (SGD(weight_decay=0.1), 3),
        (SGD(momentum=0.9), 4),
        (SGD(momentum=0.9, nesterov=True), 6),
        (RMSprop(), 9),
        (RMSprop(momentum=0.5), 11),
        (RMSprop(centered=True), 15),
        (Adagrad(), 7),
        (Lion(), 8),
        (Lion(weight_decay=0.1), 9),
    ],
)
def test_number_of_passes(optimizer: Optimizer, passes: int) -> None:
    graph = optimizer_graph(optimizer, {"w": np.zeros((5, 7), np.float32)})
    written = [n for n in graph.all_nodes() if "optimizer/w/" in str(n.name)]
    assert len(written) == passes


def tensor(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros(shape, np.float32), name)


@pytest.mark.parametrize("opset", [None, 12, 18, 21])
def test_as_a_block(opset: int | None) -> None:
    """The interface that `docs/format.md` describes."""
    parameters = [tensor("w", 3, 4), tensor("b", 4)], [tensor("frozen", 2)]
    block = AdamW(clip_grad=ClipGradNorm(1.0))
    with onnxblock.empty_base(opset) as accessor:
        flag = block(parameters)
        assert flag == accessor.model.graph.output[0].name
        assert len(accessor.model.graph.output) == 7
    model = block.to_model_proto()
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == max(18, opset or 18)
    assert flag.startswith("onnx::adamw.updated_flag::")
    described = {
        "input": ["learning_rate", "step", "w", "w_grad", "w.momentum0", "w.momentum1",
                  "b", "b_grad", "b.momentum0", "b.momentum1"],
        "output": [flag, "w.updated", "w.momentum0.updated", "w.momentum1.updated",
                   "b.updated", "b.momentum0.updated", "b.momentum1.updated"],
    }  # fmt: skip
    for kind, names in described.items():
        assert [info.name for info in getattr(model.graph, kind)] == names
    types = {
        info.name: (info.type.tensor_type.elem_type,
                    [d.dim_value for d in info.type.tensor_type.shape.dim])
        for info in (*model.graph.input, *model.graph.output)
    }  # fmt: skip
    assert types["learning_rate"] == (TensorProto.FLOAT, [1])
    assert types["step"] == (TensorProto.INT64, [1])
    assert types[flag] == (TensorProto.BOOL, [1])
    for name in ("w", "w_grad", "w.momentum1", "w.updated", "w.momentum0.updated"):
        assert types[name] == (TensorProto.FLOAT, [3, 4])
    ort.InferenceSession(model.SerializeToString())


def test_block_twice_in_a_model() -> None:
    with onnxblock.empty_base():
        SGD()(([tensor("w", 2)], []))
        with pytest.raises(BlockError, match="'learning_rate'"):
            SGD()(([tensor("v", 2)], []))


def test_block_beside_old_operators() -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    graph = helper.make_graph([node], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    with onnxblock.base(model) as accessor:
        SGD()(([tensor("w", 2)], []))
    onnx.checker.check_model(accessor.model, full_check=True)  # it was upgraded


def test_nothing_to_optimize() -> None:
    with onnxblock.empty_base(), pytest.raises(OnnxTrainError, match="nothing to optimize"):
        AdamW()(([], [tensor("frozen", 2)]))


def test_clip_of_a_sequence() -> None:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    with onnxblock.empty_base() as accessor:
        accessor.model.graph.input.append(helper.make_value_info("gradients", kind))
        with pytest.raises(BlockError, match="not a tensor"):
            ClipGradNorm(1.0)("gradients")


def test_fused_with_the_gradients() -> None:
    """In a graph that computes gradients: w' = w − rate·(2·x·w), b' = b − rate·2."""
    x, w, b = (ir.Value(name=n) for n in "xwb")
    for value in (x, w, b):
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape([3])
    graph = ir.Graph([x, w, b], [], nodes=[], name="step", opset_imports={"": 18})
    op = Ops(graph, 18)
    gradients = {w: op.Mul(op.Mul(x, w), 2.0), b: op.full_like(b, 2.0)}
    graph.outputs.extend(write_update(op, graph, SGD(momentum=0.5), [w, b], gradients))
    assert [v.name for v in graph.inputs] == [
        "x", "w", "b", "w.momentum0", "b.momentum0", "learning_rate", "step",
    ]  # fmt: skip
    assert [v.name for v in graph.outputs] == [
        "w.updated", "w.momentum0.updated", "b.updated", "b.momentum0.updated",
    ]  # fmt: skip
    model = ir.to_proto(ir.Model(graph, ir_version=8))
    assert_plain(model)
    session = ort.InferenceSession(model.SerializeToString())
    feeds = {v.name: np.full(3, i + 1.0, np.float32) for i, v in enumerate(graph.inputs[:5])}
    feeds |= {"learning_rate": np.float32([0.1]), "step": np.int64([1])}
    found = session.run(None, feeds)
    expected = [2 - 0.1 * (2 + 4), 2 + 4, 3 - 0.1 * (2.5 + 2), 2.5 + 2]
    for array, number in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, np.full(3, number), rtol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("clip", "reference"),
    [(ClipGradNorm(0.5), norm_to(0.5)), (ClipGradNorm(1e3), norm_to(1e3)),
     (ClipGradValue(0.25), values_to(0.25))],
    ids=["norm", "norm-idle", "value"],
)  # fmt: skip
def test_clipping_as_a_block(clip: Any, reference: Callable[[Any], Any], dtype: Any) -> None:
    gradients = values(3, dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    with onnxblock.empty_base() as accessor:
        accessor.model.graph.input.extend(
            helper.make_tensor_value_info(n, kind, a.shape) for n, a in gradients.items()
        )
        outputs = clip(*gradients)
        accessor.model.graph.output.extend(
            helper.make_tensor_value_info(o, kind, a.shape)
            for o, a in zip(outputs, gradients.values(), strict=True)
        )
        model = onnx.ModelProto()
        model.CopyFrom(accessor.model)
    onnx.checker.check_model(model, full_check=True)
    actual = ort.InferenceSession(model.SerializeToString()).run(None, gradients)
    tensors = [torch.zeros(a.shape, dtype=torch.float64) for a in gradients.values()]
    for tensor, array in zip(tensors, gradients.values(), strict=True):
        tensor.grad = torch.from_numpy(np.asarray(array, np.float64))
    reference(tensors)
    precision = 2e-3 if dtype == np.float16 else 1e-6
    for array, tensor in zip(actual, tensors, strict=True):
        np.testing.assert_allclose(array, tensor.grad, rtol=precision)
