"""What leaves is swept, and stamped with the lowest versions that its content permits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.errors import ModelError
from onnxtrain.offline.graph.sweep import sweep
from onnxtrain.offline.graph.versions import FLOOR_OPSET, least_ir_version
from onnxtrain.offline.writer import opset_downgrade
from onnxtrain.offline.writer.opset_stamp import stamp

NEWEST = onnx.defs.onnx_opset_version()
F, F16, BF16, F64 = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.DOUBLE,
)
I64, I32, BOOL, U8, STRING = (
    ir.DataType.INT64,
    ir.DataType.INT32,
    ir.DataType.BOOL,
    ir.DataType.UINT8,
    ir.DataType.STRING,
)
F8, F8Z, INT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E4M3FNUZ, ir.DataType.INT4


# ---- every change of an operator since the floor is classified -----------------------------------


def history() -> dict[str, list[onnx.defs.OpSchema]]:
    found: dict[str, list[onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            found.setdefault(schema.name, []).append(schema)
    return {op: sorted(s, key=lambda schema: schema.since_version) for op, s in found.items()}


def changes() -> dict[tuple[str, int], tuple[onnx.defs.OpSchema, onnx.defs.OpSchema]]:
    return {
        (op, newer.since_version): (older, newer)
        for op, schemas in history().items()
        for older, newer in pairwise(schemas)
        if newer.since_version > FLOOR_OPSET
    }


def test_every_change_is_classified_once() -> None:
    tables = [
        opset_downgrade.WIDENED,
        opset_downgrade.GUARDED.keys(),
        opset_downgrade.CLOSED.keys(),
    ]
    classified = [step for table in tables for step in table]
    assert len(classified) == len(set(classified)), "a change is in two tables"
    missing = changes().keys() - set(classified)
    assert not missing, f"read the changelog of onnx and classify: {sorted(missing)}"
    stale = {s for s in classified if s[1] <= NEWEST} - changes().keys()
    assert not stale, f"no such change: {sorted(stale)}"


@pytest.mark.parametrize("step", sorted(opset_downgrade.WIDENED), ids=lambda s: f"{s[0]}-{s[1]}")
def test_widened_operators_keep_their_signature(step: tuple[str, int]) -> None:
    if step not in changes():
        pytest.skip("newer than the installed onnx")
    older, newer = changes()[step]
    for name, attribute in older.attributes.items():
        assert newer.attributes[name].default_value == attribute.default_value
        assert newer.attributes[name].required == attribute.required
    for name in newer.attributes.keys() - older.attributes.keys():
        assert not newer.attributes[name].required
    for before, after in ((older.inputs, newer.inputs), (older.outputs, newer.outputs)):
        assert [p.name for p in before] == [p.name for p in after][: len(before)]
        assert all(p.option.name == "Optional" for p in after[len(before) :])


# ---- how low a node can go ----------------------------------------------------------------------


@dataclass(frozen=True)
class Low:
    """A node of opset `at` that can be stamped `low`, with the attributes that it then has."""

    op: str
    types: Sequence[ir.DataType | None]
    low: int
    attrs: Mapping[str, Any] = field(default_factory=dict)
    left: Mapping[str, Any] | None = None
    at: int = NEWEST
    to: ir.DataType | None = F
    dims: Sequence[int] = (2, 3, 4, 5)
    outputs: int = 1
    id: str = ""


LOW = [
    Low("Relu", [F], 18),
    Low("Relu", [None], 18, to=None, id="unknown-type-that-does-not-matter"),
    Low("Reshape", [None, I64], 25, to=None, id="unknown-type"),
    Low("Reshape", [F, I64], 18, to=None, id="type-known-from-input"),
    Low("Reshape", [INT4, I64], 21, to=INT4),
    Low("Reshape", [F8, I64], 19, to=F8),
    Low("Transpose", [F8], 21, {"perm": [0, 1, 3, 2]}, to=F8),
    Low("Conv", [F, F], 18, {"kernel_shape": [1, 1]}),
    Low("Conv", [BF16, BF16], 22, to=BF16),
    Low("Sin", [BF16], 22, at=18, to=BF16, id="not-allowed-where-it-is"),
    Low("IsInf", [F16], 20, at=18, to=BOOL, id="not-allowed-where-it-is"),
    Low("IsInf", [F], 18, to=BOOL),
    Low("IsNaN", [F16], 18, to=BOOL),
    Low("Equal", [STRING, STRING], 19, to=BOOL),
    Low("Equal", [F, F], 18, to=BOOL),
    Low("ReduceMax", [BOOL], 20, to=BOOL),
    Low("ReduceMax", [F, I64], 18),
    Low("Cast", [F], 18, {"to": F16, "saturate": 1, "round_mode": "up"}, {"to": F16}, to=F16),
    Low("Cast", [F], 19, {"to": F16, "saturate": 0}, to=F16, id="not-the-default"),
    Low("Cast", [F], 19, {"to": F8}, to=F8, id="float8"),
    Low("Cast", [F], 24, {"to": F8Z}, to=F8Z, id="infinity-in-float8"),
    Low("CastLike", [F, F16], 18, {"saturate": 1}, {}, to=F16),
    Low("AveragePool", [F], 18, {"kernel_shape": [2, 2], "dilations": [1, 1]},
        {"kernel_shape": [2, 2]}),
    Low("AveragePool", [F], 19, {"kernel_shape": [2, 2], "dilations": [2, 1]}, id="dilated"),
    Low("AveragePool", [F], 22, {"kernel_shape": [2, 2], "ceil_mode": 1}, id="ceil"),
    Low("MaxPool", [F], 18, {"kernel_shape": [2, 2], "ceil_mode": 0, "dilations": [2, 2]}),
    Low("MaxPool", [F], 22, {"kernel_shape": [2, 2], "ceil_mode": 1}, id="ceil"),
    Low("MaxPool", [F], 18, {"kernel_shape": [2, 2], "ceil_mode": 1}, at=18, id="ceil-at-18"),
    Low("Pad", [F, I64], 18, {"mode": "reflect"}),
    Low("Pad", [F, I64], 19, {"mode": "wrap"}, id="wrap"),
    Low("Resize", [F, F, F], 18, {"coordinate_transformation_mode": "half_pixel"}),
    Low("Resize", [F, F, F], 19, {"coordinate_transformation_mode": "half_pixel_symmetric"},
        id="symmetric"),
    Low("GridSample", [F, F], 18, {"mode": "linear"}, {"mode": "bilinear"}),
    Low("GridSample", [F, F], 18, {"mode": "cubic"}, {"mode": "bicubic"}, id="cubic"),
    Low("GridSample", [F, F], 18, {"mode": "nearest"}, id="nearest"),
    Low("GridSample", [F, F], 20, {"mode": "linear"}, dims=(2, 3, 4, 5, 6), id="volume"),
    Low("GridSample", [BF16, BF16], 22, {"mode": "linear"}, to=BF16, id="bfloat16"),
    Low("GridSample", [F, F], 18, {"mode": "bilinear"}, at=18, id="at-18"),
    Low("GroupNormalization", [F, F, F], 21, {"num_groups": 3}),
    Low("GroupNormalization", [F, F, F], 18, {"num_groups": 3}, at=20, id="old"),
    Low("DFT", [F], 20),
    Low("Gelu", [F], 20),
    Low("Dropout", [F, F, BOOL], 18, outputs=2),
    Low("Range", [F, F, F], 18, {"stash_type": 1}, {}),
    Low("Range", [F16, F16, F16], 27, to=F16, id="float16"),
    Low("Mod", [I64, I64], 18, to=I64),
    Low("Mod", [F, F], 18, {"fmod": 1}, id="fmod"),
    Low("Mod", [F, F], 28, {"fmod": 0}, id="floats"),
    Low("SpaceToDepth", [F], 18, {"blocksize": 2, "mode": "DCR"}, {"blocksize": 2}),
    Low("SpaceToDepth", [F], 28, {"blocksize": 2, "mode": "CRD"}, id="CRD"),
    Low("QuantizeLinear", [F, F, U8], 18,
        {"axis": 1, "saturate": 1, "block_size": 0, "precision": 0, "output_dtype": 0},
        {"axis": 1}, to=U8),
    Low("QuantizeLinear", [F16, F, U8], 23, to=U8, id="mixed"),
    Low("QuantizeLinear", [F16, F16, U8], 19, to=U8, id="float16"),
    Low("QuantizeLinear", [F, F], 21, {"output_dtype": U8}, to=U8, id="output-type"),
    Low("DequantizeLinear", [U8, F, U8], 18),
    Low("DequantizeLinear", [U8, F, U8], 21, {"block_size": 2}, id="blocks"),
    Low("Attention", [F, F, F], 23, {"left_window_size": -1}, {}),
    Low("Attention", [F, F, F], 25, {"left_window_size": 2}, id="window"),
    Low("Attention", [F, F, F, BOOL], 24, dims=(2, 3, 4, 5), id="mask-of-other-length"),
    Low("Attention", [F, F, F, BOOL], 23, dims=(2, 3, 4, 4), id="mask"),
    Low("ReduceLogSum", [F, I64], 18),
    Low("TopK", [F, I64], 18, outputs=2),
    Low("Constant", [], 18, {"value_float": 1.0}),
    Low("LSTM", [F, F, F], 18, {"hidden_size": 5}, outputs=3),
    Low("Celu", [F64], 28, to=F64),
    Low("LayerNormalization", [F, F], 18),
    Low("NotInOnnx", [F], 22, at=22, id="unknown-operator"),
]  # fmt: skip


@pytest.mark.parametrize("case", LOW, ids=lambda c: f"{c.op}{'-' + c.id if c.id else ''}")
def test_lowest_opset(case: Low) -> None:
    if max(case.low, case.at) > NEWEST:
        pytest.skip("newer than the installed onnx")
    model = one_node(case)
    stamp(model)
    assert model.opset_imports == {"": case.low}
    node = model.graph.node(0)
    left = case.attrs if case.left is None else case.left
    found = {a.name: a.value for a in node.attributes.values()}
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()} == dict(left)
    assert model.ir_version == max(8, IR_OF_OPSET[case.low], IR_OF_TYPE.get(case.to, 0))


IR_OF_OPSET = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13, 26: 13, 27: 13, 28: 14}
IR_OF_TYPE = {F8: 9, F8Z: 9, INT4: 10}


def test_the_highest_of_the_nodes_counts() -> None:
    x = ir.Value(name="x", type=ir.TensorType(F), shape=ir.Shape([2, 3]))
    first = ir.node("Relu", [x])
    second = ir.node("Gelu", [first.outputs[0]])
    model = make_model([x], [first, second], NEWEST)
    stamp(model)
    assert model.opset_imports == {"": 20}


def test_a_newer_opset_is_taken_where_types_ask_for_it() -> None:
    """A rule may write an operator that takes bfloat16 only in newer opsets."""
    x = ir.Value(name="x", type=ir.TensorType(BF16), shape=ir.Shape([2, 3]))
    first = ir.node("Relu", [x])
    second = ir.node("Sin", [first.outputs[0]])
    for node in (first, second):
        node.outputs[0].dtype, node.outputs[0].shape = BF16, ir.Shape([2, 3])
    model = make_model([x], [first, second], 18)
    stamp(model)
    assert model.opset_imports == {"": 22}
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_nodes_that_exclude_each_other_are_refused() -> None:
    x = ir.Value(name="x", type=ir.TensorType(BF16), shape=ir.Shape([2, 3]))
    y = ir.Value(name="y", type=ir.TensorType(F), shape=ir.Shape([1, 4, 3]))
    scale = ir.Value(name="s", type=ir.TensorType(F), shape=ir.Shape([2]))
    old = ir.node("GroupNormalization", [y, scale, scale], {"num_groups": 2}, name="norm")
    new = ir.node("Sin", [x], name="sine")
    new.outputs[0].dtype = BF16
    model = make_model([x, y, scale], [old, new], 18)
    with pytest.raises(ModelError, match=r"Sin \(node 'sine'\).*22.*GroupNormalization.*'norm'"):
        stamp(model)


def test_bodies_count_too() -> None:
    condition = ir.Value(name="c", type=ir.TensorType(BOOL), shape=ir.Shape([]))
    x = ir.Value(name="x", type=ir.TensorType(F), shape=ir.Shape([2, 3]))

    def branch(op: str) -> ir.Graph:
        node = ir.node(op, [x])
        node.outputs[0].name, node.outputs[0].dtype = f"{op}_out", F
        return ir.Graph([], [node.outputs[0]], nodes=[node], name=op)

    both = {"then_branch": branch("Gelu"), "else_branch": branch("Relu")}
    choice = ir.node("If", [condition], both)
    choice.outputs[0].dtype = F
    model = make_model([condition, x], [choice], NEWEST)
    stamp(model)
    assert model.opset_imports == {"": 20}
    both["then_branch"].node(0).op_type = "Tanh"
    stamp(model)
    assert model.opset_imports == {"": 18}


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest", None])
def test_lowered_grid_sample_computes_the_same(mode: str | None) -> None:
    case = Low("GridSample", [F, F], 18, {} if mode is None else {"mode": mode}, at=22)
    model = one_node(case)
    for value, shape in zip(model.graph.inputs, [(1, 1, 4, 4), (1, 3, 3, 2)], strict=True):
        value.shape = ir.Shape(shape)
    before = ir.to_proto(model)
    stamp(model)
    after = ir.to_proto(model)
    assert (before.opset_import[0].version, after.opset_import[0].version) == (22, 18)
    rng = np.random.default_rng(0)
    feeds = {
        "x0": rng.standard_normal((1, 1, 4, 4)).astype(np.float32),
        "x1": rng.uniform(-1, 1, (1, 3, 3, 2)).astype(np.float32),
    }
    np.testing.assert_array_equal(run(before, feeds), run(after, feeds))


# ---- IR version and imports ---------------------------------------------------------------------


def test_ir_version_of_opsets() -> None:
    assert least_ir_version({"": 18}) == 8
    assert least_ir_version({"": 18, "some.domain": 7}) == 8
    assert least_ir_version({"": 21}) == 10
    assert least_ir_version({"": 18, "ai.onnx.ml": 5}) == 10
    assert least_ir_version({"": 7}) == 8


def test_notes_on_nodes_go_and_notes_on_the_model_stay() -> None:
    model = one_node(Low("Relu", [F], 18))
    model.metadata_props["author"] = "someone"
    node = model.graph.node(0)
    node.metadata_props["pkg.torch.onnx.stack_trace"] = "..."
    node.outputs[0].metadata_props["note"] = "..."
    model.graph.metadata_props["note"] = "..."
    stamp(model)
    proto = ir.to_proto(model)
    assert {p.key: p.value for p in proto.metadata_props} == {"author": "someone"}
    assert not proto.graph.node[0].metadata_props
    assert not proto.graph.output[0].metadata_props
    assert not proto.graph.metadata_props


def test_imports_that_no_node_uses_are_dropped() -> None:
    x = ir.Value(name="x", type=ir.TensorType(F), shape=ir.Shape([2]))
    own = ir.node("Special", [x], domain="my.domain")
    model = make_model([x], [own, ir.node("Relu", [x])], 20)
    model.opset_imports.update({"my.domain": 3, "com.microsoft": 1})
    stamp(model)
    assert model.opset_imports == {"": 18, "my.domain": 3}


def test_types_of_weights_count_for_the_ir_version() -> None:
    x = ir.Value(name="x", type=ir.TensorType(F), shape=ir.Shape([2]))
    codes = np.zeros(2, dtype=INT4.numpy())
    packed = ir.Value(name="w", const_value=ir.tensor(codes, dtype=INT4))
    model = make_model([x], [ir.node("Special", [x, packed], domain="my.domain")], 18)
    model.graph.register_initializer(packed)
    stamp(model)
    assert model.opset_imports[""] == 18
    assert model.ir_version == 10


def test_annotations_of_swept_tensors_go() -> None:
    proto = ir.to_proto(one_node(Low("Relu", [F], 18)))
    for tensor, scale in (("x0", "gone"), ("y0", "x0")):
        annotation = proto.graph.quantization_annotation.add(tensor_name=tensor)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=scale)
    model = ir.from_proto(proto)
    stamp(model)
    left = ir.to_proto(model).graph.quantization_annotation
    assert [a.tensor_name for a in left] == ["y0"]


# ---- sweeping -----------------------------------------------------------------------------------


def chain(length: int) -> ir.Graph:
    """A kept node, and a chain of nodes that leads nowhere."""
    x = ir.Value(name="x", type=ir.TensorType(F), shape=ir.Shape([2]))
    unused = ir.Value(name="unused", type=ir.TensorType(F), shape=ir.Shape([2]))
    kept = ir.node("Relu", [x])
    nodes = [kept]
    value = x
    for _ in range(length):
        node = ir.node("Neg", [value])
        value = node.outputs[0]
        nodes.append(node)
    return ir.Graph([x, unused], kept.outputs, nodes=nodes, name="g")


def test_dead_chains_go_and_inputs_stay() -> None:
    graph = chain(5)
    x = graph.inputs[0]
    graph.register_initializer(constant("lonely"))
    sweep(graph)
    assert [node.op_type for node in graph] == ["Relu"]
    assert [value.name for value in graph.inputs] == ["x", "unused"]
    assert not graph.initializers
    assert len(x.uses()) == 1


def test_sweeping_takes_linear_time() -> None:
    graph = chain(20_000)
    start = time.perf_counter()
    sweep(graph)
    assert len(graph) == 1
    assert time.perf_counter() - start < 5


def test_initializers_that_are_inputs_or_outputs_stay() -> None:
    graph = chain(0)
    default, result = constant("default"), constant("result")
    graph.register_initializer(default)
    graph.register_initializer(result)
    graph.inputs.append(default)
    graph.outputs.append(result)
    sweep(graph)
    assert set(graph.initializers) == {"default", "result"}


def test_bodies_are_swept_and_what_they_captured_is_freed() -> None:
    x = ir.Value(name="x", type=ir.TensorType(F), shape=ir.Shape([2]))
    condition = ir.Value(name="c", type=ir.TensorType(BOOL), shape=ir.Shape([]))
    captured = ir.node("Exp", [x])

    def branch(name: str) -> ir.Graph:
        dead = ir.node("Neg", captured.outputs)
        kept = ir.node("Relu", [x])
        kept.outputs[0].name = f"{name}_out"
        body = ir.Graph([], kept.outputs, nodes=[dead, kept], name=name)
        body.register_initializer(constant(f"{name}_lonely"))
        return body

    branches = {"then_branch": branch("then"), "else_branch": branch("else")}
    choice = ir.node("If", [condition], branches)
    graph = ir.Graph([x, condition], choice.outputs, nodes=[captured, choice], name="g")
    sweep(graph)
    assert [node.op_type for node in graph] == ["If"]
    for body in branches.values():
        assert [node.op_type for node in body] == ["Relu"]
        assert not body.initializers


def test_a_dead_node_frees_what_its_bodies_captured() -> None:
    x = ir.Value(name="x", type=ir.TensorType(F), shape=ir.Shape([2]))
    condition = ir.Value(name="c", type=ir.TensorType(BOOL), shape=ir.Shape([]))
    captured = ir.node("Exp", [x])
    kept = ir.node("Relu", [x])
    inner = ir.node("Neg", captured.outputs)
    body = ir.Graph([], inner.outputs, nodes=[inner], name="then")
    other = ir.node("Abs", captured.outputs)
    other_body = ir.Graph([], other.outputs, nodes=[other], name="else")
    choice = ir.node("If", [condition], {"then_branch": body, "else_branch": other_body})
    graph = ir.Graph([x, condition], kept.outputs, nodes=[captured, choice, kept], name="g")
    sweep(graph)
    assert [node.op_type for node in graph] == ["Relu"]


# ---- tools --------------------------------------------------------------------------------------


def constant(name: str) -> ir.Value:
    return ir.Value(name=name, const_value=ir.tensor(np.zeros(2, np.float32)))


def make_model(inputs: Sequence[ir.Value], nodes: Sequence[ir.Node], opset: int) -> ir.Model:
    outputs = nodes[-1].outputs
    for number, node in enumerate(nodes):
        for index, value in enumerate(node.outputs):
            value.name = value.name or f"v{number}_{index}"
            if value.dtype is None:
                value.dtype = F
    graph = ir.Graph(inputs, outputs, nodes=nodes, name="g", opset_imports={"": opset})
    return ir.Model(graph, ir_version=11)


def one_node(case: Low) -> ir.Model:
    inputs = []
    for index, dtype in enumerate(case.types):
        shape = ir.Shape(case.dims if dtype != I64 or index == 0 else [1])
        value = ir.Value(name=f"x{index}", shape=shape)
        if dtype is not None:
            value.dtype = dtype
        inputs.append(value)
    node = ir.node(case.op, inputs, dict(case.attrs), num_outputs=case.outputs, name="node")
    for index, output in enumerate(node.outputs):
        output.name = f"y{index}"
        output.shape = ir.Shape([None] * 4)
        if case.to is not None:
            output.dtype = case.to
        if index:
            output.dtype = {"TopK": I64, "Dropout": BOOL}.get(case.op, case.to)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], name="g", opset_imports={"": case.at})
    return ir.Model(graph, ir_version=11)


def run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Any:
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), providers=providers)
    return session.run(None, dict(feeds))[0]
