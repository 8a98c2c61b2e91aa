"""Checks on the proto of a model, before anything interprets it.

onnx's checker runs later, on a copy without the large initializers, and onnx_ir accepts some broken
tensors: one without data would be zeros. So tensors and attributes are checked here as they are
stored, and errors name the part of the model that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.frontend.namecheck import Body, described, require_sound_names, subgraphs

_DATA_FIELDS = (
    "raw_data", "float_data", "int32_data", "int64_data", "uint64_data", "double_data",
    "string_data",
)  # fmt: skip
_FIELD_OF_TYPE = {
    "FLOAT": "float_data",
    "COMPLEX64": "float_data",
    "DOUBLE": "double_data",
    "COMPLEX128": "double_data",
    "INT64": "int64_data",
    "UINT32": "uint64_data",
    "UINT64": "uint64_data",
    "STRING": "string_data",
}  # all other types are in int32_data

_SPARSE = (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS)


def require_well_formed(model: onnx.ModelProto, origin: str) -> None:
    """Raise a ModelError that names the first part of a model that is not what it claims to be."""
    _check_opset_imports(model, origin)
    require_sound_names(model, origin)
    for body in _bodies(model):
        if isinstance(body, onnx.GraphProto):
            for tensor in body.initializer:
                _check_tensor(tensor, f"{origin}: the initializer {tensor.name!r}")
            for sparse in body.sparse_initializer:
                raise ModelError(
                    f"{origin}: the initializer {sparse.values.name!r} is sparse, which onnxtrain "
                    "does not support: store it as an ordinary tensor"
                )
        for node in body.node:
            _check_node(node, origin)


def _check_opset_imports(model: onnx.ModelProto, origin: str) -> None:
    versions: dict[str, int] = {}
    for opset in model.opset_import:
        domain = "" if opset.domain == "ai.onnx" else opset.domain
        if versions.setdefault(domain, opset.version) != opset.version:
            raise ModelError(
                f"{origin} imports two opsets of the domain {domain or 'ai.onnx'!r}, "
                f"{versions[domain]} and {opset.version}: its operators have no one meaning. "
                "Export it again, or remove the one that it was not written for"
            )


def _bodies(model: onnx.ModelProto) -> Iterator[Body]:
    waiting: list[Body] = [model.graph, *model.functions]
    while waiting:
        body = waiting.pop()
        yield body
        waiting.extend(graph for node in body.node for graph in subgraphs(node))


def _check_node(node: onnx.NodeProto, origin: str) -> None:
    where = f"{origin}: {described(node)}"
    if not node.op_type:
        raise ModelError(f"{where} has no operator (op_type)")
    if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.attribute) != 1:
        raise ModelError(
            f"{where} has {len(node.attribute)} attributes; a constant has one, its value"
        )
    seen = set()
    for attribute in node.attribute:
        if not attribute.name:
            raise ModelError(f"{where} has an attribute without a name")
        if attribute.name in seen:
            raise ModelError(f"{where} has the attribute {attribute.name!r} twice")
        seen.add(attribute.name)
        if attribute.type == onnx.AttributeProto.UNDEFINED and not attribute.ref_attr_name:
            raise ModelError(f"{where}: its attribute {attribute.name!r} has no type")
        if attribute.type in _SPARSE:
            raise ModelError(
                f"{where} holds a sparse tensor in its attribute {attribute.name!r}, which "
                "onnxtrain does not support: store it as an ordinary tensor"
            )
        tensors = [attribute.t] if attribute.type == onnx.AttributeProto.TENSOR else []
        if attribute.type == onnx.AttributeProto.TENSORS:
            tensors = list(attribute.tensors)
        if not attribute.ref_attr_name:
            for tensor in tensors:
                _check_tensor(tensor, f"{where}: the tensor in its attribute {attribute.name!r}")


def _check_tensor(tensor: onnx.TensorProto, what: str) -> None:
    dims = list(tensor.dims)
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        raise ModelError(
            f"{what} has the element type {tensor.data_type}, which is not an ONNX type"
        ) from None
    if dtype == ir.DataType.UNDEFINED:
        raise ModelError(f"{what} has no element type")
    if any(d < 0 for d in dims):
        raise ModelError(f"{what} has the shape {dims}: a tensor has no negative dimension")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external_entries(tensor, what)
        return
    if tensor.HasField("segment"):
        raise ModelError(f"{what} is stored in segments, which onnxtrain does not read")
    _check_data(tensor, dtype, dims, what)


def _check_data(
    tensor: onnx.TensorProto, dtype: ir.DataType, dims: Sequence[int], what: str
) -> None:
    stored = {name: len(getattr(tensor, name)) for name in _DATA_FIELDS}
    present = [name for name, count in stored.items() if count]
    if len(present) > 1:
        raise ModelError(f"{what} has its data twice, in {' and in '.join(present)}")
    count = math.prod(dims)
    own = _FIELD_OF_TYPE.get(dtype.name, "int32_data")
    field = present[0] if present else own
    if field not in (own, "raw_data") or (field == "raw_data" and dtype == ir.DataType.STRING):
        raise ModelError(f"{what} is of type {dtype.name} and has its data in {field}")
    needed, unit = count, "number(s)"
    if field == "raw_data":
        needed, unit = math.ceil(count * dtype.bitwidth / 8), "byte(s)"
    elif dtype.name.startswith("COMPLEX"):
        needed = 2 * count
    elif dtype != ir.DataType.STRING and dtype.bitwidth in (2, 4):
        needed = math.ceil(count * dtype.bitwidth / 8)
    if stored[field] != needed:
        raise ModelError(
            f"{what} holds {stored[field]} {unit} in {field}, where {dtype.name} of shape {dims} "
            f"needs {needed}: the model is damaged, or was written wrongly"
        )


def _check_external_entries(tensor: onnx.TensorProto, what: str) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries.get("location"):
        raise ModelError(f"{what} is in an external file that it does not name (location)")
    if "\0" in entries["location"]:
        raise ModelError(f"{what} is in an external file whose name is not valid")
    for key in ("offset", "length"):
        number = entries.get(key, "0")
        if not (number.isascii() and number.isdigit()):
            raise ModelError(
                f"{what} is in the file {entries['location']!r} with {key} {number!r}, which is "
                "not a number of bytes"
            )
