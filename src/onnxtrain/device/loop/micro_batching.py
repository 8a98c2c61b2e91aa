"""Ways to train with less: less memory for a batch, less time for an epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.device.loop.feature_cache import FrozenFeatures
from onnxtrain.errors import ArgumentError
from onnxtrain.format.checkpoint.content import Array

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


def in_passes(data: Any, batch_size: int, accumulate: int, passes: int) -> tuple[int, int]:
    """Return the size of a pass, and how many of them there are to an update."""
    if not _are_arrays(data):
        raise ArgumentError(
            "micro_batch divides batches of arrays; give smaller batches and accumulate instead"
        )
    if batch_size % passes:
        raise ArgumentError(f"a batch of {batch_size} cannot be divided into {passes} equal passes")
    return batch_size // passes, accumulate * passes


def with_features(
    session: TrainingSession, data: Any, batch_size: int, place: bool | str | os.PathLike[str]
) -> tuple[FrozenFeatures, dict[str, Array]]:
    """Run the frozen part of a model over the data; return it, and the data for the rest."""
    if not _are_arrays(data):
        raise ArgumentError("cache_features needs the data as arrays, not as batches")
    names = session.input_names()
    if not isinstance(data, Mapping) and len(data) != len(names):
        raise ArgumentError(f"there are {len(data)} arrays for the inputs {', '.join(names)}")
    arrays = dict(data) if isinstance(data, Mapping) else dict(zip(names, data, strict=True))
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ArgumentError(f"there is no array for the input {missing[0]!r}")
    if len({len(array) for array in arrays.values()}) > 1:
        sizes = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise ArgumentError(f"the arrays have different numbers of samples: {sizes}")
    features = FrozenFeatures(session)
    directory = None if place is True else Path(os.fspath(place))  # type: ignore[arg-type]
    return features, features.compute(arrays, batch_size, directory)


def _are_arrays(data: Any) -> bool:
    parts = data.values() if isinstance(data, Mapping) else data
    return isinstance(data, Mapping | tuple) and all(isinstance(p, np.ndarray) for p in parts)
