"""The parameters that a federation shares; the others stay on the clients."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import numpy as np

from onnxtrain.device.export.model_parts import Operator, take_apart
from onnxtrain.device.module import Module
from onnxtrain.device.session import TrainingSession
from onnxtrain.device.state import CheckpointState, TrainingState
from onnxtrain.errors import ArgumentError, StateError, UnknownNameError
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.model.file import ModelFile

Named = Literal["changing", "trainable", "no-batch-norm", "everything"]
Which = Named | Iterable[str] | Callable[[str], bool]
Holder = TrainingSession | Module | CheckpointState
_BATCH_NORM = Operator("", "BatchNormalization")


def state_of(holder: Holder) -> TrainingState:
    """Return the state of a session, a module or itself."""
    if not isinstance(holder, TrainingSession | Module | CheckpointState):
        raise ArgumentError(
            "parameters are those of a TrainingSession, a Module or a CheckpointState, not of "
            f"{type(holder).__name__}"
        )
    return (holder if isinstance(holder, CheckpointState) else holder.state)._training


def module_of(holder: Holder) -> Module | None:
    """Return the module of a session, or itself; a state alone has none."""
    if isinstance(holder, TrainingSession):
        return holder.module
    return holder if isinstance(holder, Module) else None


def select(holder: Holder, which: Which = "changing") -> list[str]:
    """Return the names of the selected parameters, all of them floats.

    Args:
        holder: a `TrainingSession`, a `Module`, or a `CheckpointState`, which does not know running
            statistics and BatchNormalization.
        which: "changing" for trainable parameters and running statistics, "trainable" for trainable
            parameters, "no-batch-norm" for "changing" without BatchNormalization (FedBN),
            "everything" for "changing" and frozen floats. Or names and patterns of "changing"
            (FedPer: `["features.*"]`), where a leading "!" excludes; or a function of the name.

    """
    which = checked_which(which)
    state = state_of(holder)
    if which == "everything":
        frozen = (name for name in state.names() if not state.is_trainable(name))
        chosen = [*state.trainable_names(), *frozen]
    elif which == "trainable":
        chosen = state.trainable_names()
    elif which == "no-batch-norm":
        normal = _batch_norm(holder)
        chosen = [name for name in _changing(holder) if name not in normal]
    elif callable(which):
        chosen = [name for name in _changing(holder) if which(name)]
    elif isinstance(which, str):
        chosen = _changing(holder)
    else:
        chosen = _matching(list(which), _changing(holder))
    floats = [name for name in chosen if is_float(state, name)]
    if not floats:
        raise ArgumentError(f"which={which!r} leaves no parameter to share")
    return floats


def checked_which(which: Which) -> Which:
    """Return a selection that can be used twice: a list in place of a generator."""
    if isinstance(which, Iterable) and not isinstance(which, str):
        return list(which)
    if not callable(which) and which not in get_args(Named):
        named = ", ".join(map(repr, get_args(Named)))
        raise ArgumentError(f"which is {named}, a list of patterns, or a function, not {which!r}")
    return which


def is_float(state: TrainingState, name: str) -> bool:
    """Whether a parameter has a float type that numpy knows."""
    dtype = ELEMENT_TYPES[state.code_of(name)].dtype
    return dtype is not None and np.issubdtype(dtype, np.floating)


def _changing(holder: Holder) -> list[str]:
    state, module = state_of(holder), module_of(holder)
    if module is not None:
        return [*state.trainable_names(), *module.statistics]
    if not all(map(state.is_trainable, state.names())):
        raise StateError(
            "a CheckpointState does not know its running statistics: pass "
            "the TrainingSession, or which='trainable' or 'everything'"
        )
    return state.trainable_names()


def _batch_norm(holder: Holder) -> set[str]:
    """Return the parameters that BatchNormalization reads: scale, bias and both statistics."""
    module = module_of(holder)
    if module is None:
        raise StateError("which='no-batch-norm' needs the graphs: pass the TrainingSession")
    model = _model_of(module)
    if model.is_ort:
        raise StateError(
            f"{model.source_name} is in the ORT format, which hides BatchNormalization: use the "
            "graphs in the ONNX format, or patterns of names"
        )
    names = {n for node in take_apart(model).nodes if _BATCH_NORM in node.calls for n in node.reads}
    return {name for name in names if module.state.has_parameter(name)} | set(module.statistics)


def _model_of(module: Module) -> ModelFile:
    return (module.evaluation_executor or module.training_executor).graph.model


def variances(session: TrainingSession) -> set[str]:
    """Return the running variances, which must not become negative."""
    statistics, model = set(session.module.statistics), _model_of(session.module)
    if model.is_ort:  # only the name tells
        return {name for name in statistics if "var" in name.lower()}
    nodes = take_apart(model).nodes
    return statistics & {n.inputs[4] for n in nodes if _BATCH_NORM in n.calls and len(n.inputs) > 4}


def _matching(patterns: list[str], names: list[str]) -> list[str]:
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(f"which is a list of names and patterns, not {patterns!r}")
    taken_away = [p[1:] for p in patterns if p.startswith("!")]
    wanted = [p for p in patterns if not p.startswith("!")]
    if taken_away and not wanted:
        wanted = ["*"]
    for pattern in (*wanted, *taken_away):
        if not fnmatch.filter(names, pattern):
            raise UnknownNameError(
                f"the pattern {pattern!r} in which matches none of the parameters that training "
                f"changes: {', '.join(names)}"
            )

    def matches(name: str, globs: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in globs)

    return [n for n in names if matches(n, wanted) and not matches(n, taken_away)]
