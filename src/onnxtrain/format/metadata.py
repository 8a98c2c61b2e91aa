"""What each graph file says about the artifacts: JSON in its metadata property `onnxtrain`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from onnxtrain.format import strict_json
from onnxtrain.format.model.tensor import stays_in_folder

METADATA_KEY = "onnxtrain"
FORMAT = 1  # of the artifact folder
_LEFT_OUT = {
    "target": "cpu", "memory": None, "on_cpu": (), "generation": "", "kernels": (), "gradients": (),
    "base": "", "folded": (),
}  # fmt: skip


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
    generation: str = ""
    kernels: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    base: str = ""
    folded: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the value of the property."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for key, absent in _LEFT_OUT.items():
            if found[key] == absent:
                del found[key]
        return json.dumps(found, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> GraphMetadata:
        """Read the value of the property; a ValueError says what is wrong with it."""
        try:
            found = strict_json.loads_plain(text)
        except ValueError:
            raise ValueError("the metadata of onnxtrain is not valid JSON") from None
        if not isinstance(found, dict):
            raise ValueError("the metadata of onnxtrain is not a JSON object")
        known: dict[str, Any] = {}
        for field in fields(cls):
            if field.name not in found:
                continue
            value = found[field.name]
            if isinstance(field.default, tuple):
                is_valid = isinstance(value, list) and all(isinstance(n, str) for n in value)
                value = tuple(value) if is_valid else ()
            else:
                is_valid = type(value) is (dict if field.default is None else type(field.default))
            is_file = field.name == "checkpoint" or (field.name == "base" and value != "")
            if not is_valid or (is_file and not stays_in_folder(value)):
                raise ValueError(
                    f"{field.name!r} in the metadata of onnxtrain has a wrong type or value"
                )
            known[field.name] = value
        return cls(**known)
