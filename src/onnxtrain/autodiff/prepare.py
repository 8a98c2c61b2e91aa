"""From whatever a user brings to a graph that rules can be written against.

`prepare` loads a model, inlines its functions, lifts its constants, expands fused operators of
onnxruntime, raises it to the opset floor, unties parameters that an exporter shared, and infers
every shape. Weights are never copied: they stay where they are (in the caller's proto, or mapped
from disk), so models over 2 GB pass through.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from onnxtrain.autodiff.emit import FLOOR_OPSET
from onnxtrain.autodiff.infer import check_structure, infer_shapes
from onnxtrain.errors import ModelError

ModelLike = onnx.ModelProto | str | os.PathLike[str]
OLDEST_OPSET = 11


def prepare(model: ModelLike) -> ir.Model:
    """Return a model of plain operators at opset 18 or later, with every shape inferred."""
    loaded = load(model)
    check_opset(loaded)
    check_structure(loaded)
    inline_functions(loaded)
    lift_constants(loaded.graph)
    loaded.graph.sort()
    untie(loaded.graph)
    infer_shapes(loaded)
    return loaded


def load(model: ModelLike) -> ir.Model:
    """Load a model from a proto or a path, without reading external weights into memory."""
    if isinstance(model, onnx.ModelProto):
        loaded = _from_proto(model, "the given ModelProto")
        _require_external_files(
            loaded, "the given ModelProto", "give the path of the model instead"
        )
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
    _require_external_files(loaded, repr(str(path)), "put it beside the model")
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


def _require_external_files(model: ir.Model, origin: str, remedy: str) -> None:
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
            raise ModelError(
                f"{origin} keeps the initializer {value.name!r} in the file "
                f"{str(tensor.location)!r}, which is not there: {remedy}"
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
        output = node.outputs[0]
        tensor = ir.convenience.get_const_tensor(output)
        if tensor is None:
            continue
        _replace_by_initializer(graph, node, tensor)


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


def _replace_by_initializer(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol) -> None:
    old = node.outputs[0]
    name = old.name
    new = ir.Value(name=name, const_value=tensor)
    new.dtype, new.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
    ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)
    graph.register_initializer(new)
