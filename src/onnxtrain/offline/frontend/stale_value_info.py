"""Declared shapes that are out of date.

Many models were exported for one batch size, and then the first dimension of the input was renamed
while all other shapes stayed. onnxruntime runs them with a warning. Inference would prefer the
numbers to the name, and gradients would divide by the wrong count.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from onnxtrain.offline.graph.infer import skeleton, without_declared_shapes


def forget_stale_shapes(model: ir.Model) -> None:
    """Keep only the ranks of results where one has a number in place of a name of the inputs."""
    names = {
        dim.value
        for value in model.graph.inputs
        for dim in (value.shape or ())
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }
    stated = {
        value.name: value.shape
        for value in _results(model.graph)
        if value.shape is not None and any(isinstance(dim, int) for dim in value.shape)
    }
    if not names or not stated:
        return
    try:
        inferred = onnx.shape_inference.infer_shapes(without_declared_shapes(skeleton(model)))
    except Exception:  # the strict inference that follows tells what is wrong
        return
    infos = (*inferred.graph.value_info, *inferred.graph.output)
    if any(_is_stale(stated[info.name], info, names) for info in infos if info.name in stated):
        for value in _results(model.graph):
            if value.shape is not None:
                value.shape = ir.Shape([None] * len(value.shape))


def _results(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield what operators of the standard make; nothing infers the shapes of others."""
    return (v for node in graph if node.domain == "" for v in node.outputs)


def _is_stale(stated: ir.Shape, info: onnx.ValueInfoProto, names: set[str]) -> bool:
    dims = info.type.tensor_type.shape.dim
    return len(dims) == len(stated) and any(
        isinstance(old, int) and new.dim_param in names
        for old, new in zip(stated, dims, strict=True)
    )
