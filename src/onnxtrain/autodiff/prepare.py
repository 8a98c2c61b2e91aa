"""From whatever a user brings to a graph that rules can be written against.

`prepare` loads a model, inlines its functions, lifts its constants, expands fused operators of
onnxruntime, raises it to the opset floor, unties parameters that an exporter shared, and infers
every shape. Weights are never copied: they stay where they are (in the caller's proto, or mapped
from disk), so models over 2 GB pass through.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from onnxtrain.autodiff.emit import FLOOR_OPSET
from onnxtrain.autodiff.fused import adopt_unofficial, expand_fused
from onnxtrain.autodiff.infer import SMALL, check_structure, infer_shapes
from onnxtrain.autodiff.ops import Ops
from onnxtrain.autodiff.rules.batch_norm import rewrite_training_batch_norm
from onnxtrain.autodiff.shapes import constant_array
from onnxtrain.autodiff.upgrade import OLDEST_OPSET, raise_to_floor, release_initializers
from onnxtrain.errors import ModelError

ModelLike = onnx.ModelProto | str | os.PathLike[str]
BatchNormMode = Literal["batch", "frozen"]


def prepare(model: ModelLike, bn: BatchNormMode | None = None) -> ir.Model:
    """Return a model of plain operators at opset 18 or later, with every shape inferred.

    `bn` sets the mode of every BatchNormalization: "batch" for the statistics of the batch,
    "frozen" for the stored ones, None for what the model says.
    """
    loaded = load(model)
    check_opset(loaded)
    release_initializers(loaded)
    adopt_unofficial(loaded)
    check_structure(loaded)
    inline_functions(loaded)
    lift_constants(loaded.graph)
    loaded.graph.sort()
    untie(loaded.graph)
    raise_to_floor(loaded)
    state_defaults(loaded)
    expand_fused(loaded)
    if bn is not None:
        set_batch_norm_mode(loaded, bn)
    rewrite_training_batch_norm(loaded)
    infer_shapes(loaded)
    spell_out_pads(loaded)
    return loaded


def load(model: ModelLike) -> ir.Model:
    """Load a model from a proto or a path, without reading external weights into memory."""
    if isinstance(model, onnx.ModelProto):
        loaded = _from_proto(model, "the given ModelProto")
        _settle_initializers(loaded, "the given ModelProto", "give the path of the model")
        return loaded
    if isinstance(model, (str, os.PathLike)):
        return _from_file(Path(os.fspath(model)))
    raise ModelError(
        f"a model is an onnx.ModelProto or a path to a file, not {type(model).__name__}"
    )


def _from_file(path: Path) -> ir.Model:
    if not path.is_file():
        raise ModelError(f"there is no model file at {str(path)!r}")
    try:
        proto = onnx.load(path, load_external_data=False)
    except DecodeError:
        raise ModelError(
            f"{str(path)!r} is not an ONNX model, or it is truncated ({path.stat().st_size} bytes)"
        ) from None
    loaded = _from_proto(proto, repr(str(path)))
    ir.external_data.set_base_dir(loaded.graph, path.parent)
    _settle_initializers(loaded, repr(str(path)), "put it beside the model")
    return loaded


def _from_proto(proto: onnx.ModelProto, origin: str) -> ir.Model:
    if not proto.HasField("graph") or not proto.graph.output:
        raise ModelError(f"{origin} holds no graph with outputs: it is empty, or not a whole model")
    if not proto.opset_import:
        raise ModelError(f"{origin} states no opset (opset_import): its operators have no meaning")
    try:
        return ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises many kinds; the user needs the cause, not the kind
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__  # type: ignore[assignment]
        raise ModelError(f"{origin} is not a valid ONNX model: {cause}") from None


def _settle_initializers(model: ir.Model, origin: str, remedy: str) -> None:
    """Type every initializer, see that external ones are there, and read the small of them."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            _require_external_file(tensor, value.name, origin, remedy)
            if tensor.nbytes <= SMALL:
                tensor = value.const_value = ir.tensor(tensor.numpy().copy(), name=value.name)
        if tensor is not None:
            value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())


def _require_external_file(
    tensor: ir.ExternalTensor, name: str | None, origin: str, remedy: str
) -> None:
    file = Path(tensor.path)
    where = f"{origin} keeps the initializer {name!r} in the file {str(tensor.location)!r}"
    if not file.is_file():
        raise ModelError(f"{where}, which is not there: {remedy}")
    needed = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    if file.stat().st_size < needed:
        raise ModelError(
            f"{where}, which has {file.stat().st_size} bytes where {needed} are needed: it is "
            "truncated, or belongs to another model"
        )


def check_opset(model: ir.Model) -> None:
    """Refuse opsets that are older or newer than what onnxtrain understands."""
    newest = onnx.defs.onnx_opset_version()
    opset = model.opset_imports.get("", None)
    if opset is None:
        if any(n.domain == "" for n in model.graph.all_nodes()):
            raise ModelError("the model uses ai.onnx operators but states no opset for them")
        model.opset_imports[""] = FLOOR_OPSET
    elif opset > newest:
        raise ModelError(
            f"the model has opset {opset}; the installed onnx {onnx.__version__} knows up to "
            f"{newest}: upgrade onnx, or export the model with an older opset"
        )
    elif opset < OLDEST_OPSET:
        raise ModelError(
            f"the model has opset {opset}; onnxtrain takes {OLDEST_OPSET} to {newest}: export it "
            f"again with a newer opset, or convert it with onnx.version_converter"
        )


