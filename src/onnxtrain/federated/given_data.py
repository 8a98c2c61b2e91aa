"""The data of a client or a server: arrays, batches, or functions of the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import Context

from onnxtrain.device.loop.batches import count_samples
from onnxtrain.errors import ArgumentError

Data = Any | Callable[[Context], Any]


def data_of(given: Data, context: Context, purpose: str) -> Any:
    """Return the data of a client; no data is an error."""
    data = made_by(given, context)
    if data is None or samples_in(data) == 0:
        raise ArgumentError(f"this client has no data {purpose}")
    return data


def made_by(given: Data, context: Context) -> Any:
    """Return the data, or what a function of the context returns: a new iterator per epoch."""
    data = given(context) if callable(given) else given
    if callable(given) and isinstance(data, Iterator):
        first = [data]
        return lambda: first.pop() if first else given(context)
    return data


def samples_in(data: Any) -> int:
    """Return the number of samples; iterators count as 1, as they can be read only once."""
    if isinstance(data, Mapping):
        return count_samples(list(data.values()))
    if isinstance(data, tuple):
        return count_samples(list(data)) if data else 0
    if isinstance(data, np.ndarray):
        return len(data)
    if isinstance(data, list):
        return sum(samples_in(tuple(b) if isinstance(b, list) else b) for b in data)
    return 1
