"""The tensors of a model, in the file or in external files, which are mapped and not read.

A model may name any file, and what it names ends up in artifacts. So only files in the folder of
the model are read: no absolute path, no way out by `..` or a link, no second name (a hard link).
onnx checks that too, or not, depending on its version; nothing here relies on it.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.frontend.canonicalize import DEFAULTS_AS_INPUTS_UNTIL
from onnxtrain.offline.frontend.wellformed import require_well_formed_tensor
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
    """Refuse a file outside of the folder of the model: it would be copied into the result."""
    home, inside = _place_beside(path, tensor.path, where)
    os.close(_open_inside(home, inside, where))
    if home == path.parent.resolve():
        return tensor
    moved = moved_to(tensor, str(inside), home)
    moved.meta[_DECLARED_LOCATION] = tensor.location, tensor.base_dir
    return moved


def _place_beside(path: Path, file: str | os.PathLike[str], where: str) -> tuple[Path, Path]:
    """Return the folder that a file beside a model is in, and its place there, free of links.

    Caches of downloaded models consist of links to one store. There the model is a link as well,
    and its files may be where that leads.
    """
    real, named = Path(file).resolve(), Path(os.path.normpath(file))
    homes = path.parent.resolve(), path.resolve().parent
    home = next((h for h in homes if real.is_relative_to(h)), None)
    if home is None or not named.is_relative_to(os.path.normpath(path.parent)):
        raise ModelError(
            f"{where}, which lies outside of the folder of the model: put it there, and let the "
            "model name it by its name alone"
        )
    return home, real.relative_to(home)


def _open_inside(home: Path, inside: Path, where: str) -> int:
    """Open a file for reading, and check what was opened: a name may lead elsewhere by then."""
    no_link = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    flags = os.O_RDONLY | no_link | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if os.open not in os.supports_dir_fd:
            opened = os.open(home / inside, flags)
        else:
            opened = os.open(home, os.O_RDONLY)
            for part in inside.parts:
                outer = opened
                try:
                    opened = os.open(part, flags, dir_fd=outer)
                finally:
                    os.close(outer)
    except OSError as error:
        raise ModelError(f"{where}, which cannot be read: {error.strerror}") from None
    about = os.fstat(opened)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(opened)
        other = "has another name elsewhere (a hard link)"
        kind = other if stat.S_ISREG(about.st_mode) else "is no ordinary file"
        raise ModelError(f"{where}, which {kind}: put a copy in its place")
    return opened


def read_external_tensor(tensor: onnx.TensorProto, path: str | os.PathLike[str]) -> None:
    """Read a tensor from its file beside a model into the proto, in place."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    require_well_formed_tensor(tensor, f"the tensor {tensor.name!r}")
    entries = {entry.key: entry.value for entry in tensor.external_data}
    where = f"the tensor {tensor.name!r} is in the file {entries['location']!r}"
    model = Path(path).absolute()
    file = model.parent / entries["location"]
    if not file.is_file():
        raise ModelError(f"{where}, which is not there: put it beside the model")
    itemsize = ir.DataType(tensor.data_type).bitwidth / 8
    needed = math.ceil(math.prod(tensor.dims) * itemsize)
    offset, length = int(entries.get("offset", 0)), int(entries.get("length", needed))
    with open(_open_inside(*_place_beside(model, file, where), where), "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if length != needed or size < offset + needed:
            raise ModelError(
                f"{where}, as {length} of its {size} bytes from {offset} on, where {needed} are "
                "needed: it is truncated, or belongs to another model"
            )
        opened.seek(offset)
        tensor.raw_data = opened.read(needed)
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


def read_external_data(model: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Read all tensors of a model from their files beside it, in place."""
    for tensor in tensors_of(model):
        read_external_tensor(tensor, path)


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model, its own initializers first.

    Those of bodies and functions are among them, and those in attributes.
    """
    waiting: list[onnx.GraphProto | onnx.FunctionProto] = [*model.functions, model.graph]
    while waiting:
        body = waiting.pop()
        if isinstance(body, onnx.GraphProto):
            yield from body.initializer
        for node in body.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                waiting.extend(attribute.graphs)
                if attribute.HasField("g"):
                    waiting.append(attribute.g)


def require_own_files(model: onnx.ModelProto) -> None:
    """Refuse a model without a path whose tensors are outside of the working directory."""
    beside = Path.cwd() / "model"
    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location = next((e.value for e in tensor.external_data if e.key == "location"), "")
            where = f"the given ModelProto keeps the tensor {tensor.name!r} in {location!r}"
            if location and "\0" not in location:
                _place_beside(beside, beside.parent / location, where)


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
