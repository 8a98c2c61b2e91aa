"""One fused node as a model, expanded and run beside onnxruntime's kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.offline.frontend.fused import expand_fused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def f(*shape: int) -> Array:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def h(*shape: int) -> Array:
    return f(*shape).astype(np.float16)


def ints(values: Any, dtype: Any = np.int32) -> Array:
    return np.array(values, dtype)


def bits(*shape: int) -> Array:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def zeros_and_ones(*shape: int) -> Array:
    return RNG.integers(0, 2, shape).astype(np.int32)


@dataclass(frozen=True)
class Case:
    """One fused node. `outputs` names those that are asked for; "" is one that is left out."""

    op: str
    inputs: Sequence[Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    outputs: Sequence[str] = ("y",)
    constants: Sequence[int] = ()  # inputs that are initializers
    domain: str = "com.microsoft"
    opset: int = 18
    tol: float = 1e-5

    def __str__(self) -> str:
        return f"{self.op}-{self.id}" if self.id else self.op


def check(case: Case, symbolic: bool) -> None:
    """The plain nodes compute what the kernel does, under the same names."""
    fused = one_node(case, symbolic)
    plain = expanded(fused)
    assert all(node.domain == "" for node in plain.graph.node)
    assert [o.name for o in plain.graph.output] == [o.name for o in fused.graph.output]
    feeds = feeds_of(case)
    for actual, wanted in zip(run(plain, feeds), run(fused, feeds), strict=True):
        assert actual.dtype == wanted.dtype
        np.testing.assert_allclose(actual, wanted, rtol=case.tol, atol=case.tol)


def one_node(case: Case, symbolic: bool = False, typed: bool = False) -> onnx.ModelProto:
    names = ["" if a is None else f"x{i}" for i, a in enumerate(case.inputs)]
    node = helper.make_node(
        case.op, names, case.outputs, name="node", domain=case.domain, **case.attrs
    )
    inputs = [
        helper.make_tensor_value_info(
            f"x{i}",
            helper.np_dtype_to_tensor_dtype(a.dtype),
            [f"d{i}_{j}" for j in range(a.ndim)] if symbolic else a.shape,
        )
        for i, a in enumerate(case.inputs)
        if a is not None and i not in case.constants
    ]
    return helper.make_model(
        helper.make_graph(
            [node], "graph", inputs,
            [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in case.outputs if o]
            if typed
            else [helper.make_empty_tensor_value_info(o) for o in case.outputs if o],
            [numpy_helper.from_array(case.inputs[i], f"x{i}") for i in case.constants],
        ),
        opset_imports=[
            helper.make_opsetid("", case.opset), helper.make_opsetid("com.microsoft", 1)
        ],
        ir_version=10,
    )  # fmt: skip


def feeds_of(case: Case) -> dict[str, Array]:
    return {
        f"x{i}": a for i, a in enumerate(case.inputs) if a is not None and i not in case.constants
    }


def expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    loaded = ir.from_proto(model)
    expand_fused(loaded)
    proto = ir.to_proto(loaded)
    assert {o.domain for o in proto.opset_import} == {
        "", *(n.domain for n in proto.graph.node)
    }  # fmt: skip
    return proto


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Run without optimization: onnxruntime would fuse again what was just expanded."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    wanted = {i.name for i in session.get_inputs()}
    return session.run(None, {k: v for k, v in feeds.items() if k in wanted})


def result(case: Case) -> Array:
    return run(expanded(one_node(case)), feeds_of(case))[0]
