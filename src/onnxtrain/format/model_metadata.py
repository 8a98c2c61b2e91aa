"""What a model says about its own use: class names, the scaling of its input, activations.

The same keys and values are string properties of a checkpoint and metadata properties of a model;
an exported model has those of the evaluation graph, replaced by those of the checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from onnxtrain.format import strict_json

PREFIX = "onnxtrain."


@dataclass(frozen=True)
class ModelMetadata:
    """What is known of a model's inputs and outputs; a ValueError says what cannot be right.

    Attributes:
        classes: the names of the classes, in the order of the scores.
        mean: what is subtracted from pixels (of 0 to 1): one number, or one for each channel.
        std: what pixels are divided by then.
        size: height and width of images, for a model that takes any.
        columns: the columns of a table that are the features, in order.
        label: the columns of a table that are labels, with commas between them.
        activation: for outputs, by name, what makes probabilities of them: "softmax", "sigmoid",
            or "identity" where they are no scores of classes.
        labels: how the loss reads labels, where that is not usual: the `class_axis` of the scores,
            the `ignore_index` that does not count, `shift` 1 where a label is the next element.
        lora: the pairs of low-rank factors that train, each with the path of its `layer`, the names
            `a` and `b` of the factors, `rank`, `scale` (what their product is multiplied by), and
            `kind`: "linear" (A is [in, rank], B is [rank, out]) or "conv" (A is [rank, in, ...],
            B is [out, rank, 1, ...]).
        base: the fingerprint of the model without these factors, 32 hexadecimal digits.

    """

    classes: list[str] | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    size: list[int] | None = None
    columns: list[str] | None = None
    label: str | None = None
    activation: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    lora: list[dict[str, Any]] | None = None
    base: str | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not _PLACES[name].is_valid(value):
                wanted = _PLACES[name].wanted
                raise ValueError(f"{name} is {wanted}, not {strict_json.shortened(value, 300)}")

    def properties(self) -> dict[str, str]:
        """Return what is known as properties: keys, and JSON as values."""
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            key, entry, *_ = _PLACES[name]
            if value and entry:
                found.setdefault(key, {})[entry] = value
            elif value:
                found[key] = value
        return {key: json.dumps(value, allow_nan=False) for key, value in found.items()}

    @classmethod
    def of(cls, properties: Mapping[str, Any]) -> ModelMetadata:
        """Read properties of a checkpoint or of a model; others are passed over."""
        known = {}
        for name, (key, entry, *_) in _PLACES.items():
            if key not in properties:
                continue
            try:
                value = strict_json.loads_plain(str(properties[key]))
            except ValueError:
                raise ValueError(f"the property {key!r} is not valid JSON") from None
            if entry and not isinstance(value, dict):
                raise ValueError(f"the property {key!r} is not a JSON object")
            known[name] = value.get(entry) if entry else value
        return cls(**{name: value for name, value in known.items() if value is not None})


# ---- where each field is kept, and what it may be ------------------------------------------------


class _Place(NamedTuple):
    """A property, the entry of the object in it (or none), and what is valid there."""

    key: str
    entry: str
    is_valid: Callable[[Any], bool]
    wanted: str


def _is_list(value: Any, item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(item, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _are_names(value: Any) -> bool:
    return _is_list(value, _is_text) and len(set(value)) == len(value)


def _is_size(value: Any) -> bool:
    return _is_list(value, lambda side: type(side) is int and side > 0) and len(value) == 2


def _are_activations(value: Any) -> bool:
    kinds = ("softmax", "sigmoid", "identity")
    return isinstance(value, dict) and all(kind in kinds for kind in value.values())


def _is_layout(value: Any) -> bool:
    return isinstance(value, dict) and all(type(number) is int for number in value.values())


_LORA_TEXTS = ("layer", "a", "b", "kind")


def _is_pair(value: Any) -> bool:
    """Whether a value describes a pair of low-rank factors."""
    if not isinstance(value, dict) or not all(
        _is_text(value.get(key)) and value[key] for key in _LORA_TEXTS
    ):
        return False
    rank, scale = value.get("rank"), value.get("scale", 0)
    is_known = value["kind"] in ("linear", "conv")
    return is_known and type(rank) is int and rank > 0 and _is_number(scale) and scale > 0


def _are_pairs(value: Any) -> bool:
    if not _is_list(value, _is_pair):
        return False
    names = [pair[key] for pair in value for key in ("a", "b")]
    return len(set(names)) == len(names)


def _is_fingerprint(value: Any) -> bool:
    return _is_text(value) and len(value) == 32 and set(value) <= set("0123456789abcdef")


_PLACES = {
    "classes": _Place(PREFIX + "classes", "", _are_names, "a list of different names"),
    "mean": _Place(
        PREFIX + "image", "mean", lambda v: _is_list(v, _is_number), "a list of numbers"
    ),
    "std": _Place(
        PREFIX + "image", "std", lambda v: _is_list(v, lambda x: _is_number(x) and x != 0),
        "a list of numbers other than 0",
    ),
    "size": _Place(PREFIX + "image", "size", _is_size, "a list of height and width"),
    "columns": _Place(
        PREFIX + "table", "columns", lambda v: _is_list(v, _is_text), "a list of names"
    ),
    "label": _Place(PREFIX + "table", "label", _is_text, "a name"),
    "activation": _Place(
        PREFIX + "activation", "", _are_activations,
        "'softmax', 'sigmoid' or 'identity' for each output",
    ),
    "labels": _Place(PREFIX + "labels", "", _is_layout, "an object of whole numbers"),
    "lora": _Place(
        PREFIX + "lora", "", _are_pairs,
        "a list of pairs of factors, each with layer, a, b, rank, scale and kind",
    ),
    "base": _Place(PREFIX + "base", "", _is_fingerprint, "32 hexadecimal digits"),
}  # fmt: skip
