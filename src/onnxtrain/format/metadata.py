"""What each graph file says about the artifacts: JSON in its metadata property `onnxtrain`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from onnxtrain.format.model.tensor import stays_in_folder

METADATA_KEY = "onnxtrain"
FORMAT = 1  # of the artifact folder


@dataclass(frozen=True)
class GraphMetadata:
    """The metadata of a graph; `docs/format.md` describes each field.

    A graph without the property, such as one of ONNX Runtime's own tools, has the defaults.
    """

    format: int = FORMAT
    checkpoint: str = ""
    loss: str = ""
    outputs: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    target: str = "cpu"
    memory: Mapping[str, Any] | None = None
    on_cpu: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the value of the property."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for key, absent in (("target", "cpu"), ("memory", None), ("on_cpu", ())):
            if found[key] == absent:
                del found[key]
        return json.dumps(found, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> GraphMetadata:
        """Read the value of the property; a ValueError says what is wrong with it."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("the metadata of onnxtrain is not valid JSON") from None
        if not isinstance(found, dict):
            raise ValueError("the metadata of onnxtrain is not a JSON object")
        known: dict[str, Any] = {}
        for key, is_valid in _VALID.items():
            if key not in found:
                continue
            if not is_valid(found[key]):
                raise ValueError(f"{key!r} in the metadata of onnxtrain has a wrong type or value")
            known[key] = tuple(found[key]) if isinstance(found[key], list) else found[key]
        return cls(**known)


def _is_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def _is_text(found: Any) -> bool:
    return isinstance(found, str)


_VALID: dict[str, Callable[[Any], bool]] = {
    "format": lambda found: type(found) is int,
    "checkpoint": lambda found: isinstance(found, str) and stays_in_folder(found),
    "loss": _is_text,
    "outputs": _is_names,
    "trainable": _is_names,
    "frozen": _is_names,
    "statistics": _is_names,
    "target": _is_text,
    "memory": lambda found: isinstance(found, dict),
    "on_cpu": _is_names,
}
