"""Names and patterns that select what trains.

A pattern such as "encoder.layer.5.*" is held against the names in the model and against those that
torch has for a tensor which its exporters rename.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

import onnx_ir as ir

from onnxtrain.errors import (
    NotDifferentiableError,
    OnnxTrainError,
    TrainingWarning,
    UnknownNameError,
    UnknownNameWarning,
)
from onnxtrain.offline.autodiff.engine import operator_name
from onnxtrain.offline.graph.initializers import FROM_CONSTANT
from onnxtrain.offline.graph.names import label_of
from onnxtrain.offline.optimizers.mezo import SLOW
from onnxtrain.offline.passes.tie_weights import Tied, with_tied
from onnxtrain.offline.selection import Role, Survey, some_of, why_nothing_trains
from onnxtrain.offline.tensor_uses import TRAIN_IT
from onnxtrain.offline.train_words import names_by_word, near_word

# Constants of this size or more are stored in the checkpoint, once; smaller ones stay in graphs.
STORED_ONCE = 1 << 16  # bytes
# Names that exporters make up.
_MADE_UP = re.compile(r"val_[0-9]+|onnx::.*|/.*|_?[0-9]+")


def choose(
    found: Survey,
    train: Iterable[str] | None,
    freeze: Iterable[str] | None,
    tied: Sequence[Tied] = (),
) -> tuple[list[str], list[str]]:
    """Return the names of what trains and of what is frozen, that is, stored in the checkpoint.

    By default the weights train that a gradient reaches. Weights and statistics that do not train
    are frozen whether they are listed or not; so are large constants. What is tied trains or is
    frozen together, whichever of it is named.
    """
    roles = found.roles
    named = _frozen(list(freeze or ()), found)
    kept = with_tied(named, tied)
    if train is None:
        weights = [n for n in found.names(Role.WEIGHT) if n not in kept]
        # Where nothing is free of operators without a gradient, differentiation says which.
        blocked = with_tied(found.blocked, tied)
        trains = [n for n in weights if n not in blocked] or weights
    else:
        trains = _trained(list(train), found)
    both = sorted(kept.intersection(trains))
    if both:
        groups = [str(group) for group in tied if group.names.intersection(both) - set(named)]
        why = f": {groups[0]} is one parameter, unless tie_weights=False" if groups else ""
        raise OnnxTrainError(f"{some_of(both)} cannot both train and be frozen{why}")
    together = with_tied(trains, tied).difference(trains)
    trains += [n for n in roles if n in together]
    kept.update(n for n, role in roles.items() if role is not Role.CONSTANT)
    for name, value in found.model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= STORED_ONCE and not value.is_graph_input():
            kept.add(name)
    chosen = set(trains)
    return trains, [n for n in roles if n in kept and n not in chosen]


def nothing_trains(found: Survey, train: object, freeze: object) -> OnnxTrainError:
    """Return the error for a choice that leaves nothing to train."""
    if train is not None:
        why = "train (requires_grad) is empty"
    elif freeze:
        why = "every weight is frozen"
    else:
        why = why_nothing_trains(found.findings.values(), found.unreached, found.cut_by)
        return OnnxTrainError(f"nothing trains: {why}")
    return OnnxTrainError(f"there is an optimizer but nothing trains: {why}")


def notes_on_left_out(
    found: Survey, trains: Sequence[str], asked: object, freeze: Iterable[str] = ()
) -> Iterator[str]:
    """Say what does not train though it may be meant to, and warn of weights without a gradient.

    Who asks for such weights by name gets an error instead. Where no gradient is needed, say that
    this is slow.
    """
    if not found.by_gradient:
        yield SLOW
    if found.lost_detach is not None:
        note = (
            f"{label_of(found.lost_detach)!r} reads a value that torch detaches, but the exporter "
            "has removed the mark, and a gradient may flow there: export with optimize=False."
        )
        warnings.warn(note, TrainingWarning, stacklevel=4)
        yield note
    if asked is None and found.blocked and not found.blocked.intersection(trains):
        first, *more = found.without_gradient()
        note = (
            f"{len(found.blocked)} weights do not train, because an operator behind them has no "
            f"gradient: {first}{f' (and {len(more)} more nodes)' if more else ''}. "
            f"The other {len(trains)} do."
        )
        warnings.warn(note, TrainingWarning, stacklevel=4)
        yield note
    if asked is None and found.unreached and found.cut_by:
        yield (
            f"{len(found.unreached)} weights do not train, because {', '.join(found.cut_by)} ends "
            f"the gradient before them. The other {len(trains)} do."
        )
    settled = {*trains, *(match for name in freeze for match in _matching(name, found))}
    if asked is None and (doubts := [n for n in _in_doubt(found) if n not in settled]):
        yield (
            f"what may be learned or fixed does not train: {some_of(doubts, 3)}. If it is learned, "
            "name it in train="
        )


def _in_doubt(found: Survey) -> list[str]:
    """Return what a graph does not tell a weight from, but for numbers in the graph itself."""
    values = found.model.graph.initializers
    return [
        name
        for name, finding in found.findings.items()
        if finding.advice == TRAIN_IT and (finding.elements > 1 or not _is_number(values[name]))
    ]


def _is_number(value: ir.Value) -> bool:
    """Whether a scalar is a number of the graph: a Constant, or named by an exporter."""
    return FROM_CONSTANT in value.meta or bool(_MADE_UP.fullmatch(str(value.name)))


def _frozen(freeze: Sequence[str], found: Survey) -> list[str]:
    """Return what is frozen by name or pattern.

    A pattern without a match is an error: the user would train what should be frozen. A missing
    name is only a warning, because upstream's scripts list names that its exporter drops.
    """
    chosen: dict[str, str] = {}
    missing = []
    for name in freeze:
        matches = _matching(name, found)
        if not matches and _is_pattern(name):
            raise UnknownNameError(
                f"nothing to freeze: {name!r} matches no initializer of the model. "
                f"{_similar(name, found)}"
            )
        if not matches:
            missing.append(name)
        chosen.update(dict.fromkeys(matches, name))
    if missing:
        warnings.warn(
            f"nothing to freeze: the model has no initializer {some_of(missing)}",
            UnknownNameWarning,
            stacklevel=5,
        )
    _require_matrices(chosen, found, "freeze")
    return [n for n in found.roles if n in chosen]


def _trained(train: Sequence[str], found: Survey) -> list[str]:
    """Return what trains by name or pattern; either without a match is an error.

    A pattern selects the weights among its matches, or the other floats with a gradient if none of
    them is a weight. A name selects exactly that initializer or input.
    """
    inputs = [value.name or "" for value in found.model.graph.inputs]
    chosen: dict[str, str] = {}
    for name in train:
        if found.roles.get(name) is Role.STATISTIC:
            raise NotDifferentiableError(
                f"{name!r} cannot train: it is a running statistic of BatchNormalization, which "
                "each step updates"
            )
        if name in found.roles or name in inputs:
            chosen[name] = name
            continue
        by_word = names_by_word(name, found)
        if by_word is not None:
            chosen.update(dict.fromkeys(by_word, name))
            continue
        matches = _matching(name, found)
        if not matches:
            raise UnknownNameError(f"{name!r} cannot train: {_what_it_is(name, found)}")
        weights = [n for n in matches if found.roles[n] is Role.WEIGHT]
        weights = weights or [n for n in matches if n in found.reached]
        if not weights:
            raise NotDifferentiableError(
                f"{name!r} cannot train: it matches {some_of(matches)}, and none of these is a "
                "weight that the loss depends on"
            )
        chosen.update(dict.fromkeys(weights, name))
    _require_matrices(chosen, found, "train")
    return [n for n in (*found.roles, *inputs) if n in chosen]


def _require_matrices(chosen: dict[str, str], found: Survey, does: str) -> None:
    """Refuse a pattern that takes the bias of a layer, but not its matrix.

    Exporters rename matrices, so that a pattern may miss them while it finds the bias.
    """
    for name, pattern in chosen.items():
        if name == pattern or not _is_pattern(pattern) or _means_a_bias(pattern):
            continue
        finding = found.findings.get(name)
        matrices = [] if finding is None else [
            m for m in finding.matrices if found.roles[m] is Role.WEIGHT
        ]  # fmt: skip
        if matrices and not any(m in chosen for m in matrices):
            raise UnknownNameError(
                f"{does}={pattern!r} takes the bias {name!r} but not its matrix, which is called "
                f"{_called(matrices[0], found)} in this model. Name the matrix too, or write "
                "'*.bias' to mean biases alone."
            )


def _means_a_bias(pattern: str) -> bool:
    """Whether a pattern says itself which parameter of a layer it means, as "*.bias" does."""
    return "bias" in pattern.lower() or pattern[-1] not in "*?]"


def _called(name: str, found: Survey) -> str:
    modules = found.findings[name].modules
    return f"{name!r} ({' or '.join(modules)})" if modules else repr(name)


def _what_it_is(name: str, found: Survey) -> str:
    for node in found.model.graph.all_nodes():
        if any(value.name == name for value in node.outputs):
            return (
                f"it is computed by {operator_name(node)} (node {node.name!r}), and only "
                f"initializers and inputs can. {_similar(name, found)}"
            )
    return f"the model has no such initializer or input. {near_word(name) or _similar(name, found)}"


def _similar(name: str, found: Survey) -> str:
    known = [known for f in found.findings.values() for known in (f.name, *f.modules)]
    near = get_close_matches(name.rstrip("*?."), known, n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(map(repr, near))}?"
    weights = (f.modules[0] if f.modules else n for n, f in found.findings.items()
               if f.role is Role.WEIGHT)  # fmt: skip
    return f"Its weights are {some_of(weights)}."


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


def _matching(pattern: str, found: Survey) -> list[str]:
    """Return the initializers that have a name, in the model or in torch, or match a pattern."""
    if pattern in found.roles:
        return [pattern]
    return [
        name
        for name, finding in found.findings.items()
        if any(
            known == pattern or (_is_pattern(pattern) and fnmatch.fnmatchcase(known, pattern))
            for known in (name, *finding.modules)
        )
    ]
