"""The tensors of a model, in the file or in external files, which are mapped and not read."""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.frontend.canonicalize import DEFAULTS_AS_INPUTS_UNTIL
from onnxtrain.offline.graph.infer import SMALL
from onnxtrain.offline.graph.shapes import dims_of, may_be_same

_DECLARED_LOCATION = "location that the model names"


def settle_tensors(model: ir.Model, origin: str, remedy: str, path: Path | None) -> None:
    """Type every initializer, check that its external data exist, and read the small ones."""
    functions = (node for function in model.functions.values() for node in function.all_nodes())
    for node in (*model.graph.all_nodes(), *functions):
        for name, attribute in list(node.attributes.items()):
            if not attribute.is_ref() and isinstance(attribute.value, ir.ExternalTensor):
                external = _require_file(attribute.value, origin, remedy, path)
                node.attributes[name] = ir.AttrTensor(name, _mapped(external))
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            tensor: ir.TensorProtocol | None = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                external = tensor = value.const_value = _require_file(tensor, origin, remedy, path)
                if external.nbytes <= SMALL:
                    tensor = value.const_value = ir.tensor(tensor.numpy().copy(), name=value.name)
                elif graph is not model.graph:
                    tensor = value.const_value = _mapped(external)
            if tensor is not None:
                _type_initializer(value, tensor, origin, model.ir_version)


def _type_initializer(
    value: ir.Value, tensor: ir.TensorProtocol, origin: str, ir_version: int
) -> None:
    """Give an initializer the type of its data.

    One that is an input too can be overridden by something of the declared shape, which may leave
    more open than the data do; it has to agree with them all the same.
    """
    dims = tuple(tensor.shape.numpy())
    declared = dims_of(value)
    if value.is_graph_input() and (
        value.dtype not in (None, tensor.dtype) or not may_be_same(declared, dims)
    ):
        raise ModelError(
            f"{origin}: the input {value.name!r} is declared as {value.dtype}{value.shape or ''}, "
            f"but its initializer is {tensor.dtype}{list(dims)}"
        )
    value.dtype = tensor.dtype
    if declared is None or not value.is_graph_input() or ir_version < DEFAULTS_AS_INPUTS_UNTIL:
        value.shape = ir.Shape(dims)


def _mapped(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    """Return the tensor as one in memory, which it is as far as it is used.

    onnx looks for external data in the folder that the program runs in. Those in the graph itself
    are kept from it; others are not worth that.
    """
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)


def _require_file(
    tensor: ir.ExternalTensor, origin: str, remedy: str, path: Path | None
) -> ir.ExternalTensor:
    """Return the tensor with its resolved path; a missing or wrong file is an error."""
    file = Path(tensor.path)
    where = f"{origin} keeps the tensor {tensor.name!r} in the file {str(tensor.location)!r}"
    if not file.is_file():
        raise ModelError(f"{where}, which is not there: {remedy}")
    if path is not None:
        tensor = _in_folder_of(path, tensor, where)
    size = file.stat().st_size
    needed = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
    if size < needed:
        raise ModelError(
            f"{where}, which has {size} bytes where {needed} are needed: it is truncated, or "
            "belongs to another model"
        )
    if tensor.length is not None and tensor.length != tensor.nbytes:
        raise ModelError(
            f"{where} as {tensor.length} bytes, but {tensor.dtype} of shape {list(tensor.shape)} "
            f"takes {tensor.nbytes}: the model is damaged, or was written wrongly"
        )
    return tensor


def _in_folder_of(path: Path, tensor: ir.ExternalTensor, where: str) -> ir.ExternalTensor:
    """Refuse a file outside of the folder of the model: it would be copied into the result.

    Caches of downloaded models consist of links to one store. There the model is a link as well,
    and its files may be where that leads.
    """
    file, named = Path(tensor.path).resolve(), Path(os.path.normpath(tensor.path))
    folder, store = path.parent.resolve(), path.resolve().parent
    home = next((h for h in (folder, store) if file.is_relative_to(h)), None)
    if home is None or not named.is_relative_to(os.path.normpath(path.parent)):
        raise ModelError(
            f"{where}, which lies outside of the folder of the model: put it there, and let the "
            "model name it by its name alone"
        )
    if file.stat().st_nlink > 1:
        raise ModelError(
            f"{where}, which has another name elsewhere (a hard link): put a copy in its place"
        )
    if home == folder:
        return tensor
    moved = moved_to(tensor, str(file.relative_to(home)), home)
    moved.meta[_DECLARED_LOCATION] = tensor.location, tensor.base_dir
    return moved


def moved_to(
    tensor: ir.ExternalTensor, location: str | os.PathLike[str], folder: str | os.PathLike[str]
) -> ir.ExternalTensor:
    """Return the same data in another file."""
    return ir.ExternalTensor(
        location, tensor.offset, tensor.length, tensor.dtype,
        shape=tensor.shape, name=tensor.name, base_dir=folder,
    )  # fmt: skip


def restore_locations(model: ir.Model) -> None:
    """Point every initializer to the file that the given model named."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and _DECLARED_LOCATION in tensor.meta:
            value.const_value = moved_to(tensor, *tensor.meta[_DECLARED_LOCATION])
