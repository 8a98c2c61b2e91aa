"""Checks on the proto of a model, before anything interprets it.

onnx's checker runs later, on a copy without the large initializers, and onnx_ir accepts some broken
tensors: one without data would be zeros. So tensors and attributes are checked here as they are
stored, and errors name the part of the model that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError

Body = onnx.GraphProto | onnx.FunctionProto
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
    """Raise a ModelError that names the first part of a model that is not what it claims to be.

    Each value has a name, is made once, and is there where it is used. The order of nodes is left
    open, as runtimes do not mind it.
    """
    _check_opset_imports(model, origin)
    waiting: list[tuple[Body, tuple[set[str], ...]]] = [(model.graph, ())]
    waiting.extend((function, ()) for function in model.functions)
    while waiting:
        body, around = waiting.pop()
        visible = (*around, _defined(body, origin))
        if isinstance(body, onnx.GraphProto):
            for tensor in body.initializer:
                require_well_formed_tensor(tensor, f"{origin}: the initializer {tensor.name!r}")
            for sparse in body.sparse_initializer:
                raise ModelError(
                    f"{origin}: the initializer {sparse.values.name!r} is sparse, which onnxtrain "
                    "does not support: store it as an ordinary tensor"
                )
        for node in body.node:
            _check_node(node, origin)
            for name in node.input:
                _require(name, visible, f"{_described(node)} uses", origin)
            for attribute in node.attribute:
                is_graph = attribute.type == onnx.AttributeProto.GRAPH
                graphs = [attribute.g] if is_graph else attribute.graphs
                waiting.extend((graph, visible) for graph in graphs)
        for name in _names(body.output):
            if not name:
                raise ModelError(f"{origin}: an output of {_titled(body)} has no name")
            _require(name, visible, f"{_titled(body)} has the output", origin)


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


def _described(node: onnx.NodeProto) -> str:
    """Name a node for the reader of an error, by its first output where it has no name."""
    label = node.name or next((name for name in node.output if name), "")
    return f"node {label!r} ({node.op_type})"


def _defined(body: Body, origin: str) -> set[str]:
    """Return the names that a body defines, each of them once."""
    makers: dict[str, str] = {}

    def define(name: str, maker: str) -> None:
        if name in makers:
            raise ModelError(
                f"{origin}: there are two values {name!r}, {makers[name]} and {maker}: every value "
                "needs a name of its own"
            )
        makers[name] = maker

    for name in _names(body.input):
        if not name:
            raise ModelError(f"{origin}: an input of {_titled(body)} has no name")
        define(name, f"an input of {_titled(body)}")
    if isinstance(body, onnx.GraphProto):
        given = set(makers)
        for tensor in body.initializer:
            if not tensor.name:
                raise ModelError(f"{origin}: an initializer of {_titled(body)} has no name")
            if tensor.name not in given:  # one that is an input too is its default
                define(tensor.name, "an initializer")
            given.discard(tensor.name)
    for node in body.node:
        for name in filter(None, node.output):
            define(name, f"a result of {_described(node)}")
    return set(makers)


def _require(name: str, visible: tuple[set[str], ...], user: str, origin: str) -> None:
    if name and not any(name in scope for scope in visible):
        raise ModelError(
            f"{origin}: {user} {name!r}, which is not there: no node makes it, and it is neither "
            "an input nor an initializer"
        )


def _titled(body: Body) -> str:
    kind = "graph" if isinstance(body, onnx.GraphProto) else "function"
    return f"the {kind} {body.name!r}"


def _names(values: Iterable[str | onnx.ValueInfoProto]) -> list[str]:
    """Return the names of inputs or outputs; those of a function are nothing else."""
    return [v if isinstance(v, str) else v.name for v in values]


def _check_node(node: onnx.NodeProto, origin: str) -> None:
    where = f"{origin}: {_described(node)}"
    if not node.op_type:
        raise ModelError(f"{where} has no operator (op_type)")
    if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.attribute) != 1:
        raise ModelError(
            f"{where} has {len(node.attribute)} attributes; a constant has one, its value"
        )
    seen = set()
    is_split = node.op_type == "Split" and node.domain in ("", "ai.onnx")
    for attribute in node.attribute:
        if not attribute.name:
            raise ModelError(f"{where} has an attribute without a name")
        if attribute.name in seen:
            raise ModelError(f"{where} has the attribute {attribute.name!r} twice")
        seen.add(attribute.name)
        if attribute.name == "num_outputs" and attribute.i != len(node.output) and is_split:
            raise ModelError(
                f"{where} has num_outputs {attribute.i}, but {len(node.output)} output(s)"
            )
        if attribute.type == onnx.AttributeProto.UNDEFINED and not attribute.ref_attr_name:
            raise ModelError(f"{where}: its attribute {attribute.name!r} has no type")
        if attribute.type in _SPARSE:
            raise ModelError(
                f"{where} holds a sparse tensor in its attribute {attribute.name!r}, which "
                "onnxtrain does not support: store it as an ordinary tensor"
            )
        is_tensor = attribute.type == onnx.AttributeProto.TENSOR and not attribute.ref_attr_name
        for tensor in [attribute.t] if is_tensor else attribute.tensors:
            require_well_formed_tensor(
                tensor, f"{where}: the tensor in its attribute {attribute.name!r}"
            )


def require_well_formed_tensor(tensor: onnx.TensorProto, what: str) -> None:
    """Raise a ModelError for a tensor whose type, shape and data do not fit each other."""
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        raise ModelError(
            f"{what} has the element type {tensor.data_type}, which is not an ONNX type"
        ) from None
    if dtype == ir.DataType.UNDEFINED:
        raise ModelError(f"{what} has no element type")
    if any(d < 0 for d in tensor.dims):
        raise ModelError(
            f"{what} has the shape {list(tensor.dims)}: a tensor has no negative dimension"
        )
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external_entries(tensor, what)
    elif tensor.HasField("segment"):
        raise ModelError(f"{what} is stored in segments, which onnxtrain does not read")
    else:
        _check_data(tensor, dtype, what)


def _check_data(tensor: onnx.TensorProto, dtype: ir.DataType, what: str) -> None:
    stored = {name: len(getattr(tensor, name)) for name in _DATA_FIELDS}
    present = [name for name, count in stored.items() if count]
    if len(present) > 1:
        raise ModelError(f"{what} has its data twice, in {' and in '.join(present)}")
    count = math.prod(tensor.dims)
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
            f"{what} holds {stored[field]} {unit} in {field}, where {dtype.name} of shape "
            f"{list(tensor.dims)} needs {needed}: the model is damaged, or was written wrongly"
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
