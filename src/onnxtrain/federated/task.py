"""A message to a client: what it asks for, the parameters of its round, and the reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from onnxtrain.errors import ArgumentError, OnnxTrainError, StateError
from onnxtrain.federated.arrays import fitting, read_record
from onnxtrain.federated.bundle import SharedSession
from onnxtrain.federated.client_state import ClientState, ClientStateStore, client_number
from onnxtrain.federated.compression import Compression
from onnxtrain.federated.failures import Stage, error_reply
from onnxtrain.federated.files import unpack_arrays
from onnxtrain.federated.messages import ABOUT, CLIENT, REPLY
from onnxtrain.federated.round_limits import RoundLimits
from onnxtrain.federated.rounds import INITIAL, Round
from onnxtrain.format.checkpoint.content import Array


@dataclass(frozen=True)
class Task:
    """A message to the client, where its files and state are, and how far it got."""

    arrays: ArrayRecord
    config: ConfigRecord
    settings: Round
    context: Context
    folder: Path | None
    store: ClientStateStore
    limits: RoundLimits
    stage: Stage

    def signed(self, content: RecordDict) -> RecordDict:
        """Add to a reply what it is a reply to, and the number that orders the clients."""
        about = {CLIENT: client_number(self.context), REPLY: self.settings.token}
        content[ABOUT] = ConfigRecord(about)
        return content


def replied(message: Message, answer: Callable[[Stage], Message | RecordDict]) -> Message:
    """Reply with the answer or with an error, which does not end the round."""
    stage = Stage()
    try:
        made = answer(stage)
        return made if isinstance(made, Message) else Message(made, reply_to=message)
    except Exception as error:  # the user's own functions may raise anything
        return error_reply(message, error, stage.place)


def compressed(content: RecordDict, compression: Compression, task: Task) -> RecordDict:
    """Compress the arrays of a reply, and store what is left of them for the next one."""
    key, arrays = next(iter(content.array_records.items()))
    update = _update(read_record(arrays), read_record(task.arrays))
    identity, bounded = task.settings.identity, task.settings.bounded
    before, state = task.store.before_round(identity), task.store.current(identity)
    if state.round != identity:  # training had nothing to store
        state = replace(before, round=identity, previous=before.as_previous())
    content[key], lost = compression.encode(update, before.residual, bounded=bounded)
    if (compression.has_memory or bounded) and (lost or state.residual):
        state.residual = lost
        task.store.write(state)
    return content


def received_weights(shared: SharedSession, task: Task) -> dict[str, Array]:
    """Return the weights of a message, in the types of the parameters."""
    task.stage.at("received weights")
    task.limits.check_size(task.arrays, shared.size)
    return fitting(shared.session, read_record(task.arrays))


def set_parameters(
    shared: SharedSession, received: Mapping[str, Array], state: ClientState, task: Task
) -> None:
    """Set all parameters: the server's, then the client's own, then the initial ones."""
    session = shared.session
    if INITIAL in task.config:
        task.stage.at("initial weights")
        packed = task.config[INITIAL]
        if not isinstance(packed, bytes):
            raise ArgumentError(f"the initial values from the server are {type(packed).__name__}")
        task.limits.check_size(packed, shared.size)
        sent = unpack_arrays(packed, "the server's message with initial values")
        _take_initial(shared, state, fitting(session, sent))
    task.stage.at("client state")
    with explained_state(task.store):
        own = fitting(session, {**state.frozen, **state.local})
    values = {**shared.initial, **own, **received}
    # A session without weights of its own may hold another client's values.
    missing = [n for n in shared.state.names() if n not in values] if shared.nominal else []
    if missing:
        raise StateError(
            f"this client has no values for {missing[0]!r}, which the server does not share: its "
            "artifacts have no weights, and the initial values did not arrive or were lost"
        )
    task.stage.at("received weights")
    shared.load(values)


def _take_initial(shared: SharedSession, state: ClientState, sent: Mapping[str, Array]) -> None:
    """Put the server's initial values into the client's state.

    Values that training changes stay the client's own if it has them; frozen values are always the
    server's. They are stored, as they are sent once, unless the artifacts hold the same.
    """
    changing = set(shared.changing)
    first = {name: array for name, array in sent.items() if name in changing}
    frozen = {name: array for name, array in sent.items() if name not in changing}
    own = {name: array for name, array in state.local.items() if name not in frozen}
    state.local = {**first, **own}
    earlier = {name: array for name, array in state.frozen.items() if name not in frozen}
    state.frozen = {**earlier, **{n: a for n, a in frozen.items() if not shared.has(n, a)}}


@contextmanager
def explained_state(store: ClientStateStore) -> Iterator[None]:
    """Add to errors that the client's state is of other artifacts, and how to reset it."""
    try:
        yield
    except OnnxTrainError as error:
        error.add_note(
            "This is the client's state from earlier rounds, with other artifacts: "
            f"{store.how_to_reset} to start anew."
        )
        raise


def _update(trained: Mapping[str, Array], sent: Mapping[str, Array]) -> dict[str, Array]:
    """Return the difference to the received weights; mods may have changed the trained ones."""
    for name, array in trained.items():
        if name not in sent or array.shape != sent[name].shape:
            raise ArgumentError(
                f"a mod replies with {name!r} of the shape {list(array.shape)}, which the server "
                "did not send: with compression, mods must not change names and shapes of arrays"
            )
    return {name: array.astype(np.float64) - sent[name] for name, array in trained.items()}
