"""The places for factors that a model has, and whether an adapter fits them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnxtrain.errors import AdapterError
from onnxtrain.format.adapter.elements import FLOATS, float_name
from onnxtrain.format.adapter.pairs import Pair, is_factor, shape_of
from onnxtrain.format.checkpoint.content import Tensor
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.model_metadata import ModelMetadata

INFERENCE_MODEL = "inference_model.onnx"


@dataclass(frozen=True)
class Slot:
    """A place for a factor: its element type by name, and its shape, None where any size fits."""

    kind: str
    dims: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Slots:
    """The places of a model, by name, and the fingerprint of its base, "" if it is not told."""

    source: str
    places: Mapping[str, Slot]
    base: str = ""


def slots_of(model: str | os.PathLike[str] | bytes) -> Slots:
    """Read the slots of a model for inference: a file, its bytes, or a folder of artifacts."""
    if isinstance(model, str | os.PathLike) and Path(model).is_dir():
        folder = Path(model)
        if not (folder / INFERENCE_MODEL).is_file():
            raise AdapterError(
                f"there is no {INFERENCE_MODEL} in {folder}: prepare it with train='lora'"
            )
        model = folder / INFERENCE_MODEL
    file = ModelFile.read(model)
    try:
        base = ModelMetadata.of(file.properties).base or ""
    except ValueError as error:
        raise AdapterError(f"{file.source_name}: {error}") from None
    defaults = set(file.initializer_names)
    places = {
        value.name: Slot(
            FLOATS.get(value.element_type, "another type"),
            None
            if value.dims is None
            else tuple(dim if isinstance(dim, int) else None for dim in value.dims),
        )
        for value in file.inputs
        if value.name in defaults or is_factor(value.name)
    }
    return Slots(file.source_name, places, base)


def require_fits(
    tensors: Mapping[str, Tensor],
    pairs: Collection[Pair],
    base: str,
    slots: Slots,
    *,
    all_slots: bool = False,
) -> None:
    """Refuse an adapter that does not fit a model; say which names, ranks or types differ.

    A slot that the adapter does not fill keeps its default, unless `all_slots` are to be filled.
    """
    if base and slots.base and base != slots.base:
        raise AdapterError(
            f"the adapter was trained on another base than that of {slots.source}: its fingerprint "
            f"is {base[:12]}..., not {slots.base[:12]}.... Train it on this base, or apply it to "
            "its own"
        )
    if not slots.places:
        raise AdapterError(
            f"{slots.source} has no slots for adapters: its inputs have no factors as defaults. "
            f"Use the {INFERENCE_MODEL} that onnxtrain.prepare(train='lora') writes, or merge the "
            "adapter into the model with onnxtrain.merge_adapter"
        )
    _require_names(tensors, slots, all_slots)
    axes = {name: axis for p in pairs for name, axis in zip((p.a, p.b), p.rank_axes, strict=True)}
    for name, tensor in tensors.items():
        _require_slot(name, tensor, axes.get(name), slots)


def _require_names(tensors: Mapping[str, Tensor], slots: Slots, all_slots: bool) -> None:
    unknown = [name for name in tensors if name not in slots.places]
    if unknown:
        raise AdapterError(
            f"{slots.source} has no slot for {len(unknown)} of the {len(tensors)} tensors of the "
            f"adapter: {_listed(unknown)}. {_near(unknown[0], slots.places)}"
        )
    missing = [name for name in slots.places if name not in tensors]
    if missing and all_slots:
        raise AdapterError(
            f"the adapter lacks {len(missing)} of the {len(slots.places)} factors that "
            f"{slots.source} trains: {_listed(missing)}. Train the same layers (layers=...), or "
            "set the others with load_parameters"
        )


def _near(name: str, places: Mapping[str, Slot]) -> str:
    near = difflib.get_close_matches(name, list(places)[:5000], 2)
    what = "Near it are" if near else "Its slots are called"
    return (
        f"{what} {_listed(near or list(places))}. Rename the tensors with Adapter.renamed, or "
        "choose the layers that the adapter was trained on"
    )


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(repr(name[:200]) for name in list(names)[:3])
    return f"{shown}, ..." if len(names) > 3 else shown


def _require_slot(name: str, tensor: Tensor, axis: int | None, slots: Slots) -> None:
    """Compare a tensor with its slot; along the axis, a factor is as long as its rank."""
    slot, kind, shape = slots.places[name], float_name(tensor, name), shape_of(tensor)
    if kind != slot.kind:
        raise AdapterError(
            f"{name!r} is {kind} in the adapter and {slot.kind} in {slots.source}: convert it with "
            f"Adapter.astype({slot.kind!r})"
        )
    if slot.dims is None:
        return
    fits = len(shape) == len(slot.dims) and all(
        wanted in (None, found) for wanted, found in zip(slot.dims, shape, strict=True)
    )
    if fits:
        return
    what = "it is of another model"
    if axis is not None and len(shape) == len(slot.dims):
        wanted_rank, rank = slot.dims[axis], shape[axis]
        if wanted_rank not in (None, rank):
            what = f"its rank is {rank} instead of {wanted_rank}: prepare with rank={rank}"
    wanted = ["any" if dim is None else dim for dim in slot.dims]
    raise AdapterError(
        f"{name!r} has the shape {list(shape)} in the adapter, and {wanted} in {slots.source}: "
        f"{what}".replace("'any'", "any")
    )
