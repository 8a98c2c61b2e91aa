"""Strict JSON (RFC 8259), in which a number that is not finite is a string.

JSON has no NaN and no infinities: they are written as "NaN", "Infinity" and "-Infinity", and these
three strings are read as numbers wherever they stand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON; numbers survive exactly."""
    return json.dumps(_mapped(value, _to_string), allow_nan=False, indent=indent)


def loads(text: str | bytes) -> Any:
    """Read JSON, including the bare NaN and Infinity that earlier versions wrote."""
    return _mapped(json.loads(text), _to_number)


def _to_number(item: Any) -> Any:
    return _NUMBERS.get(item, item) if isinstance(item, str) else item


def _to_string(item: Any) -> Any:
    is_finite = not isinstance(item, float) or math.isfinite(item)
    return item if is_finite else json.dumps(item)  # Python's names are the same


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return change(value)
