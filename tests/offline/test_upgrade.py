"""Old models mean at opset 18 what they meant at their own: the stock onnxruntime runs both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from old_nodes import (
    ADAPTED,
    COMPATIBLE,
    EMPTY,
    IMAGE,
    Array,
    Case,
    floats,
    one_node,
    vector,
)
from onnxtrain.errors import ModelError
from onnxtrain.offline.frontend.canonical_model import lift_constants
from onnxtrain.offline.frontend.canonicalize import release_initializers
from onnxtrain.offline.frontend.upgrade import upgrade_to_floor
from onnxtrain.offline.frontend.upgrade.rewrite import ADAPTERS
from onnxtrain.offline.graph.infer import check_structure, infer_shapes
from unchanged_operators import UNCHANGED

FLOOR = 18

RUNS = [
    pytest.param(case, opset, id=f"{case.op}-{opset}{'-' + case.id if case.id else ''}")
    for case in [*ADAPTED, *COMPATIBLE]
    for opset in case.opsets
]


@pytest.mark.parametrize(("case", "opset"), RUNS)
def test_same_results(case: Case, opset: int) -> None:
    model, feeds = one_node(case, opset)
    raised = raise_proto(model)
    check(raised, model)
    compare(model, raised, feeds)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, 2, -2, -1])
def test_softmax_of_unknown_rank(op: str, axis: int) -> None:
    case = Case(op, (12,), [(2, 3, 4)], {"axis": axis})
    model, feeds = one_node(case, 12)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    raised = raise_proto(model)
    assert len(raised.graph.node) == (1 if axis == -1 else 4)
    compare(model, raised, feeds)


def test_softmax_of_symbolic_image() -> None:
    model, feeds = one_node(Case("Softmax", (11,), [(2, 3, 4, 5)]), 11)
    for index, dim in enumerate(model.graph.input[0].type.tensor_type.shape.dim):
        dim.dim_param = f"d{index}"
    raised = raise_proto(model)
    assert [n.op_type for n in raised.graph.node] == ["Flatten", "Softmax", "Shape", "Reshape"]
    compare(model, raised, feeds)


def test_resize_leaves_out_what_it_does_not_need() -> None:
    attrs = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    inputs = [IMAGE, EMPTY, EMPTY, vector(1, 2, 6, 3)]
    model, feeds = one_node(Case("Resize", (11,), inputs, attrs, constants=[1, 2, 3]), 11)
    raised = raise_proto(model)
    node = raised.graph.node[0]
    assert list(node.input) == ["x0", "", "", "x3"]
    assert {a.name: a.s for a in node.attribute} == {
        "coordinate_transformation_mode": b"half_pixel",  # the other one is gone since opset 13
        "nearest_mode": b"round_prefer_ceil",
    }
    compare(model, raised, feeds)


def test_batch_normalization_in_training_mode() -> None:
    inputs = [(4, 3, 5), *[(3,)] * 3, floats(1, 2, 3)]
    model, feeds = one_node(Case("BatchNormalization", (9,), inputs, outputs=5), 9)
    del model.graph.output[3:]  # saved_mean and saved_var are there but not used
    raised = raise_proto(model)
    assert len(raised.graph.node[0].output) == 3
    compare(model, raised, feeds, rtol=1e-5)


@pytest.mark.parametrize("opset", [7, 9, 10, 11])
def test_dropout_mask_says_that_everything_is_kept(opset: int) -> None:
    """Newer opsets define the mask of inference as ones; older ones left it open."""
    model, feeds = one_node(Case("Dropout", (opset,), [(2, 3)], {"ratio": 0.5}, outputs=2), opset)
    raised = raise_proto(model)
    y, mask = run(raised, feeds)
    np.testing.assert_array_equal(y, feeds["x0"])
    assert mask.dtype == (np.float32 if opset < 10 else np.bool_)
    assert np.all(mask == 1)
    assert [o.name for o in raised.graph.output] == ["y0", "y1"]


def test_unused_dropout_mask_is_dropped() -> None:
    model, feeds = one_node(Case("Dropout", (7,), [(2, 3)], outputs=2), 7)
    del model.graph.output[1]
    raised = raise_proto(model)
    assert len(raised.graph.node[0].output) == 1
    compare(model, raised, feeds)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("op", ["Clip", "Pad"])
def test_constants_take_the_type_of_the_data(op: str, dtype: Any) -> None:
    attrs = {
        "Clip": {"min": -3.4028234663852886e38, "max": 0.5},
        "Pad": {"pads": [1, 0, 0, 0], "value": 2.0},
    }
    x = np.linspace(-1, 1, 6).reshape(2, 3).astype(dtype)
    model, _ = one_node(Case(op, (10,), [x], attrs[op]), 10)
    raised = raise_proto(model)
    result = run(raised, {"x0": x})[0]
    expected = (
        np.minimum(x, 0.5) if op == "Clip" else np.pad(x, [(1, 0), (0, 0)], constant_values=2)
    )
    np.testing.assert_array_equal(result, expected.astype(dtype))


def if_model(opset: int) -> onnx.ModelProto:
    """An If whose branches hold operators that changed, and an If inside."""

    def branch(name: str, nodes: Sequence[onnx.NodeProto]) -> onnx.GraphProto:
        output = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
        return helper.make_graph(nodes, name, [], [output])

    inner = helper.make_node(
        "If",
        ["c"],
        ["inner_out"],
        then_branch=branch("a", [helper.make_node("Softmax", ["x"], ["soft"], axis=1)]),
        else_branch=branch("b", [helper.make_node("Clip", ["x"], ["clipped"], min=0.0)]),
    )
    mean = [
        helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(floats(2.0))),
        helper.make_node("ReduceMean", ["x"], ["reduced"], axes=[2], keepdims=1),
        helper.make_node("Mul", ["reduced", "two"], ["scaled"]),
        helper.make_node("Add", ["x", "scaled"], ["mean_out"]),
    ]
    outer = helper.make_node(
        "If",
        ["c"],
        ["y"],
        then_branch=branch("then", [inner]),
        else_branch=branch("else", mean),
    )
    graph = helper.make_graph(
        [outer],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    opset_import = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opset_import, ir_version=4)


@pytest.mark.parametrize("opset", [7, 9, 10])
@pytest.mark.parametrize("condition", [True, False])
def test_subgraphs(opset: int, condition: bool) -> None:
    model = if_model(opset)
    raised = raise_proto(model)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    compare(model, raised, {"x": x, "c": np.array(condition)})


def test_shapes_within_bodies_are_inferred_after() -> None:
    """Axes are constants of the body: inference does not see those of the graph around."""
    loaded = ir.from_proto(if_model(7))
    upgrade_to_floor(loaded)
    infer_shapes(loaded)
    reduced = next(n for n in loaded.graph.all_nodes() if n.op_type == "ReduceMean").outputs[0]
    assert reduced.shape is not None
    assert list(reduced.shape) == [2, 3, 1]


def test_initializers_that_are_inputs_become_constants() -> None:
    """Up to IR version 3 there was no other way to have them."""
    model = cnn(7)
    model.ir_version = 3
    for tensor in model.graph.initializer:
        info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(info)
    loaded = ir.from_proto(model)
    release_initializers(loaded)
    upgrade_to_floor(loaded)
    raised = ir.to_proto(loaded)
    assert [i.name for i in raised.graph.input] == ["x"]
    assert raised.ir_version == 8
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    compare(model, raised, {"x": x}, rtol=1e-5)


def cnn(opset: int) -> onnx.ModelProto:
    """A small network as exporters wrote them at opset 7."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Upsample", ["p"], ["u"], mode="nearest", scales=[1.0, 1.0, 2.0, 2.0]),
        helper.make_node("GlobalAveragePool", ["u"], ["g"]),
        helper.make_node("Squeeze", ["g"], ["q"], axes=[2, 3]),
        helper.make_node("Dropout", ["q"], ["d", "mask"], ratio=0.5),
        helper.make_node("Gemm", ["d", "w2", "b2"], ["h"], transB=1),
        helper.make_node("Softmax", ["h"], ["y"], axis=1),
    ]
    weights = [
        weight("w", 4, 3, 3, 3),
        *(weight(n, 4) for n in "sbm"),
        numpy_helper.from_array(np.ones(4, np.float32), "v"),
        weight("w2", 5, 4),
        weight("b2", 5),
    ]
    graph = helper.make_graph(
        nodes,
        "cnn",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    opset_import = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opset_import, ir_version=4)


