"""Adds low-rank factors to the model of a user, and makes the same model with slots for them."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import onnx

from onnxtrain.errors import ArgumentError, OnnxTrainError, UnknownNameError
from onnxtrain.format.adapter.pairs import Pair
from onnxtrain.offline.lora import ALL_LINEAR, Lora
from onnxtrain.offline.passes.lora.factors import FactorWriter, pair_beside
from onnxtrain.offline.passes.lora.layers import (
    Layer,
    LayerSearch,
    find_layers,
    heads_of,
    layers_before,
    slots_of,
    with_parts,
)
from onnxtrain.offline.passes.lora.slots import SlotModel

_DROPOUT_OPSET = 12  # the first whose Dropout takes the mode as an input
Chosen = list[tuple[Layer, Lora]]


@dataclass(frozen=True)
class Adapted:
    """A model with factors to train, and the model for inference that has slots in their places."""

    proto: onnx.ModelProto
    pairs: tuple[Pair, ...]
    slots: SlotModel
    notes: tuple[str, ...]

    @property
    def factors(self) -> list[str]:
        """The names of what trains."""
        return [name for pair in self.pairs for name in (pair.a, pair.b)]

    def described(self) -> list[dict[str, Any]]:
        """Return the pairs as metadata of a model has them."""
        return [pair._asdict() for pair in self.pairs]


def add_lora(
    proto: onnx.ModelProto, path: Path | None, loras: Sequence[Lora], outputs: Sequence[str] = ()
) -> Adapted:
    """Put factors beside the layers that `loras` choose.

    A model that was read from a `path` is changed in place, as a copy would take its memory again.
    `outputs` are the values that the loss reads, by default those that the model returns. Layers
    that lead to none of them are left out. Those that make them are heads; by default those that
    make the first output, as others may be a cache of keys and values.
    """
    returned = [output.name for output in proto.graph.output]
    search = find_layers(proto.graph, proto.functions)
    search.layers = layers_before(proto.graph, search.layers, outputs or returned)
    chosen = _choose(search, loras, heads_of(proto.graph, search.layers, outputs or returned[:1]))
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=1)
    if opset < _DROPOUT_OPSET and any(lora.dropout for _, lora in chosen):
        raise ArgumentError(
            f"dropout of lora needs a model of opset {_DROPOUT_OPSET} or later, and this one has "
            f"{opset}: leave dropout out, or export the model with a later opset"
        )
    pairs = {path: pair_beside(path, lora, layer) for layer, lora in chosen
             for path, _ in slots_of(layer)}  # fmt: skip
    slots = SlotModel.of(proto, path)
    FactorWriter(slots.proto.graph).write(chosen, slots=True)
    made = proto
    if path is None:  # it may be the caller's
        made = onnx.ModelProto()
        made.CopyFrom(proto)
    FactorWriter(made.graph).write(chosen, slots=False)
    return Adapted(made, tuple(pairs.values()), slots, tuple(_notes(search, chosen)))


def _choose(search: LayerSearch, loras: Sequence[Lora], heads: set[str]) -> Chosen:
    """Return the layers that patterns match; where several do, the first counts."""
    found: dict[str, tuple[Layer, Lora]] = {}
    for lora in loras:
        for pattern in lora.patterns:
            matches = (
                _all_linear(search.layers, heads)
                if pattern == ALL_LINEAR
                else [chosen for layer in search.layers if (chosen := _matched(layer, pattern))]
            )
            if not matches:
                raise _nothing_matches(pattern, search)
            for layer in matches:
                earlier, first = found.get(layer.node.output[0], (layer, lora))
                paths = [path for each in (earlier, layer) for path, _ in slots_of(each)]
                found[layer.node.output[0]] = with_parts(earlier, paths), first
    return [found[out] for layer in search.layers if (out := layer.node.output[0]) in found]


def _all_linear(layers: Sequence[Layer], heads: set[str]) -> list[Layer]:
    """Return the matrix layers but the head; where there are none, the convolutions but the head.

    A model that is one layer has no head.
    """
    for group in ([x for x in layers if not x.is_conv], [x for x in layers if x.is_conv]):
        inner = [layer for layer in group if layer.y not in heads]
        if inner:
            return inner
    return list(layers)


def _matched(layer: Layer, pattern: str) -> Layer | None:
    """Return a layer that a pattern means: by its path, the end of it ("q_proj"), or its node.

    A pattern may mean some of the projections that one product computes.
    """

    def means(name: str) -> bool:
        is_end = name.endswith((f".{pattern}", f"/{pattern}"))
        return bool(name) and (is_end or fnmatch.fnmatchcase(name, pattern))

    if means(layer.path) or means(layer.node.name):
        return layer
    paths = [path for path, _ in slots_of(layer) if means(path)]
    return with_parts(layer, paths) if paths else None


def _nothing_matches(pattern: str, search: LayerSearch) -> OnnxTrainError:
    if not search.layers:
        why = f": it has {_counted(search.left_out)}" if search.left_out else ""
        return OnnxTrainError(
            f"lora finds no layer in this model that factors can be put beside{why}. Train "
            "something else (train='bias', or names)"
        )
    paths = list(dict.fromkeys(path for layer in search.layers for path, _ in slots_of(layer)))
    near = get_close_matches(pattern.strip("*."), paths, 3, 0.4) or paths[:5]
    more = f" and {len(paths) - len(near)} more" if len(paths) > len(near) else ""
    return UnknownNameError(
        f"lora: no layer matches {pattern!r}. The model has {', '.join(map(repr, near))}{more}"
    )


def _notes(search: LayerSearch, chosen: Chosen) -> list[str]:
    notes = []
    if search.left_out:
        notes.append(f"lora left out what it cannot be put beside: {_counted(search.left_out)}.")
    inside = [layer for layer, _ in chosen if layer.updates_weights]
    if inside:
        dropped = any(lora.dropout for layer, lora in chosen if layer.updates_weights)
        notes.append(
            f"{len(inside)} {inside[0].node.op_type} nodes take factors into their weights: these "
            "are multiplied with each other, and added to the weights, in each run"
            f"{', without dropout' if dropped else ''}."
        )
    return notes


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
