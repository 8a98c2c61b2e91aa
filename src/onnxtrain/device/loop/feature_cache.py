"""Frozen features: the outputs of a frozen backbone are computed once, not in every epoch.

If everything that trains follows frozen layers, a training graph has two parts: the first depends
on the samples and on constants alone, the second on its results. The graph is cut between them. The
first part runs once over the data, the second in each step, with results of the first as inputs.
Values stay the same: no node is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.device.export.model_parts import ModelParts, Node, NodeField, find_needed, take_apart
from onnxtrain.device.export.prune import layout_of
from onnxtrain.device.loop.batches import ArraySource, Source
from onnxtrain.device.loop.rows import Rows
from onnxtrain.device.run.inputs import prepared
from onnxtrain.errors import ArgumentError, InputError
from onnxtrain.format.checkpoint.content import Array
from onnxtrain.format.model.file import ModelFile
from onnxtrain.format.model.wire import Reader, text_field

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession

_COSTLY = frozenset(
    "Attention Conv ConvTranspose Einsum GRU Gemm Gather LSTM MatMul QLinearConv QLinearMatMul "
    "ConvInteger MatMulInteger RNN".split()
)
_SHAPES = frozenset({"Shape", "Size"})


@dataclass(frozen=True)
class Split:
    """The two parts of a graph, and the values that go from the first to the second."""

    first: bytes
    second: bytes
    values: tuple[str, ...]
    inputs: tuple[str, ...]  # of the user, which only the first part reads


def split(model: ModelFile, user_inputs: frozenset[str]) -> Split | None:
    """Cut a training graph after its frozen layers; None where that would gain nothing."""
    parts = take_apart(model)
    inside, samples = _frozen_region(parts, user_inputs)
    first = set(inside)
    rest = [node for index, node in enumerate(parts.nodes) if index not in first]
    read = parts.outputs.keys() | {name for node in rest for name in node.reads}
    values = tuple(n for index in inside for n in parts.nodes[index].outputs if n in read)
    typed = all(name in parts.value_infos for name in values)
    if not values or not typed or set(values) & parts.outputs.keys():
        return None
    batch_of = {name: values[0] for name in samples}
    nodes = [_with_batch_of(node, batch_of, model.source_name) for node in rest]
    if samples & parts.outputs.keys() or any(node.reads & samples for node in nodes):
        return None  # the trained part reads the samples themselves
    features = {name: parts.value_infos[name] for name in values}
    others = {name: data for name, data in parts.inputs.items() if name not in samples}
    own = {name: data for name, data in parts.inputs.items() if name in samples}
    return Split(
        _part(replace(parts, inputs=own), features),
        _part(replace(parts, nodes=nodes, inputs=features | others), parts.outputs),
        values,
        tuple(sorted(samples)),
    )


def _part(parts: ModelParts, outputs: Mapping[str, memoryview]) -> bytes:
    """Return the model of some outputs; it keeps all inputs."""
    needed = find_needed(parts, list(outputs))
    constants = list(needed.of(parts.initializers).values())
    return layout_of(parts, needed, list(parts.inputs.values()), outputs, constants).file().join()


def _frozen_region(
    parts: ModelParts, user_inputs: frozenset[str]
) -> tuple[list[int], frozenset[str]]:
    """Return the nodes that depend on samples and constants alone, and on which samples."""
    depends = {name: frozenset({name}) for name in user_inputs}
    for name in (*parts.initializers, *parts.sparse_initializers):
        depends.setdefault(name, frozenset())
    found: dict[int, frozenset[str]] = {}
    costly: frozenset[str] = frozenset()
    for index, node in enumerate(parts.nodes):
        if all(name in depends for name in node.reads):
            names = {call.name for call in node.calls}
            shapes = names <= _SHAPES
            of = frozenset().union(*(depends[name] for name in node.reads if not shapes))
            found[index] = of
            depends.update(dict.fromkeys(node.outputs, of))
            if names & _COSTLY:
                costly |= of
    return [index for index, of in found.items() if of and of <= costly], costly


def _with_batch_of(node: Node, batch_of: Mapping[str, str], source: str) -> Node:
    """Let a node that only asks for the size of the batch ask another value."""
    asked = [name for name in node.reads if name in batch_of]
    reader = Reader(source)
    if not asked or {c.name for c in node.calls} != {"Shape"} or not _is_batch(reader, node):
        return node
    pieces = [
        text_field(NodeField.INPUT, batch_of[asked[0]])
        if part.number == NodeField.INPUT
        else bytes(node.data[part.start : part.end])
        for part in reader.fields(node.data, "node")
    ]
    return replace(node, data=memoryview(b"".join(pieces)), reads=frozenset({batch_of[asked[0]]}))


def _is_batch(reader: Reader, shape: Node) -> bool:
    """Whether a Shape node returns the first dimension alone."""
    bounds = {"start": 0, "end": -1}
    for part in reader.fields(shape.data, "node"):
        if part.number == NodeField.ATTRIBUTE:
            name, number = "", 0
            for field in reader.fields(reader.message(part, "attribute"), "attribute"):
                if field.number == 1:
                    name = reader.text(field, "attribute.name")
                elif field.number == 3:
                    number = reader.int64(field, "attribute.i")
            bounds[name] = number
    return bounds == {"start": 0, "end": 1}


class FrozenFeatures:
    """The frozen part of a session, apart from what trains."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        names = frozenset(session.input_names())
        train = split(session.module.training_executor.graph.model, names)
        fused = None if session.fused_model is None else split(session.fused_model, names)
        halved = train is not None and (fused is not None or session.fused_model is None)
        if train is None or not halved or (fused is not None and fused.values != train.values):
            raise ArgumentError(
                "there are no frozen features to keep: what trains does not follow frozen "
                "layers, or it reads the samples itself. Leave cache_features out"
            )
        self.inputs, self.values = train.inputs, train.values
        self._backbone = session.module.graph(train.first)
        self._second = train.second, None if fused is None else fused.second

    def compute(
        self, data: Mapping[str, Rows], batch_size: int, directory: Path | None = None
    ) -> dict[str, Rows]:
        """Return data with the features of all samples instead of the inputs they come from.

        With a directory, features are kept in files there and mapped, not in memory.
        """
        count = len(data[self.inputs[0]])
        features: dict[str, Array] = {}
        for start in range(0, count, batch_size):
            rows = slice(start, min(start + batch_size, count))
            made = self._run([array[rows] for array in data.values()])
            for name, array in zip(self.values, made, strict=True):
                if array.ndim == 0 or len(array) != rows.stop - rows.start:
                    raise ArgumentError(
                        f"the frozen value {name!r} is not one for each sample; leave "
                        "cache_features out"
                    )
                if name not in features:
                    features[name] = _memory(directory, name, (count, *array.shape[1:]), array)
                features[name][rows] = array
        rest = {name: array for name, array in data.items() if name not in self.inputs}
        return {**features, **rest}

    def _run(self, samples: Sequence[Array]) -> list[Array]:
        """Return the features of some samples, which are checked as a training step does."""
        declared = self._session.module.training_executor.signature.inputs
        values = dict(zip((v.name for v in declared), prepared(declared, samples), strict=True))
        feeds = {name: values[name].numpy() for name in self.inputs}
        try:
            result: list[Array] = self._backbone.session.run(list(self.values), feeds)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise InputError(f"the frozen layers cannot run on these samples: {error}") from None
        return result

    def installed(self) -> AbstractContextManager[None]:
        """Let the session take features instead of samples, within the context."""
        return self._session.replaced_graphs(*self._second)


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
    features = FrozenFeatures(session)
    arrays = dict(zip(session.input_names(), source.arrays, strict=True))
    directory = None if cache is True else Path(os.fspath(cache))
    made = features.compute(arrays, batch_size, directory)
    with features.installed():
        ordered = [made[name] for name in session.input_names()]
        of_features = replace(source, arrays=ordered)
        of_features.notes = source.notes
        yield of_features


def _memory(directory: Path | None, name: str, shape: tuple[int, ...], like: Array) -> Array:
    if directory is None:
        return np.empty(shape, like.dtype)
    directory.mkdir(parents=True, exist_ok=True)
    safe = "".join(c if c.isalnum() else "_" for c in name)
    path = directory / f"{safe}.npy"
    made: Array = np.lib.format.open_memmap(path, mode="w+", dtype=like.dtype, shape=shape)
    return made