@pytest.mark.parametrize("opset", [7, 8])
def test_whole_network(opset: int) -> None:
    model = cnn(opset)
    before = {t.name: t.SerializeToString() for t in model.graph.initializer}
    raised = raise_proto(model)
    after = {t.name: t.SerializeToString() for t in raised.graph.initializer}
    assert before.items() <= after.items(), "weights changed"
    outputs = {o for n in raised.graph.node for o in n.output}
    names = {o for n in model.graph.node for o in n.output} - {"mask"}  # nobody used the mask
    assert names <= outputs
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    compare(model, raised, {"x": x}, rtol=1e-5)


def test_weights_are_not_read() -> None:
    """An external tensor whose file is not there would raise when it is read."""
    model = ir.from_proto(cnn(7))
    weight = model.graph.initializers["w"]
    weight.const_value = ir.ExternalTensor(
        "nowhere.bin", 0, 4 * 3 * 9 * 4, ir.DataType.FLOAT, shape=ir.Shape([4, 3, 3, 3]), name="w"
    )
    upgrade_to_floor(model)
    assert model.opset_imports[""] == FLOOR
    assert isinstance(model.graph.initializers["w"].const_value, ir.ExternalTensor)


def test_newer_models_stay_as_they_are() -> None:
    model, _ = one_node(Case("Relu", (18,), [(2, 3)]), 18)
    loaded = ir.from_proto(model)
    upgrade_to_floor(loaded)
    assert loaded.opset_imports[""] == 18
    model.opset_import[0].version = 22
    loaded = ir.from_proto(model)
    upgrade_to_floor(loaded)
    assert loaded.opset_imports[""] == 22


