"""The operators for which onnxruntime-web has WebGPU kernels, and the nodes for which it has none.

Where the facts come from: `js/bench/webgpu-kernels.mjs` makes one model for each operator and
element type, opens each in Chromium with `executionProviders: ["webgpu"]`, and reads in the log of
onnxruntime-web 1.30.0 whether its WebGPU execution provider found a kernel ("webgpu kernel not
found in registries for Op type"). The page `docs/webgpu-operators.md` in that package lists the
kernels of its older provider, which are other ones.

There are none for int64 and double, except that int64 may be an index, a shape or axes. Those are
small: onnxruntime keeps them on the CPU, and that is where they belong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxtrain.offline.graph.subgraphs import subgraphs_of

ONNXRUNTIME_WEB = "1.30.0"
_log = logging.getLogger(__name__)

_F = {ir.DataType.FLOAT, ir.DataType.FLOAT16}
_N = _F | {ir.DataType.INT32, ir.DataType.UINT32}
_B = {ir.DataType.BOOL}

_OPERATORS = {
    frozenset(_F): (
        "Abs Acos Acosh Asin Asinh Atan Atanh AveragePool BatchNormalization Ceil Conv "
        "ConvTranspose Cos Cosh DFT DepthToSpace Einsum Elu Erf Exp Floor GatherElements Gelu "
        "GlobalAveragePool GlobalMaxPool GridSample HardSigmoid HardSwish InstanceNormalization "
        "LayerNormalization LeakyRelu Log LpNormalization MatMul MaxPool Neg PRelu Pow Reciprocal "
        "Relu Sigmoid Sin Sinh Slice Softmax Softplus Sqrt Tan Tanh ThresholdedRelu TopK"
    ),
    frozenset(_N): (
        "Add ArgMax ArgMin Clip Concat CumSum Div Equal GatherND Gemm Greater GreaterOrEqual "
        "Identity Less LessOrEqual Max Min Mul Pad ReduceL1 ReduceL2 ReduceLogSum "
        "ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare "
        "Resize ScatterElements ScatterND Shape Split Squeeze Sub Tile Transpose Trilu"
    ),
    frozenset(_N | _B): "Flatten Unsqueeze Where",
    frozenset(_N | _B | {ir.DataType.UINT8}): "Cast Expand Gather Reshape",
    frozenset(_B): "And Not",
    frozenset({ir.DataType.FLOAT}): "GRU LSTM",
    frozenset({ir.DataType.FLOAT, ir.DataType.INT32}): "Range",
    frozenset({ir.DataType.INT32, ir.DataType.UINT8, ir.DataType.INT8}): "DequantizeLinear",
}
KERNELS: dict[str, frozenset[ir.DataType]] = {
    op: types for types, ops in _OPERATORS.items() for op in ops.split()
}
# Versions of operators from which on there is no kernel.
_NOT_FROM = {
    **dict.fromkeys("ConvTranspose GlobalAveragePool GlobalMaxPool HardSwish MaxPool".split(), 22),
    **dict.fromkeys("Acos Acosh Asin Asinh Atan Atanh Cos Cosh Elu GRU LSTM".split(), 22),
    **dict.fromkeys("Sin Sinh Tan".split(), 22),
    "GridSample": 20, "Pad": 24, "Transpose": 25, "Squeeze": 25,
}  # fmt: skip
_EXPONENTS = frozenset(_F | {ir.DataType.INT32})


@dataclass(frozen=True)
class Uncovered:
    """A node on floats that onnxruntime-web runs on the CPU, between copies from and to the GPU."""

    graph: str
    node: str
    op_type: str
    types: tuple[str, ...]

    def __str__(self) -> str:
        """Say which node it is."""
        return f"{self.op_type}({', '.join(self.types)}) {self.node!r} in {self.graph}"


def uncovered(model: onnx.ModelProto | ir.Model, graph: str = "the graph") -> list[Uncovered]:
    """Return the nodes that compute with floats and that WebGPU has no kernel for.

    What makes floats out of integers alone, such as the number of samples from a shape, is not
    among them: that is arithmetic on shapes, which onnxruntime always does on the CPU.
    """
    made = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model
    opset = made.opset_imports.get("", 0)
    return [
        Uncovered(
            graph,
            node.name or str(node.outputs[0].name),
            node.op_type,
            tuple(str(v.dtype).lower() for v in node.inputs if v is not None),
        )
        for node in _nodes(made.graph)
        if computes_with_floats(node) and not is_covered(node, opset)
    ]


def warn_of_uncovered(models: Mapping[str, ir.Model]) -> dict[str, list[Uncovered]]:
    """Return the nodes of each graph that onnxruntime-web runs on the CPU, and log a warning."""
    found = {name: uncovered(model, name) for name, model in models.items()}
    everything = [node for nodes in found.values() for node in nodes]
    if everything:
        _log.warning(
            "onnxruntime-web %s has no WebGPU kernel for %d nodes on floats and runs them on the "
            "CPU: %s",
            ONNXRUNTIME_WEB, len(everything), first_of(everything),
        )  # fmt: skip
    return found


def first_of(found: Sequence[Uncovered]) -> str:
    """List the first of the nodes, and count the others."""
    more = [f"and {len(found) - 8} more"] if len(found) > 8 else []
    return "; ".join([*map(str, found[:8]), *more])


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield all nodes; one with a body stands for what is in it if it is not covered itself."""
    for node in graph:
        yield node
        for body in subgraphs_of(node):
            yield from _nodes(body)


def computes_with_floats(node: ir.Node) -> bool:
    """Tell whether a node reads floats, or holds a body that does."""
    read = any(v is not None and v.dtype is not None and v.dtype.is_floating_point()
               for v in node.inputs)  # fmt: skip
    return (read and node.op_type != "Shape") or any(
        computes_with_floats(inner) for body in subgraphs_of(node) for inner in body
    )


def is_covered(node: ir.Node, opset: int) -> bool:
    """Tell whether onnxruntime-web has a WebGPU kernel for a node."""
    types = KERNELS.get(node.op_type)
    if node.domain or types is None or opset >= _NOT_FROM.get(node.op_type, 1000):
        return False
    data = node.inputs[1 if node.op_type == "Where" else 0] if node.inputs else node.outputs[0]
    if data is None or data.dtype not in types:
        return False
    if node.op_type == "Cast":
        target = ir.DataType(node.attributes.get_int("to", 0))
        return target in types or target == ir.DataType.INT64
    if node.op_type == "Pow":
        exponent = node.inputs[1]
        return exponent is not None and exponent.dtype in _EXPONENTS
    if node.op_type == "MaxPool":
        return len([v for v in node.outputs if v.name and v.uses()]) < 2
    return True