def inline_functions(model: ir.Model) -> None:
    """Replace every call of a model-local function by its body."""
    if model.functions:
        ir.passes.common.InlinePass()(model)


def lift_constants(graph: ir.Graph) -> None:
    """Turn Constant nodes into initializers, so that weights look alike however they came."""
    for node in list(graph):
        if node.op_type != "Constant" or node.domain != "" or node.outputs[0].is_graph_output():
            continue
        # get_const_tensor renames the tensor in a `value` attribute, which may be the caller's.
        tensor = node.attributes.get_tensor("value")
        if tensor is None:
            tensor = ir.convenience.get_const_tensor(node.outputs[0])
        if tensor is not None:
            _replace_by_initializer(graph, node, tensor)


# Defaults that onnx's shape inference gets wrong: it takes STFT for two-sided, and fails on
# MeanVarianceNormalization without axes.
_STATED_DEFAULTS = {
    "STFT": ir.AttrInt64("onesided", 1),
    "MeanVarianceNormalization": ir.AttrInt64s("axes", [0, 2, 3]),
}


def state_defaults(model: ir.Model) -> None:
    """Write out defaults that onnx's shape inference does not know."""
    for node in model.graph.all_nodes():
        default = _STATED_DEFAULTS.get(node.op_type) if node.domain == "" else None
        if default is not None and default.name not in node.attributes:
            node.attributes.add(default)


def spell_out_pads(model: ir.Model) -> None:
    """Give every Pad its pads for all axes.

    onnxruntime 1.31 moves Transpose nodes past a Pad as if it had no `axes` input, and then pads
    the wrong ones; the gradient may bring such a Transpose.
    """
    op = Ops(model.graph, model.opset_imports[""])
    for node in model.graph.all_nodes():
        if node.op_type != "Pad" or node.domain != "" or len(node.inputs) < 4:
            continue
        x, pads, axes = node.inputs[0], node.inputs[1], constant_array(node.inputs[3])
        if x is None or x.shape is None or axes is None or pads is None:
            continue
        rank = len(x.shape)
        # Position i of the full vector is taken from the given one, or from a zero behind it.
        source = np.full(2 * rank, 2 * axes.size, dtype=np.int64)
        source[axes % rank] = np.arange(axes.size)
        source[axes % rank + rank] = np.arange(axes.size) + axes.size
        known = constant_array(pads)
        if known is not None:
            full = op.const(np.append(known, 0)[source].astype(np.int64))
        else:
            longer = ir.node("Concat", [pads, op.int64([0])], {"axis": 0})
            picked = ir.node("Gather", [longer.outputs[0], op.const(source)], {"axis": 0})
            longer.outputs[0].name = op.names.fresh(f"{pads.name}_and_zero")
            picked.outputs[0].name = op.names.fresh(f"{pads.name}_of_all_axes")
            node.prepend((longer, picked))
            full = picked.outputs[0]
        node.replace_input_with(1, full)
        node.resize_inputs(3)


def untie(graph: ir.Graph) -> None:
    """Give each parameter its own initializer where the exporter shared equal ones.

    torch stores equal tensors once and names the others with Identity: all fresh BatchNorm scales
    become one tensor. Trained like that, they would stay one.
    """
    for node in list(graph):
        if node.op_type != "Identity" or node.domain != "" or node.outputs[0].is_graph_output():
            continue
        source = node.inputs[0]
        if source is not None and source.is_initializer() and not source.is_graph_input():
            assert source.const_value is not None
            _replace_by_initializer(graph, node, source.const_value)


def set_batch_norm_mode(model: ir.Model, bn: BatchNormMode) -> None:
    """Make every BatchNormalization use the statistics of the batch, or the stored ones."""
    if bn not in ("batch", "frozen"):
        raise ModelError(f"bn is 'batch', 'frozen' or None, not {bn!r}")
    for node in model.graph.all_nodes():
        if node.op_type == "BatchNormalization" and node.domain == "":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", int(bn == "batch"))
            if bn == "frozen":
                for output, stored in zip(node.outputs[1:3], node.inputs[3:5], strict=False):
                    assert stored is not None
                    ir.convenience.replace_all_uses_with(output, stored)
                node.resize_outputs(1)


def _replace_by_initializer(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol) -> None:
    old = node.outputs[0]
    new = ir.Value(name=old.name, const_value=_renamed(tensor, old.name))
    new.dtype, new.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
    ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)
    graph.register_initializer(new)


def _renamed(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    """Return the same data under another name; the given tensor may belong to the caller."""
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, tensor.dtype,
            shape=tensor.shape, name=name or "", base_dir=tensor.base_dir,
        )  # fmt: skip
    if isinstance(tensor, ir.StringTensor):
        return ir.StringTensor(tensor.numpy(), shape=tensor.shape, name=name)
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