# ---- refusals -----------------------------------------------------------------------------------


def scan_8(lengths: str = "l") -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "se"],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "to"],
    )
    node = helper.make_node(
        "Scan",
        [lengths, "i", "x"],
        ["f", "y"],
        "loop",
        body=body,
        num_scan_inputs=1,
        directions=[1],
    )
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("i", TensorProto.FLOAT, [4, 2]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3, 2]),
            *[helper.make_tensor_value_info(n, TensorProto.INT64, [4]) for n in lengths],
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=4)


def with_saved_statistics() -> onnx.ModelProto:
    inputs = [(4, 3, 5), *[(3,)] * 3, floats(1, 2, 3)]
    return one_node(Case("BatchNormalization", (9,), inputs, outputs=5), 9)[0]


def per_element_in_training() -> onnx.ModelProto:
    inputs = [(4, 3, 5), *[(3, 5)] * 4]
    return one_node(Case("BatchNormalization", (7,), inputs, {"spatial": 0}, outputs=5), 7)[0]


def tf_half_pixel(**attrs: Any) -> onnx.ModelProto:
    attrs["coordinate_transformation_mode"] = "tf_half_pixel_for_nn"
    return one_node(Case("Resize", (11,), [IMAGE, EMPTY, floats(1, 1, 2, 2)], attrs), 11)[0]


def gone_operator() -> onnx.ModelProto:
    return one_node(Case("ImageScaler", (7,), [IMAGE], {"scale": 2.0}), 7)[0]


def erf_of_integers() -> onnx.ModelProto:
    return one_node(Case("Erf", (9,), [vector(1, 2)]), 9)[0]


REFUSALS = {
    "Scan-8": (scan_8, r"'loop' \(Scan of opset 8\).*batch axis"),
    "saved-statistics": (with_saved_statistics, r"'node' \(BatchNormalization of .*saved_mean"),
    "per-element-training": (per_element_in_training, "training mode with spatial=0"),
    "Resize-ceil": (lambda: tf_half_pixel(nearest_mode="ceil"), "tf_half_pixel_for_nn"),
    "Resize-linear": (lambda: tf_half_pixel(mode="linear"), "tf_half_pixel_for_nn"),
    "Erf-integers": (erf_of_integers, "Erf.*INT64.*cast"),
    "gone": (gone_operator, "ImageScaler.*not part of ONNX"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    model, message = REFUSALS[name]
    with pytest.raises(ModelError, match=message):
        upgrade_to_floor(ir.from_proto(model()))


# ---- nothing is forgotten -----------------------------------------------------------------------


def changes(after: int, until: int) -> set[tuple[str, int]]:
    versions: dict[str, list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions.setdefault(schema.name, []).append(schema.since_version)
    return {
        (op, version)
        for op, found in versions.items()
        for version in sorted(found)[1:]
        if after < version <= until
    }


def test_every_change_is_adapted_or_known_to_be_compatible() -> None:
    known = ADAPTERS.keys() | UNCHANGED.keys()
    assert changes(1, FLOOR) == known
    assert not ADAPTERS.keys() & UNCHANGED.keys()


def test_every_adapter_is_run() -> None:
    tested = {(case.op, opset) for case in ADAPTED for opset in case.opsets}
    for op, version in ADAPTERS:
        if op == "Scan" or version <= 7:
            continue  # refused, see above; or see test_old_opsets.py
        assert any(o == op and opset < version for o, opset in tested), f"{op} to {version}"


# ---- tools --------------------------------------------------------------------------------------


def raise_proto(model: onnx.ModelProto) -> onnx.ModelProto:
    loaded = ir.from_proto(model)
    lift_constants(loaded.graph)
    upgrade_to_floor(loaded)
    check_structure(loaded)
    infer_shapes(loaded)
    proto: onnx.ModelProto = ir.to_proto(loaded)
    return proto


def check(raised: onnx.ModelProto, model: onnx.ModelProto) -> None:
    assert {o.domain: o.version for o in raised.opset_import} == {"": FLOOR}
    assert [i.name for i in raised.graph.input] == [i.name for i in model.graph.input]
    assert [o.name for o in raised.graph.output] == [o.name for o in model.graph.output]


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(model.SerializeToString(), options, providers=providers)
    results: list[Array] = session.run(None, dict(feeds))
    return results


def compare(
    model: onnx.ModelProto, raised: onnx.ModelProto, feeds: Mapping[str, Array], rtol: float = 2e-6
) -> None:
    for before, after in zip(run(model, feeds), run(raised, feeds), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_allclose(after, before, rtol=rtol, atol=1e-7)
