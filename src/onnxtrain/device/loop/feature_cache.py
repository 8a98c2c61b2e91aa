"""Frozen features: the outputs of frozen layers are computed once, not in every epoch.

If what trains follows frozen layers, a training graph has two parts: the first depends on the
samples and on constants alone, the second on its results. The graph is cut between them. The first
part runs once over the data, the second in each step, with results of the first as inputs, and with
what it still needs of the samples. Values stay the same: no node is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.device.export.layout import value_info
from onnxtrain.device.loop.batches import ArraySource, Source
from onnxtrain.device.loop.frozen_region import FrozenRegion
from onnxtrain.device.loop.rows import Rows
from onnxtrain.device.run.graph import Graph, value_type
from onnxtrain.device.run.inputs import prepared
from onnxtrain.errors import ArgumentError, InputError
from onnxtrain.format.checkpoint.content import Array

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

_PROBED = 3  # samples that show which values belong to one sample each


class FrozenFeatures:
    """The frozen part of a session, apart from what trains.

    `values` are those that are kept for all samples; `inputs` the inputs that are not needed then.
    """

    def __init__(self, session: TrainingSession, data: Mapping[str, Rows]) -> None:
        self._session = session
        names = frozenset(session.input_names())
        models = [session.module.training_executor.graph.model, session.fused_model]
        if any(model is not None and model.is_ort for model in models):
            raise ArgumentError(
                "cache_features takes graphs apart, and these are in the ORT format: load the "
                ".onnx files of the folder"
            )
        regions = [FrozenRegion(model, names) for model in models if model is not None]
        keys = [region.keys() for region in regions]
        shared = set(keys[0].values()).intersection(*(found.values() for found in keys))
        cached = {keys[0][n] for n in self._of_one_sample(regions[0], data)} & shared
        cuts = [
            region.cut(frozenset(n for n, key in found.items() if key in cached))
            for region, found in zip(regions, keys, strict=True)
        ]
        if not all(r.gains(second) for r, (_, second) in zip(regions, cuts, strict=True)):
            trained = frozenset(session.state._training.trainable_names())
            raise ArgumentError(
                f"there are no frozen features to keep: {regions[0].why_nothing(trained)}. Leave "
                "cache_features out"
            )
        crossing = {found[n] for found, (values, _) in zip(keys, cuts, strict=True) for n in values}
        own = {keys[0][name]: name for name in regions[0].heavy_values()}
        self.values = tuple(own[key] for key in own if key in crossing)
        read = frozenset().union(*(r.reads(s) for r, (_, s) in zip(regions, cuts, strict=True)))
        dropped = names - read
        self.inputs = tuple(sorted(dropped))
        self._backbone = session.module.graph(regions[0].first_part(self.values))
        # The inputs that take their place have names of their own, the same in both graphs.
        self.features = {f"feature.{place}": n for place, n in enumerate(self.values)}
        kinds = [value_type(output) for output in self._backbone.session.get_outputs()]
        infos = {
            name: memoryview(value_info(name, kind.element_type, kind.dims))
            for name, kind in zip(self.features, kinds, strict=True)
        }
        self._second = []
        for region, found, (_, second) in zip(regions, keys, cuts, strict=True):
            here = {key: name for name, key in found.items()}
            as_named = {f: here[keys[0][n]] for f, n in self.features.items()}
            self._second.append(region.second_part(second, infos, as_named, dropped))

    def _of_one_sample(self, region: FrozenRegion, data: Mapping[str, Rows]) -> frozenset[str]:
        """Return the values whose rows belong to one sample each, whatever else is in the batch.

        Their declared shapes do not tell: so the first samples are run beside each other, and
        beside copies of themselves.
        """
        values = region.heavy_values()
        if not values:
            return frozenset()
        graph = self._session.module.graph(region.first_part(values))
        size = self._fixed_batch() or _PROBED
        count = len(next(iter(data.values())))
        rows = np.arange(size) % count
        mixed, *alike = (
            self._run(graph, values, {name: array[chosen] for name, array in data.items()})
            for chosen in (rows, np.full(size, rows[0]), np.full(size, rows[-1]))
        )
        found = set()
        for index, name in enumerate(values):
            value = mixed[index]
            is_array = isinstance(value, np.ndarray)  # and not a sequence of them
            if (
                is_array
                and value.shape[:1] == (size,)
                and all(
                    _close(value[place], same[index][row])
                    for place, same in zip((0, -1), alike, strict=True)
                    for row in range(size)
                )
            ):
                found.add(name)
        return frozenset(found)

    def _fixed_batch(self) -> int | None:
        """The number of samples, where the graphs take no other."""
        first = self._session.input_types()[0].dims
        if first and isinstance(first[0], int):
            return first[0]
        return self._session.module.settings.batch

    def compute(
        self, data: Mapping[str, Rows], batch_size: int, directory: Path | None = None
    ) -> dict[str, Rows]:
        """Return data with the features of all samples instead of the inputs they come from.

        With a directory, features are kept in files there and mapped, not in memory.
        """
        count = len(next(iter(data.values())))
        features: dict[str, Array] = {}
        size = self._fixed_batch() or batch_size
        for start in range(0, count, size):
            stop = min(start + size, count)
            # Where the size of a batch is fixed, the last one is filled up.
            place: Any = slice(start, stop)
            if self._fixed_batch():
                place = np.arange(start, start + size) % count
            chosen = {name: array[place] for name, array in data.items()}
            made = self._run(self._backbone, self.values, chosen)
            for name, array in zip(self.features, made, strict=True):
                if name not in features:
                    kept = self.features[name]
                    features[name] = _memory(directory, kept, (count, *array.shape[1:]), array)
                features[name][start:stop] = array[: stop - start]
        rest = {name: array for name, array in data.items() if name not in self.inputs}
        return {**features, **rest}

    def _run(self, graph: Graph, values: Sequence[str], samples: Mapping[str, Array]) -> list[Any]:
        """Return values of the frozen part for samples, which are checked as a step does."""
        declared = self._session.input_types()
        given = prepared(declared, list(samples.values()))
        session = graph.session
        taken = {value.name for value in session.get_inputs()}
        feeds = {
            value.name: held.numpy()
            for value, held in zip(declared, given, strict=True)
            if value.name in taken
        }
        try:
            result: list[Any] = session.run(list(values), feeds)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise InputError(f"the frozen layers cannot run on these samples: {error}") from None
        return result

    def installed(self) -> AbstractContextManager[None]:
        """Let the session take features instead of samples, within the context."""
        train, *fused = self._second
        return self._session.replaced_graphs(train, fused[0] if fused else None)


@contextmanager
def cached_features(
    session: TrainingSession,
    source: Source,
    batch_size: int,
    cache: bool | str | os.PathLike[str],
) -> Iterator[Source]:
    """Yield the batches to train with: of features instead of samples, if `cache` asks for it."""
    if cache is False:
        yield source
        return
    if not isinstance(source, ArraySource):
        raise ArgumentError("cache_features needs the data as arrays, not as batches")
    # What a step would refuse is refused before anything is computed.
    prepared(session.input_types(), [array[:batch_size] for array in source.arrays])
    arrays = dict(zip(session.input_names(), source.arrays, strict=True))
    features = FrozenFeatures(session, arrays)
    directory = None if cache is True else Path(os.fspath(cache))
    made = features.compute(arrays, batch_size, directory)
    with features.installed():
        ordered = [made[name] for name in session.input_names()]
        of_features = replace(source, arrays=ordered)
        of_features.notes = source.notes
        yield of_features


def _close(one: Any, other: Any) -> bool:
    """Whether two results are the same, but for rounding."""
    if not isinstance(one, np.ndarray) or one.shape != other.shape:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    largest = float(np.max(np.abs(one), initial=0.0, where=np.isfinite(one)))
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-4 * largest, equal_nan=True))


def _memory(directory: Path | None, name: str, shape: tuple[int, ...], like: Array) -> Array:
    if directory is None:
        return np.empty(shape, like.dtype)
    directory.mkdir(parents=True, exist_ok=True)
    safe = "".join(c if c.isalnum() else "_" for c in name)
    path = directory / f"{safe}.npy"
    made: Array = np.lib.format.open_memmap(path, mode="w+", dtype=like.dtype, shape=shape)
    return made
