"""Pairs of low-rank factors: what they belong to, and how they multiply.

For a layer `y = x·W`, the factors A `[in, rank]` and B `[rank, out]` add `(x·A)·B`. For a
convolution A is a kernel `[rank, in, ...]` of the same window, and B one of `[out, rank, 1, ...]`.
B holds the scale (alpha / rank) already: no graph multiplies by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from onnxtrain.errors import AdapterError
from onnxtrain.format.checkpoint.content import RawTensor, Tensor
from onnxtrain.format.model_metadata import ModelMetadata

_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<factor>[AB])(?:\.\w+)?\.weight")


def is_factor(name: str) -> bool:
    """Whether a name is one that PEFT and Olive give to factors."""
    return _FACTOR.fullmatch(name) is not None


class Pair(NamedTuple):
    """The two factors of a layer, by the names of their slots.

    `scale` is what B was multiplied by: alpha / rank, or 1 where a file does not tell.
    """

    layer: str
    a: str
    b: str
    rank: int
    scale: float
    kind: str  # "linear" or "conv"

    @property
    def rank_axes(self) -> tuple[int, int]:
        """The axis of A, and of B, that is as long as the rank."""
        return (0, 1) if self.kind == "conv" else (1, 0)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a factor."""
    return tensor.dims if isinstance(tensor, RawTensor) else tensor.shape


def pairs_of_record(record: Mapping[str, Any]) -> tuple[tuple[Pair, ...], str]:
    """Read `lora` and `base` out of a record that may come from anyone; a ValueError if wrong."""
    return pairs_of_metadata(ModelMetadata(lora=record.get("lora"), base=record.get("base")))


def pairs_of_metadata(metadata: ModelMetadata) -> tuple[tuple[Pair, ...], str]:
    """Return the pairs of a model, and the fingerprint of its base, "" if it is not told."""
    pairs = [Pair(**{key: pair[key] for key in Pair._fields}) for pair in metadata.lora or ()]
    return tuple(pairs), metadata.base or ""


def record_of_pairs(pairs: tuple[Pair, ...], base: str) -> dict[str, Any]:
    """Return what `pairs_of_record` reads."""
    record: dict[str, Any] = {"lora": [pair._asdict() for pair in pairs if pair.rank]}
    return {**record, "base": base} if base else record


def pairs_by_name(tensors: Mapping[str, Tensor], source: str) -> tuple[Pair, ...]:
    """Find the pairs by the names that PEFT and Olive give them: `<layer>.lora_A.weight`.

    Other tensors replace those of the base whole, unless their names say that they do something
    else.
    """
    factors: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _FACTOR.fullmatch(name)
        if _reason(name) or (match is None and "lora_" in name):
            raise AdapterError(
                f"{source}: {name[:200]!r} is not a factor of LoRA, which ends in .lora_A.weight "
                f"or .lora_B.weight{_reason(name)}"
            )
        if match is None:
            continue
        found = factors.setdefault(match["layer"], {})
        if match["factor"] in found:
            raise AdapterError(f"{source}: {name[:200]!r} is there twice in two spellings")
        found[match["factor"]] = name
    pairs = []
    for layer, names in factors.items():
        if len(names) < 2:
            missing = "B" if "A" in names else "A"
            raise AdapterError(f"{source}: {layer[:200]!r} has no factor lora_{missing}")
        dims = shape_of(tensors[names["A"]])
        kind = "linear" if len(dims) == 2 else "conv"
        rank = dims[1 if kind == "linear" else 0] if dims else 0
        pairs.append(Pair(layer, names["A"], names["B"], rank, 1.0, kind))
    return tuple(pairs)


def _reason(name: str) -> str:
    if "magnitude" in name:
        return ": adapters of DoRA, which also scale the base, are not supported"
    if ".quant." in name:
        return ": adapters with quantized factors are not supported; export them unquantized"
    if "lora_embedding" in name:
        return ": factors of embeddings are not supported"
    return ""


def require_consistent(pairs: tuple[Pair, ...], tensors: Mapping[str, Tensor], source: str) -> None:
    """Check that the pairs are there, and that their shapes fit each other."""
    named = [name for pair in pairs for name in (pair.a, pair.b)]
    missing = [name for name in named if name not in tensors]
    if missing:
        raise AdapterError(f"{source}: the factor {missing[0][:200]!r} is not there")
    for pair in pairs:
        a, b = shape_of(tensors[pair.a]), shape_of(tensors[pair.b])
        least = 2 if pair.kind == "linear" else 3
        if len(a) != len(b) or (len(a) != 2 if least == 2 else len(a) < 3):
            raise AdapterError(
                f"{source}: the factors of {pair.layer[:200]!r} have the shapes {list(a)} and "
                f"{list(b)}, which no {pair.kind} layer has"
            )
        ranks = a[pair.rank_axes[0]], b[pair.rank_axes[1]]
        if ranks != (pair.rank, pair.rank) or (pair.kind == "conv" and any(d != 1 for d in b[2:])):
            raise AdapterError(
                f"{source}: the factors of {pair.layer[:200]!r}, of shapes {list(a)} and "
                f"{list(b)}, do not multiply at rank {pair.rank}"
            )
