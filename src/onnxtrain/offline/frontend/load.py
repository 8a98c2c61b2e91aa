"""Reading a model: from a proto or a file, of any size, without copying its weights."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.offline.frontend.extent import require_moderate_extent
from onnxtrain.offline.frontend.external_data import require_own_files, settle_tensors
from onnxtrain.offline.frontend.wellformed import require_well_formed
from onnxtrain.offline.graph.declared import says_nothing
from onnxtrain.offline.graph.infer import root_cause
from onnxtrain.offline.graph.limits import require
from onnxtrain.offline.graph.versions import FLOOR_OPSET

USE_PATH_THRESHOLD = 2147483648  # bytes; a larger model is given by its path
STATES_OPSETS = 3  # the first IR version that does; before, there was opset 1
ModelLike = onnx.ModelProto | str | os.PathLike[str]


def load(model: ModelLike, *, located: bool = False) -> ir.Model:
    """Load a model from a proto or a path, without reading external weights into memory.

    In one that is `located`, onnxtrain itself has written full paths to files that it has checked.
    """
    proto, path = read_model(model, located=located)
    origin = "the given ModelProto" if path is None else repr(str(path))
    loaded = _from_proto(proto, origin)
    if path is not None:
        for graph in (loaded.graph, *(function.graph for function in loaded.functions.values())):
            ir.external_data.set_base_dir(graph, path.parent)
    remedy = "give the path of the model" if path is None else "put it beside the model"
    settle_tensors(loaded, origin, remedy, path)
    name_unknown_dims(loaded)
    return loaded


_REMEDY_FOR = {
    "bytes": ": give onnx.load_from_string(...)",
    "BytesIO": ": give onnx.load(...)",
    "Model": ": give onnx_ir.to_proto(...)",
    "GraphProto": ": give onnx.helper.make_model(...)",
}


def read_model(model: ModelLike, *, located: bool = False) -> tuple[onnx.ModelProto, Path | None]:
    """Return a model as a proto, and its path if it was given by one; external data stay there."""
    if isinstance(model, onnx.ModelProto):
        require_moderate_extent(model)
        try:
            size = model.ByteSize()
        except Exception as error:  # names of bytes that are no text, or graphs in graphs in graphs
            raise ModelError(f"the given ModelProto cannot be written down: {error}") from None
        if not located:
            require_own_files(model)
        if size > USE_PATH_THRESHOLD:
            raise ModelError("the model is larger than 2 GB: give the path of its file instead")
        return _without_maps(model), None
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(
            "a model is an onnx.ModelProto or a path to a file, not "
            f"{type(model).__name__}{_REMEDY_FOR.get(type(model).__name__, '')}"
        )
    path = Path(os.fsdecode(os.fspath(model)))
    if not path.is_file():
        kind = " (but a directory)" if path.is_dir() else ""
        raise ModelError(f"there is no model file at {str(path)!r}{kind}")
    require("file_bytes", path.stat().st_size, f"the size in bytes of {str(path)!r} is")
    try:
        read = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error}") from None
    except Exception:  # each of the formats that onnx reads has errors of its own
        raise ModelError(
            f"{str(path)!r} is not an ONNX model, or it is truncated ({path.stat().st_size} "
            f"bytes){_resembles(path)}"
        ) from None
    require_moderate_extent(read)
    return _without_maps(read), path


def _without_maps(model: onnx.ModelProto) -> onnx.ModelProto:
    """Refuse a model of dictionaries, as converters of scikit-learn write it by default."""
    zipped = [name for node in model.graph.node if node.op_type == "ZipMap" for name in node.output]
    if zipped:
        raise ModelError(
            f"the model returns {zipped[0]!r} as dictionaries (ZipMap), which no loss can read: "
            "convert it with options={'zipmap': False}"
        )
    return model


_SIGNATURES = (
    (0, b"version https://git-lfs", "a Git LFS pointer: fetch the file itself with 'git lfs pull'"),
    (0, b"PK\x03\x04", "a zip archive: unpack it, or export the checkpoint in it to ONNX"),
    (0, b"\x1f\x8b", "compressed with gzip: decompress it"),
    (4, b"ORTM", "a model in the ORT format: take the ONNX model that it was converted from"),
    (4, b"TFL3", "a TensorFlow Lite model: convert it to ONNX"),
    (0, b"<", "a web page, perhaps an error in place of a download"),
    (0, b"{", "JSON: onnx reads that from files named .json"),
    (0, b"ir_version", "the text format: onnx reads that from files named .textproto"),
)


def _resembles(path: Path) -> str:
    """Say what a file that is no model seems to be, where its first bytes tell."""
    if path.suffix not in (".onnx", ".pb", ""):
        return ""  # it was read as the format that its name says
    with path.open("rb") as file:
        head = file.read(64)
    for offset, signature, kind in _SIGNATURES:
        if head[offset:].startswith(signature):
            return f"; it seems to be {kind}"
    return ""


def require_outputs(proto: onnx.ModelProto, origin: str) -> None:
    """Refuse what may be read as a model, and is none: an empty file."""
    if not proto.HasField("graph") or not proto.graph.output:
        raise ModelError(f"{origin} holds no graph with outputs: it is empty, or not a whole model")


def _from_proto(proto: onnx.ModelProto, origin: str) -> ir.Model:
    require_outputs(proto, origin)
    unstated = not proto.opset_import and 0 < proto.ir_version < STATES_OPSETS
    if not proto.opset_import and not unstated:
        raise ModelError(f"{origin} states no opset (opset_import): its operators have no meaning")
    require_well_formed(proto, origin)
    try:
        loaded = ir.from_proto(proto)
        if unstated:
            loaded.opset_imports[""] = 1
        # The same name may be declared as an output, or in value_info, as something else.
        for value, info in zip(loaded.graph.inputs, proto.graph.input, strict=True):
            value.type = ir.serde.deserialize_type_proto_for_type(info.type)
            value.shape = ir.serde.deserialize_type_proto_for_shape(info.type)
        return loaded
    except Exception as error:  # onnx_ir raises many kinds; the user needs the cause, not the kind
        raise ModelError(f"{origin} is not a valid ONNX model: {root_cause(error)}") from None


def name_unknown_dims(model: ir.Model) -> None:
    """Give each unknown dimension of an input a name of its own, and forget those that say nothing.

    Some exporters write -1 or "?" for every dimension that they do not know; equal names would mean
    equal sizes.
    """
    inputs = set(model.graph.inputs)
    graphs = (model.graph, *model.graph.subgraphs())
    results = (v for g in graphs for v in (*g.outputs, *(o for n in g for o in n.outputs)))
    for value in (*inputs, *results):
        if value.const_value is not None or value.shape is None:
            continue
        if any(_is_unknown(d) for d in value.shape):
            names = [
                f"{value.name}_dim_{i}" if value in inputs else None
                for i in range(len(value.shape))
            ]
            dims = zip(value.shape, names, strict=True)
            value.shape = ir.Shape([name if _is_unknown(dim) else dim for dim, name in dims])


def _is_unknown(dim: int | ir.SymbolicDim) -> bool:
    return says_nothing(dim if isinstance(dim, int) else dim.value)


def check_opset(model: ir.Model) -> None:
    """Refuse opsets that are newer than what onnxtrain understands."""
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
