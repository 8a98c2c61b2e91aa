"""The model that `prepare` adds a loss to: as it was given, or with another batch or last layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxtrain.errors import ArgumentError
from onnxtrain.format.model_metadata import PREFIX, ModelMetadata
from onnxtrain.offline.frontend.load import ModelLike, read_model
from onnxtrain.offline.frontend.wellformed import require_well_formed
from onnxtrain.offline.graph.versions import FLOOR_OPSET, NOTED_OPSET
from onnxtrain.offline.passes.decoder_inputs import read_whole_sequences
from onnxtrain.offline.passes.dynamic_batch import with_dynamic_batch
from onnxtrain.offline.passes.replace_classifier import replace_classifier
from onnxtrain.offline.selection import listed


@dataclass(frozen=True)
class ForwardModel:
    """A model, what its loss reads and what trains as far as that is known, and what to keep."""

    proto: onnx.ModelProto
    path: Path | None  # where it came from
    of: Iterable[str] | None
    train: Iterable[str] | None
    properties: dict[str, str]  # metadata for exported models
    notes: tuple[str, ...]

    @property
    def inputs(self) -> frozenset[str]:
        """The names of its inputs."""
        return frozenset(info.name for info in self.proto.graph.input)


def forward_model(
    model: ModelLike,
    of: str | Iterable[str] | None,
    train: str | Iterable[str] | None,
    classes: int | Sequence[str] | None,
    after: str | None,
    dynamic_batch: bool,
) -> ForwardModel:
    """Return the model to train, for the arguments of `prepare` of these names."""
    of, train, about = listed(of), listed(train), ModelMetadata()
    if dynamic_batch:
        model = with_dynamic_batch(model)
    if classes is not None:
        first, *more = of or (None,)
        if more:
            raise ArgumentError("a new layer replaces that of one output: give one name as of")
        if not isinstance(classes, int):
            about, classes = _named(classes), len(classes)
        replaced = replace_classifier(model, classes, of=first, after=after)
        model, of, train = replaced.model, [replaced.output], train or replaced.parameters
    elif after is not None:
        raise ArgumentError("after says where a new layer goes: give classes too")
    proto, path = read_model(model)
    require_well_formed(proto, "the model")
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    if classes is not None:
        properties.pop(f"{PREFIX}classes", None)  # those of the layer that is gone
    properties |= about.properties()
    whole = read_whole_sequences(proto)
    notes = (*_note_on_opset(proto), *whole.notes)
    return ForwardModel(whole.proto, path, of, train, properties, notes)


def _named(classes: Sequence[str]) -> ModelMetadata:
    try:
        return ModelMetadata(classes=[classes] if isinstance(classes, str) else list(classes))
    except ValueError as error:
        raise ArgumentError(f"{error}; a number of classes will do") from None


def _note_on_opset(model: onnx.ModelProto) -> tuple[str, ...]:
    opset = min((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
    if opset >= NOTED_OPSET:
        return ()
    return (f"The model has opset {opset}: it was converted to opset {FLOOR_OPSET}.",)
