"""Checks of single arguments: each returns the value, or says what is wrong with it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtrain.errors import ArgumentError


def at_least(least: int, name: str, value: Any) -> int:
    """Check for an integer that is not less than `least`."""
    try:
        # A bool is an integer to Python, but never meant as one here.
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ArgumentError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return number


def finite(name: str, value: Any) -> float:
    """Check for a number that is neither infinite nor NaN."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ArgumentError(f"{name} must be a finite number, not {value!r}")
    return number


def count_bad(array: NDArray[Any]) -> int:
    """Return how many elements of an array are infinite or not a number."""
    if array.dtype.kind != "f":
        return 0
    if array.dtype == np.float32 and array.flags.c_contiguous:
        flat = array.reshape(-1)
        # Several times faster than a test of each element: NaN and infinity survive in the sum.
        # Large numbers may overflow; then each element is tested after all.
        with np.errstate(all="ignore"):
            if math.isfinite(np.dot(flat, flat)):
                return 0
    return int(array.size - np.count_nonzero(np.isfinite(array)))


def float32(name: str, value: Any) -> float:
    """Check for a number that is finite in 32 bits, and return it rounded to them."""
    with np.errstate(over="ignore"):
        return finite(name, np.float32(finite(name, value)))


def not_negative(name: str, value: Any) -> float:
    """Check for a finite number of 0 or more."""
    number = finite(name, value)
    if number < 0:
        raise ArgumentError(f"{name} must not be negative, but is {value!r}")
    return number


def positive(name: str, value: Any) -> float:
    """Check for a finite number of more than 0."""
    number = finite(name, value)
    if number <= 0:
        raise ArgumentError(f"{name} must be more than 0, not {value!r}")
    return number


def fraction(name: str, value: Any) -> float:
    """Check for a number from 0 to 1."""
    number = finite(name, value)
    if not 0 <= number <= 1:
        raise ArgumentError(f"{name} must be from 0 to 1, not {value!r}")
    return number


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Check for one of a few words."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ArgumentError(f"{name} must be one of {listed}, not {value!r}")
    return str(value)
