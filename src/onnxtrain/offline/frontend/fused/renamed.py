"""Operators of ai.onnx under another name, and thin wrappings of them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.offline.autodiff.definitions import Defined, Maybe, NotExpandable, wanted
from onnxtrain.offline.frontend.fused.domain import fused
from onnxtrain.offline.graph.ops import Ops


@fused("Trilu")
def trilu(op: Ops, node: ir.Node, x: ir.Value, k: Maybe = None) -> ir.Value:
    """Trilu of ai.onnx."""
    return op.Trilu(x, *([] if k is None else [k]), upper=node.attributes.get_int("upper", 1))


@fused("GatherND")
def gather_nd(op: Ops, node: ir.Node, data: ir.Value, indices: ir.Value) -> ir.Value:
    """GatherND of ai.onnx, whose indices are int64."""
    return op.GatherND(data, op.cast(indices, ir.DataType.INT64))


@fused("Range")
def range_(
    op: Ops, node: ir.Node, start: ir.Value, limit: ir.Value, delta: Maybe = None
) -> ir.Value:
    """Range of ai.onnx, whose bounds are scalars."""
    bounds = [op.reshape(v, []) for v in (start, limit)]
    step = op.const(1, start.dtype) if delta is None else op.reshape(delta, [])
    return op.Range(*bounds, step)


@fused("ExpandDims")
def expand_dims(op: Ops, node: ir.Node, x: ir.Value, axis: ir.Value) -> ir.Value:
    """Unsqueeze of ai.onnx, whose axes are an int64 vector."""
    return op.Unsqueeze(x, op.reshape(op.cast(axis, ir.DataType.INT64), [1]))


@fused("Pad")
def pad(op: Ops, node: ir.Node, data: ir.Value, pads: ir.Value, value: Maybe = None) -> ir.Value:
    """Pad of ai.onnx, whose pads are a vector and whose value is a scalar."""
    fill = [] if value is None else [op.reshape(value, [])]
    mode = node.attributes.get_string("mode", "constant")
    return op.Pad(data, op.reshape(pads, [-1]), *fill, mode=mode)


@fused("GridSample")
def grid_sample(op: Ops, node: ir.Node, x: ir.Value, grid: ir.Value) -> ir.Value:
    """GridSample of ai.onnx, which renamed its modes in opset 20."""
    mode = node.attributes.get_string("mode", "bilinear")
    if op.opset >= 20:
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return op.GridSample(
        x, grid, mode=mode,
        align_corners=node.attributes.get_int("align_corners", 0),
        padding_mode=node.attributes.get_string("padding_mode", "zeros"),
    )  # fmt: skip


@fused("BiasAdd")
def bias_add(op: Ops, node: ir.Node, x: ir.Value, bias: ir.Value, skip: ir.Value) -> ir.Value:
    """x + bias + skip."""
    return op.Add(x + bias, skip)


@fused("BiasDropout")
def bias_dropout(
    op: Ops,
    node: ir.Node,
    data: ir.Value,
    bias: ir.Value,
    residual: Maybe = None,
    ratio: Maybe = None,
    training_mode: Maybe = None,
) -> Defined:
    """Dropout(data + bias) + residual, and the mask."""
    seed = node.attributes.get_int("seed") if "seed" in node.attributes else None
    total = data + bias
    outputs = op.call(
        "Dropout", total, ratio, training_mode, like=total, seed=seed,
        outputs=2 if wanted(node, 1) else 1,
    )  # fmt: skip
    return outputs[0] if residual is None else outputs[0] + residual, *outputs[1:]


@fused(
    "BiasSoftmax",
    ranks=(0, 1),
    lacking="several axes, or a bias of another rank than the data",
)
def bias_softmax(op: Ops, node: ir.Node, data: ir.Value, bias: ir.Value) -> ir.Value:
    """Softmax(data + bias) over all axes from `axis` on, as Softmax was before opset 13."""
    axis = node.attributes.get_int("axis", 1) % op.rank(data)
    if axis != op.rank(data) - 1 or op.rank(bias) != op.rank(data):
        raise NotExpandable("more than the last axis, or a bias of another rank")
    return op.Softmax(data + bias, axis=-1)


@fused("TorchEmbedding", lacking="padding_idx or scale_grad_by_freq")
def torch_embedding(
    op: Ops,
    node: ir.Node,
    weight: ir.Value,
    indices: ir.Value,
    padding_idx: Maybe = None,
    scale_grad_by_freq: Maybe = None,
) -> ir.Value:
    """Gather; what the other inputs ask of the gradient is not done."""
    if padding_idx is not None or scale_grad_by_freq is not None:
        raise NotExpandable("an embedding whose gradient differs from that of Gather")
    return op.Gather(weight, indices)
