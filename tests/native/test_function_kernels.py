"""Groups become calls of functions, whatever the passes between have made of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

from onnxtrain.offline.graph.kernels import mark_kernel
from onnxtrain.offline.graph.ops import Ops
from onnxtrain.offline.writer.functions import write_functions

Write = Callable[[Ops, ir.Value], ir.Value]


def model_of(write: Write) -> ir.Model:
    """A model with one input x of three floats, and one output."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="graph")
    model = ir.Model(graph, ir_version=8)
    y = write(Ops(graph, 18), x)
    graph.outputs.append(y)
    return model


def written(model: ir.Model, native: bool = True) -> onnx.ModelProto:
    functions = write_functions(model, native)
    proto = ir.to_proto(model)
    proto.functions.extend(functions)
    onnx.checker.check_model(proto)
    return proto


def run(model: onnx.ModelProto) -> list[float]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.array([1, 2, 3], np.float32)})
    return [float(v) for v in y]


def calls_of(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == "ai.onnxtrain"]


def test_a_group_is_a_call_and_the_body_is_what_was_written() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        (y,) = op.kernel("Twice", [x], lambda: [op.Mul(op.Add(x, 1.0), 2.0)], speed=3)
        return op.Neg(y)

    model = written(model_of(write))
    assert calls_of(model) == ["Twice_0"]
    assert [node.op_type for node in model.graph.node] == ["Twice_0", "Neg"]
    assert [(a.name, a.i) for a in model.graph.node[0].attribute] == [("speed", 3)]
    assert not model.graph.initializer  # the numbers are in the body
    assert run(model) == [-4, -6, -8]


def test_equal_bodies_are_one_function() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        for factor in (2.0, 3.0, 2.0):
            (x,) = op.kernel("Scale", [x], lambda x=x, f=factor: [op.Mul(op.Mul(x, f), 1.0)])
        return x

    model = written(model_of(write))
    assert calls_of(model) == ["Scale_0", "Scale_1", "Scale_0"]
    assert run(model) == [12, 24, 36]


def test_without_native_nothing_is_left_that_only_a_kernel_reads() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        size = op.Shape(op.Relu(x))
        return op.kernel("Twice", [x, size], lambda: [op.Mul(x, 2.0)])[0]

    plain, native = written(model_of(write), native=False), written(model_of(write))
    assert [node.op_type for node in plain.graph.node] == ["Mul"]
    assert not plain.functions
    assert [node.op_type for node in native.graph.node] == ["Relu", "Shape", "Twice_0"]
    assert run(plain) == run(native) == [2, 4, 6]


def test_a_group_whose_inside_is_read_elsewhere_stays_plain() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        inside = op.Add(x, 1.0)
        y = op.Mul(inside, 2.0)
        mark_kernel([p for v in (inside, y) if (p := v.producer())], "Twice", [x], [y])
        return op.Add(inside, y)

    model = written(model_of(write))
    assert calls_of(model) == []
    assert run(model) == [6, 9, 12]


def test_a_group_that_would_wait_for_itself_stays_plain() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        a = op.Add(x, 1.0)
        outside = op.Neg(a)
        b = op.Mul(outside, a)
        mark_kernel([p for v in (a, b) if (p := v.producer())], "Loop", [x], [a, b])
        return b

    model = written(model_of(write))
    assert calls_of(model) == []
    assert run(model) == [-4, -9, -16]


def test_of_two_groups_that_wait_for_each_other_one_stays_plain() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        a = op.Add(x, 1.0)
        b = op.Neg(x)
        a2 = op.Mul(b, 2.0)
        b2 = op.Mul(a, 3.0)
        for name, pair in (("A", (a, a2)), ("B", (b, b2))):
            mark_kernel([p for v in pair if (p := v.producer())], name, [x], pair)
        return op.Add(a2, b2)

    model = written(model_of(write))
    assert len(calls_of(model)) == 1
    assert run(model) == [4, 5, 6]


@pytest.mark.parametrize("leak", [False, True])
def test_what_a_kernel_saves_is_read_by_its_partner_alone(leak: bool) -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        made: list[ir.Value] = []

        def forward() -> list[ir.Value]:
            made.append(op.Exp(x))
            return [op.Neg(made[0]), made[0]]

        y, saved = op.kernel("Forward", [x], forward)
        mark_kernel(
            [n for v in (saved, y) if (n := v.producer())], "Forward", [x], [y, saved],
            saved=[saved],
        )  # fmt: skip
        (dx,) = op.kernel("Backward", [y, saved], lambda: [op.Mul(y, saved)], saved=[saved])
        return op.Add(dx, saved) if leak else dx

    model = written(model_of(write))
    assert calls_of(model) == ([] if leak else ["Forward_0", "Backward_1"])
    assert run(model) == pytest.approx([-np.exp(2 * v) + leak * np.exp(v) for v in (1, 2, 3)], 1e-5)


def test_calls_in_the_branches_of_an_if() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        y = op.Mul(x, 2.0)

        def then() -> list[ir.Value]:
            return op.kernel("Sum", [x, y], lambda: [op.Add(op.Add(x, y), 1.0)])

        passed = op.Greater(op.ReduceSum(x, keepdims=0), 0.0)
        branches = op.body([], then, "then"), op.body([], lambda: [op.Neg(x)], "else")
        (result,) = op.call("If", passed, then_branch=branches[0], else_branch=branches[1])
        return op.type_as(result, x)

    model = written(model_of(write))
    branch = helper.get_attribute_value(
        next(a for n in model.graph.node for a in n.attribute if a.name == "then_branch")
    )
    assert [node.op_type for node in branch.node] == ["Sum_0"]
    assert run(model) == [4, 7, 10]


def test_a_body_may_have_a_loop_that_reads_what_is_around_it() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        y = op.Mul(x, 2.0)

        def scan() -> list[ir.Value]:
            def step(part: ir.Value) -> list[ir.Value]:
                return [op.Add(op.Add(part, op.ReduceSum(y, keepdims=0)), 0.5)]

            body = op.body([("part", ir.DataType.FLOAT, [])], step)
            (out,) = op.call("Scan", x, body=body, num_scan_inputs=1)
            return [op.type_as(out, x)]

        return op.kernel("Scanned", [x], scan)[0]

    model = written(model_of(write))
    assert calls_of(model) == ["Scanned_0"]
    assert run(model) == [13.5, 14.5, 15.5]


def test_a_large_constant_stays_outside_of_the_body() -> None:
    def write(op: Ops, x: ir.Value) -> ir.Value:
        table = op.const(np.ones((2000, 3), np.float32))
        return op.kernel("Sum", [x], lambda: [op.ReduceMean(op.Mul(table, x), [0], keepdims=0)])[0]

    model = written(model_of(write))
    assert len(model.graph.initializer) == 1
    assert len(model.graph.node[0].input) == 2
    assert run(model) == [1, 2, 3]
