"""How long a run takes: both models in turn, so that what slows the machine slows both."""

from __future__ import annotations

import statistics
import time

from onnxtrain.offline.compare.models import Feeds, OpenModel

_WARM_UP = 2
_MOST, _LEAST = 50, 5  # runs of each
_SECONDS = 3.0  # after which the least number is enough


def latencies(first: OpenModel, second: OpenModel, feeds: Feeds) -> tuple[float, float]:
    """Return the median of the seconds that each model takes for a batch."""
    models = (first, second)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_WARM_UP):
        for model in models:
            model.run(model.outputs, feeds)
    began = time.perf_counter()
    while len(times[0]) < _MOST:
        for model, found in zip(models, times, strict=True):
            start = time.perf_counter()
            model.run(model.outputs, feeds)
            found.append(time.perf_counter() - start)
        if len(times[0]) >= _LEAST and time.perf_counter() - began > _SECONDS:
            break
    return statistics.median(times[0]), statistics.median(times[1])
