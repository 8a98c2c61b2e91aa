"""`merge_adapter`: a model with an adapter in it, for those who run one adapter only."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from onnxtrain.errors import AdapterError, ArgumentError, ModelError
from onnxtrain.format.adapter.adapter import Adapter, PathLike
from onnxtrain.format.adapter.pairs import Pair
from onnxtrain.format.model_metadata import PREFIX, ModelMetadata
from onnxtrain.format.replace_file import replace_file
from onnxtrain.offline.frontend.canonicalize import DEFAULTS_AS_INPUTS_UNTIL
from onnxtrain.offline.frontend.external_data import read_external_tensor, tensors_of
from onnxtrain.offline.frontend.load import ModelLike, read_model
from onnxtrain.offline.lora import Lora
from onnxtrain.offline.passes.lora.factors import FactorWriter
from onnxtrain.offline.passes.lora.layers import Layer, factor_names, find_layers, slots_of
from onnxtrain.offline.passes.lora.slots import SlotModel
from onnxtrain.offline.passes.merge.remove_slots import remove_slots
from onnxtrain.offline.passes.merge.tensors import Tensors, sweep_constants, unread_names
from onnxtrain.offline.passes.merge.weights import NO_ERRORS, Errors, WeightMerger, update_of

Merge = Literal["auto", "float", "quantized", "factors"]
_WAYS = ("auto", "float", "quantized", "factors")
_MOST_BYTES = 2**31 - 2**20  # of a protobuf message


@dataclass(frozen=True)
class MergedLayer:
    """What became of a layer.

    Attributes:
        layer: its path.
        how: "float" or "quantized" for new weights, "factors" where the product stays beside it.
        errors: of weights that were quantized again.

    """

    layer: str
    how: str
    errors: Errors = NO_ERRORS


@dataclass(frozen=True)
class Merged:
    """A merged model, and what became of each layer."""

    model: onnx.ModelProto
    layers: tuple[MergedLayer, ...]

    def __str__(self) -> str:
        lines = []
        for how in ("float", "quantized", "factors"):
            found = [layer for layer in self.layers if layer.how == how]
            if found:
                lines.append(f"{len(found)} layers: {_TOLD[how]}{_error_of(found)}")
        return "\n".join(lines)


_TOLD = {
    "float": "merged into float weights",
    "quantized": "merged and quantized again",
    "factors": "the factors stay beside the weights",
}


def _error_of(layers: list[MergedLayer]) -> str:
    if layers[0].how != "quantized":
        return ""
    worst = max(layers, key=lambda layer: layer.errors.of_update)
    mean = sum(layer.errors.mean for layer in layers) / len(layers)
    largest = max(layer.errors.largest for layer in layers)
    return (
        f"; the weights are off by {mean:.2%} on average, and by {largest:.2%} of the largest at "
        f"most. Of what was learnt, {worst.errors.of_update:.0%} is lost in "
        f"{worst.layer!r}, where it is most"
    )


def merge_adapter(
    model: ModelLike,
    adapter: Adapter | PathLike,
    output: PathLike | None = None,
    *,
    merge: Merge = "auto",
) -> Merged:
    """Put an adapter into a model, which then needs no slots and no adapter file.

    Args:
        model: the model that the adapter was trained on, with slots (`inference_model.onnx`) or
            without.
        adapter: an `Adapter`, or its file or folder.
        output: where to write the model.
        merge: "float" adds the product of the factors to the weights, and makes quantized ones
            float; "quantized" quantizes these again in their own format, and tells the error;
            "factors" leaves all weights as they are, with the factors beside them; "auto" does the
            first for float weights and the last for quantized ones.

    Examples:
        >>> import numpy as np
        >>> a, b = np.ones((512, 2), "f4"), np.ones((2, 64), "f4")
        >>> adapter = onnxtrain.Adapter({"fc1.lora_A.weight": a, "fc1.lora_B.weight": b})
        >>> print(onnxtrain.merge_adapter("mobilenet.onnx", adapter, "styled.onnx"))
        1 layers: merged into float weights

    """
    if merge not in _WAYS:
        raise ArgumentError(f"merge is one of {', '.join(_WAYS)}, not {merge!r}")
    given = adapter if isinstance(adapter, Adapter) else Adapter.read(adapter)
    proto = _loaded(model, given)
    unread = unread_names(proto.graph)
    remove_slots(proto.graph)
    tensors = Tensors(proto)
    _put_whole(given, tensors)
    layers = _merge_all(proto, given, tensors, merge)
    sweep_constants(proto.graph, unread)
    if output is not None:
        _write(proto, Path(output))
    return Merged(proto, tuple(layers))


# ---- the model -----------------------------------------------------------------------------------


def _loaded(model: ModelLike, adapter: Adapter) -> onnx.ModelProto:
    """Return a copy of a model with all its tensors in it, if it is the base of the adapter."""
    found, path = read_model(model)
    proto = onnx.ModelProto()
    proto.CopyFrom(found)
    about = {entry.key: entry.value for entry in proto.metadata_props}
    try:
        base = ModelMetadata.of(about).base
    except ValueError as error:
        raise ModelError(f"the metadata of the model cannot be read: {error}") from None
    if adapter.base and adapter.base != (base or SlotModel.of(found, path).base):
        raise AdapterError(
            "the adapter was trained on another base than this model: their fingerprints differ. "
            "Give the model that it was trained on, or inference_model.onnx of its artifacts"
        )
    for tensor in tensors_of(proto):
        if path is not None:
            read_external_tensor(tensor, path)
    kept = {k: v for k, v in about.items() if k not in (f"{PREFIX}lora", f"{PREFIX}base")}
    del proto.metadata_props[:]
    onnx.helper.set_model_props(proto, kept)
    if proto.ir_version < DEFAULTS_AS_INPUTS_UNTIL:
        stored = {tensor.name for tensor in proto.graph.initializer}
        kept_inputs = [value for value in proto.graph.input if value.name not in stored]
        del proto.graph.input[:]
        proto.graph.input.extend(kept_inputs)
        proto.ir_version = DEFAULTS_AS_INPUTS_UNTIL
    return proto


def _put_whole(adapter: Adapter, tensors: Tensors) -> None:
    """Replace the tensors that were trained whole; they may be slots, too."""
    stored = {tensor.name: tensor for tensor in tensors.graph.initializer}
    for name in adapter.whole:
        if name not in stored or tuple(stored[name].dims) != adapter[name].shape:
            raise AdapterError(
                f"the model has no tensor {name!r} of shape {list(adapter[name].shape)}, which was "
                "trained whole: give inference_model.onnx of the artifacts"
            )
        tensors.set(name, adapter[name])
    kept = [value for value in tensors.graph.input if value.name not in adapter.whole]
    del tensors.graph.input[:]
    tensors.graph.input.extend(kept)


def _write(proto: onnx.ModelProto, path: Path) -> None:
    if proto.ByteSize() > _MOST_BYTES:
        raise ModelError(
            "the merged model has more than 2 GB, which one file cannot hold: run the model with "
            "slots and the adapter instead"
        )
    data = proto.SerializeToString(deterministic=True)
    try:
        replace_file(path, lambda file: file.write(data))
    except OSError as error:
        raise ModelError(f"cannot write {os.fspath(path)}: {error}") from None


# ---- the layers ----------------------------------------------------------------------------------


def _merge_all(
    proto: onnx.ModelProto, adapter: Adapter, tensors: Tensors, merge: Merge
) -> list[MergedLayer]:
    merger, beside, done = WeightMerger(tensors), list[Layer](), list[MergedLayer]()
    pairs = {pair.layer: pair for pair in adapter.pairs}
    for layers in _chosen(proto.graph, pairs):
        update = update_of(layers[0], adapter, pairs)
        how, errors = _merge_one(layers, update, merger, tensors, merge)
        if how == "factors":
            beside += layers
        done.append(MergedLayer(layers[0].path, how, errors))
    _insert(proto.graph, merger.behind)
    if beside:
        _write_beside(proto.graph, beside, adapter, pairs)
    return done


def _merge_one(
    layers: list[Layer], update: object, merger: WeightMerger, tensors: Tensors, merge: Merge
) -> tuple[str, Errors]:
    """Merge layers that share a weight, in the way that is asked for or the next one to it."""
    is_float = WeightMerger.is_float(layers[0], tensors)
    if merge == "factors" or (merge == "auto" and not is_float):
        return "factors", NO_ERRORS
    if merge == "quantized" and not is_float:
        errors = merger.merge_quantized(layers, update)  # type: ignore[arg-type]
        return ("factors", NO_ERRORS) if errors is None else ("quantized", errors)
    merged = merger.merge_float(layers, update)  # type: ignore[arg-type]
    return "float" if merged else "factors", NO_ERRORS


def _chosen(graph: onnx.GraphProto, pairs: Mapping[str, Pair]) -> list[list[Layer]]:
    """Return the layers of an adapter, those of one weight together."""
    found: dict[str, list[Layer]] = {}
    known: dict[str, str] = {}
    for layer in find_layers(graph).layers:
        paths = [path for path, _ in slots_of(layer)]
        known |= dict.fromkeys(paths, layer.weight)
        if any(path in pairs for path in paths):
            found.setdefault(layer.weight, []).append(layer)
    missing = [path for path in pairs if path not in known]
    if missing:
        near = difflib.get_close_matches(missing[0], known, 2) or list(known)[:3]
        raise AdapterError(
            f"the model has no layer {missing[0]!r} that the adapter has factors for, and "
            f"{len(missing)} such in all; it has {', '.join(map(repr, near))}. Rename the adapter "
            "with Adapter.renamed, or give the model that it was trained on"
        )
    return list(found.values())


def _insert(graph: onnx.GraphProto, behind: Mapping[str, list[onnx.NodeProto]]) -> None:
    if not behind:
        return
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        graph.node.extend(behind.get(node.output[0], ()) if node.output else ())


def _write_beside(
    graph: onnx.GraphProto, layers: list[Layer], adapter: Adapter, pairs: Mapping[str, Pair]
) -> None:
    """Put factors beside layers, as constants."""
    FactorWriter(graph).write([(layer, Lora()) for layer in layers], slots=True)
    slots = {name for layer in layers for path, _ in slots_of(layer) for name in factor_names(path)}
    kept = [value for value in graph.input if value.name not in slots]
    del graph.input[:]
    graph.input.extend(kept)
    values = {
        slot: adapter[name]
        for pair in pairs.values()
        for slot, name in zip(factor_names(pair.layer), (pair.a, pair.b), strict=True)
    }
    for tensor in graph.initializer:
        if tensor.name in slots and tensor.name in values:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            value = values[tensor.name].astype(dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
