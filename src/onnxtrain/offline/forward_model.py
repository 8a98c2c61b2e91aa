"""The model that `prepare` adds a loss to: as it was given, or with another batch or last layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from onnxtrain.errors import ArgumentError
from onnxtrain.format.model_metadata import PREFIX, ModelMetadata
from onnxtrain.offline.add_loss import Loss
from onnxtrain.offline.blocks.values import defined_names
from onnxtrain.offline.frontend.load import ModelLike, read_model, require_outputs
from onnxtrain.offline.frontend.wellformed import require_well_formed
from onnxtrain.offline.graph.versions import FLOOR_OPSET, NOTED_OPSET
from onnxtrain.offline.lora import Lora
from onnxtrain.offline.optimizers import Optimizer
from onnxtrain.offline.passes.decoder_inputs import read_whole_sequences
from onnxtrain.offline.passes.dynamic_batch import with_dynamic_batch
from onnxtrain.offline.passes.lora.add import Adapted, add_lora
from onnxtrain.offline.passes.node_order import in_order
from onnxtrain.offline.passes.replace_classifier import replace_classifier
from onnxtrain.offline.passes.sparse.prepare import add_sparse
from onnxtrain.offline.selection import listed
from onnxtrain.offline.sparse import Sparse
from onnxtrain.offline.train_words import Train, items_of, split_lora, split_sparse


@dataclass(frozen=True)
class ForwardModel:
    """A model, what its loss reads and what trains as far as that is known, and what to keep."""

    proto: onnx.ModelProto
    path: Path | None  # where it came from
    of: Iterable[str] | None
    train: Iterable[str] | None
    properties: dict[str, str]  # metadata for exported models
    notes: tuple[str, ...]
    adapted: Adapted | None = None  # where low-rank factors train
    is_sparse: bool = False  # whether channels train

    @property
    def inputs(self) -> frozenset[str]:
        """The names of its inputs."""
        return frozenset(info.name for info in self.proto.graph.input)


def forward_model(
    model: ModelLike,
    of: str | Iterable[str] | None,
    train: Train | None,
    classes: int | Sequence[str] | None,
    after: str | None,
    dynamic_batch: bool,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
) -> ForwardModel:
    """Return the model to train, for the arguments of `prepare` of these names.

    Loss and optimizer say which channels train, where "sparse" leaves that to us.
    """
    of, items, about = listed(of), items_of(train), ModelMetadata()
    made: list[str] = []  # the parameters of a new layer
    if dynamic_batch:
        model = with_dynamic_batch(model)
    if classes is not None:
        first, *more = of or (None,)
        if more:
            raise ArgumentError("a new layer replaces that of one output: give one name as of")
        if not isinstance(classes, int):
            about, classes = _named(classes), len(classes)
        replaced = replace_classifier(model, classes, of=first, after=after)
        model, of, made = replaced.model, [replaced.output], list(replaced.parameters)
    elif after is not None:
        raise ArgumentError("after says where a new layer goes: give classes too")
    proto, path = read_model(model)
    require_outputs(proto, "the model")
    require_well_formed(proto, "the model")
    proto = in_order(proto)
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    if classes is not None:
        properties.pop(f"{PREFIX}classes", None)  # those of the layer that is gone
    for stale in ("lora", "base", "labels"):  # of what an earlier run was trained on
        properties.pop(f"{PREFIX}{stale}", None)
    properties |= about.properties()
    known = frozenset(defined_names(proto.graph))
    sparse, others = split_sparse(items, known)
    loras, names = split_lora(others, known)
    trained = [*(names or ()), *made] if sparse is not None else names or made or names
    found = ForwardModel(proto, path, of, trained, properties, _note_on_opset(proto))
    if sparse is not None and loras:
        raise ArgumentError("sparse and lora do not go together: train one or the other")
    if loras:
        found = _with_lora(found, loras, made)
    whole = read_whole_sequences(found.proto)  # the slots are those of the model as it was given
    found = replace(found, proto=whole.proto, notes=(*found.notes, *whole.notes))
    return found if sparse is None else _with_sparse(found, sparse, loss, optimizer)


def _with_sparse(
    found: ForwardModel, sparse: Sparse, loss: Loss | None, optimizer: Optimizer | None
) -> ForwardModel:
    """Return a model whose channels are chosen by what they gain for a loss."""
    trained = list(found.train or ())
    made = add_sparse(found.proto, found.path, sparse, loss, found.of, optimizer, trained)
    return replace(
        found,
        proto=made.proto,
        train=[*made.rows, *trained],
        notes=(*found.notes, made.note),
        is_sparse=True,
    )


def _with_lora(found: ForwardModel, loras: Sequence[Lora], made: Sequence[str]) -> ForwardModel:
    """Return a model with low-rank factors, which train beside what else was asked for.

    So does a new layer (`made`): nothing else would teach it.
    """
    if not loras:
        return found
    adapted = add_lora(found.proto, found.path, loras, list(found.of or ()))
    about = ModelMetadata(lora=adapted.described(), base=adapted.slots.base)
    return replace(
        found,
        proto=adapted.proto,
        train=list(dict.fromkeys([*adapted.factors, *(found.train or ()), *made])),
        properties=found.properties | about.properties(),
        notes=(*found.notes, *adapted.notes),
        adapted=adapted,
    )


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
