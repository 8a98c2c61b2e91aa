"""Take the adapter out of a training session, or begin from one.

The factors that train are parameters of the session. Its graphs multiply their product by a scale,
alpha / rank; in an adapter B holds that already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from onnxtrain.device.run.executors import require_values
from onnxtrain.errors import StateError
from onnxtrain.format.adapter.adapter import Adapter, PathLike
from onnxtrain.format.adapter.elements import float_name
from onnxtrain.format.adapter.pairs import Pair, pairs_of_metadata
from onnxtrain.format.adapter.slots import Slot, Slots, require_fits
from onnxtrain.format.checkpoint.content import Array

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession


def adapter_of(session: TrainingSession, *, allow_nonfinite: bool = False) -> Adapter:
    """Return what trains as it is now, factors with the scale in B."""
    state = session.module.training_state
    with state.lock:
        pairs, base = _pairs(session)
        require_values(state)
        if not allow_nonfinite:
            state.require_finite("there is no adapter")
        tensors: dict[str, Array] = {}
        for pair in pairs:
            tensors[pair.a] = np.array(state.value_of(pair.a))
            b = state.value_of(pair.b)
            tensors[pair.b] = b * b.dtype.type(pair.scale)
        for name in state.trainable_names():
            if name not in tensors:
                tensors[name] = np.array(state.value_of(name))
    return Adapter(tensors, pairs=pairs, base=base)


def load_adapter(session: TrainingSession, given: Adapter | PathLike) -> None:
    """Continue from an adapter of the same base, layers and rank; moments start from zero."""
    adapter = given if isinstance(given, Adapter) else Adapter.read(given)
    state = session.module.training_state
    with state.lock:
        pairs, base = _pairs(session)
        require_values(state)
        places = {n: _slot(state.value_of(n), n) for n in state.trainable_names()}
        require_fits(
            adapter.tensors, adapter.pairs, adapter.base,
            Slots("the session", places, base), all_slots=True,
        )  # fmt: skip
        values = {name: adapter[name] for name in adapter}
        for pair in pairs:
            b = adapter[pair.b]
            values[pair.b] = b / b.dtype.type(pair.scale)
        session.load_parameters(values)
        session.lazy_reset_grad()
        if session.optimizer is not None:
            session.optimizer.reset()


def _slot(value: Array, name: str) -> Slot:
    return Slot(float_name(value, name), value.shape)


def _pairs(session: TrainingSession) -> tuple[tuple[Pair, ...], str]:
    pairs, base = pairs_of_metadata(session.metadata)
    held = session.state.parameters
    if not pairs or not all(pair.a in held and pair.b in held for pair in pairs):
        raise StateError(
            "the session trains no low-rank factors, so there is no adapter: prepare the model "
            "with train='lora'"
        )
    return pairs, base
