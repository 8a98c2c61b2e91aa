"""The data of a client or a server: arrays, batches, or functions of the context that give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flwr.app import Context

from onnxtrain.device.loop.batches import count_samples
from onnxtrain.errors import ArgumentError

Data = Any | Callable[[Context], Any]


def data_of(given: Data, context: Context, purpose: str) -> Any:
    """Return the data of a client; none is an error."""
    data = made_by(given, context)
    if data is None or samples_in(data) == 0:
        raise ArgumentError(f"this client has no data {purpose}")
    return data


def made_by(given: Data, context: Context) -> Any:
    """Return data as they are given, or as a function makes them: an iterator for each epoch."""
    data = given(context) if callable(given) else given
    if callable(given) and isinstance(data, Iterator):
        return _made_again(data, lambda: given(context))
    return data


def _made_again(first: Iterator[Any], make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that gives an iterator for each epoch; one is there already."""
    there = [first]
    return lambda: there.pop() if there else make()


def samples_in(data: Any) -> int:
    """Return how many samples there are; data that can be gone through once are not touched."""
    if isinstance(data, Mapping):
        return count_samples(list(data.values()))
    if isinstance(data, tuple):
        return count_samples(list(data)) if data else 0
    if isinstance(data, np.ndarray):
        return len(data)
    if isinstance(data, list):
        return sum(samples_in(tuple(b) if isinstance(b, list) else b) for b in data)
    return 1
