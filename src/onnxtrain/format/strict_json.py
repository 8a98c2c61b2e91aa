"""Strict JSON (RFC 8259), in which a number that is not finite is a string.

JSON has no NaN and no infinities: they are written as "NaN", "Infinity" and "-Infinity", and these
three strings are read as numbers wherever they stand. What is read may come from anyone: the
functions at the end take values out of it, and say which one is not what it should be.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DEEPEST = 100  # levels of lists and objects; ours have ten


def dumps(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON; numbers survive exactly."""
    return json.dumps(_mapped(value, _to_string), allow_nan=False, indent=indent)


def loads(text: str | bytes) -> Any:
    """Read JSON, including the bare NaN and Infinity that earlier versions wrote."""
    return _parsed(text, _to_number)


def loads_plain(text: str | bytes) -> Any:
    """Read JSON in which "NaN" is a text like others."""
    return _parsed(text, lambda item: item)


def _parsed(text: str | bytes, change: Callable[[Any], Any]) -> Any:
    """Read JSON of anyone.

    Whatever is wrong with the text is a ValueError: a key that is there twice, a number that no
    float holds, and levels without end, too.
    """
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise ValueError("it has too many levels") from None
    return _mapped(found, change)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shortened(twice)} is there twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > 300:  # a float has at most 309 digits
        raise ValueError(f"{digits[:20]}... is too large a number")
    return int(digits)


def _to_number(item: Any) -> Any:
    return _NUMBERS.get(item, item) if isinstance(item, str) else item


def _to_string(item: Any) -> Any:
    is_finite = not isinstance(item, float) or math.isfinite(item)
    return item if is_finite else json.dumps(item)  # Python's names are the same


def _mapped(value: Any, change: Callable[[Any], Any], level: int = 0) -> Any:
    if level > _DEEPEST:
        raise ValueError(f"it has more than {_DEEPEST} levels")
    if isinstance(value, dict):
        return {key: _mapped(item, change, level + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change, level + 1) for item in value]
    return change(value)


# ---- what is in it -------------------------------------------------------------------------------


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Return an object, or raise a ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {shortened(value)}, not an object")
    return value


def entry(record: Mapping[str, Any], name: str) -> Any:
    """Return an entry that has to be there."""
    if name not in record:
        raise ValueError(f"{name!r} is missing")
    return record[name]


def whole(record: Mapping[str, Any], name: str) -> int:
    """Return an entry that is an integer of 0 or more."""
    value = entry(record, name)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name!r} is {shortened(value)}, not a whole number of at least 0")
    return value


def number(record: Mapping[str, Any], name: str, finite: bool = True) -> float:
    """Return an entry that is a number."""
    value = entry(record, name)
    if type(value) not in (int, float) or (finite and not math.isfinite(value)):
        raise ValueError(f"{name!r} is {shortened(value)}, not a {'finite ' * finite}number")
    return float(value)


def shortened(value: Any, most: int = 60) -> str:
    """Return a value as messages show it."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
