"""Reading a model: from a proto or a file, of any size, without copying its weights."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from onnxtrain.autodiff.emit import FLOOR_OPSET
from onnxtrain.autodiff.infer import SMALL
from onnxtrain.autodiff.upgrade import OLDEST_OPSET
from onnxtrain.errors import ModelError

ModelLike = onnx.ModelProto | str | os.PathLike[str]


def load(model: ModelLike) -> ir.Model:
    """Load a model from a proto or a path, without reading external weights into memory."""
    if isinstance(model, onnx.ModelProto):
        loaded = _from_proto(model, "the given ModelProto")
        _settle_initializers(loaded, "the given ModelProto", "give the path of the model")
        name_unknown_dims(loaded)
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
    name_unknown_dims(loaded)
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


def name_unknown_dims(model: ir.Model) -> None:
    """Give each unknown dimension of an input a name of its own, and forget those that say nothing.

    Some exporters write -1 or "?" for every dimension that they do not know; equal names would mean
    equal sizes.
    """
    graphs = (model.graph, *model.graph.subgraphs())
    for value in (v for g in graphs for v in (*g.outputs, *(o for n in g for o in n.outputs))):
        if value.shape is not None and any(_says_nothing(d) for d in value.shape):
            value.shape = ir.Shape([None if _says_nothing(d) else d for d in value.shape])
    for value in model.graph.inputs:
        if value.shape is not None and any(_says_nothing(d) for d in value.shape):
            value.shape = ir.Shape(
                [f"{value.name}_dim_{i}" if _says_nothing(d) else d
                 for i, d in enumerate(value.shape)]
            )  # fmt: skip


def _says_nothing(dim: int | ir.SymbolicDim) -> bool:
    if isinstance(dim, int):
        return dim < 0
    return dim.value is None or not any(c.isalnum() for c in dim.value) or dim.value == "None"


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
