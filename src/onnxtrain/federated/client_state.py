"""The state that a client keeps between rounds and never sends.

With a folder it survives restarts of the device; without one it is in Flower's context, which lives
as long as the node.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import numpy as np
from flwr.app import ConfigRecord, Context

from onnxtrain.errors import StateError
from onnxtrain.federated.files import (
    explained_damage,
    pack_arrays,
    replace_file,
    unpack_arrays,
)
from onnxtrain.format.checkpoint.content import Array, OptimizerGroup, RawTensor, Tensor
from onnxtrain.format.checkpoint.store import translated

_RECORD, _MARK = "onnxtrain", "onnxtrain-file"
_KINDS = ("local", "frozen", "residual")
_MOMENT, _STEP, _ROUND, _OWNER, _PREVIOUS = "moment", "step", "round", "owner", "before/"


@dataclass
class ClientState:
    """Parameters by name, the state of the optimizer, the residual of compression.

    `local` holds values that training changes, `frozen` values that the server sends once. `round`
    is the round that led to this state, as federation/number. `previous` is the state before it,
    without frozen values: a server that was killed repeats the round, which then begins from
    there. `owner` is the node that wrote the state, if the node has no name.
    """

    local: dict[str, Array] = field(default_factory=dict)
    frozen: dict[str, Array] = field(default_factory=dict)
    optimizer: OptimizerGroup | None = None
    residual: dict[str, Array] = field(default_factory=dict)
    round: str = ""
    owner: str = ""
    previous: ClientState | None = None

    @property
    def has_changing(self) -> bool:
        """Whether the state holds anything that a round changes."""
        own = self.local or self.residual or self.optimizer is not None
        return bool(own) or (self.previous is not None and self.previous.has_changing)

    def for_round(self, identity: str) -> ClientState:
        """Return a copy for a round; a new federation keeps the local values alone."""
        federation = self.round.rpartition("/")[0]
        if federation and federation != identity.rpartition("/")[0]:
            return ClientState(local=self.local, round=self.round)
        return replace(self)

    def as_previous(self) -> ClientState:
        """Return the part that a repeated round needs."""
        return replace(self, frozen={}, owner="", previous=None)

    def to_bytes(self) -> bytes:
        """Return the state as bytes."""
        arrays = self._arrays()
        if self.previous is not None:
            arrays |= {f"{_PREVIOUS}{key}": a for key, a in self.previous._arrays().items()}
        return pack_arrays(arrays)

    def _arrays(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {
            f"{kind}:{name}": array
            for kind in _KINDS
            for name, array in getattr(self, kind).items()
        }
        arrays[_ROUND] = np.frombuffer(self.round.encode(), np.uint8)
        arrays[_OWNER] = np.frombuffer(self.owner.encode(), np.uint8)
        if self.optimizer is not None:
            arrays[_STEP] = np.array(self.optimizer.step, np.int64)
            for name, moments in self.optimizer.states.items():
                for k, moment in enumerate(moments):
                    if isinstance(moment, RawTensor):
                        raise StateError(f"the moments of {name!r} have a type that numpy lacks")
                    arrays[f"{_MOMENT}{k}:{name}"] = moment
        return arrays

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> ClientState:
        """Return the state that `to_bytes` wrote."""
        arrays = unpack_arrays(data, where)
        earlier = {k[len(_PREVIOUS) :]: a for k, a in arrays.items() if k.startswith(_PREVIOUS)}
        with explained_damage(where):
            state = cls._of({k: a for k, a in arrays.items() if not k.startswith(_PREVIOUS)})
            state.previous = cls._of(earlier) if earlier else None
        return state

    @classmethod
    def _of(cls, arrays: Mapping[str, Array]) -> ClientState:
        state = cls()
        moments: dict[str, dict[int, Array]] = {}
        step = None
        for key, array in arrays.items():
            kind, _, name = key.partition(":")
            if kind == _STEP:
                step = operator.index(array[()])
                if step < 0:
                    raise ValueError(f"{step} steps")
            elif kind in (_ROUND, _OWNER):
                setattr(state, kind, array.tobytes().decode())
            elif kind in _KINDS:
                getattr(state, kind)[name] = array
            elif kind.startswith(_MOMENT) and kind[len(_MOMENT) :].isdecimal():
                moments.setdefault(name, {})[int(kind[len(_MOMENT) :])] = array
            else:
                raise ValueError(f"the unknown entry {key!r}")
        if step is not None:
            states: dict[str, list[Tensor]] = {
                name: [of[k] for k in sorted(of)] for name, of in moments.items()
            }
            state.optimizer = OptimizerGroup(step, 0.0, states)
        return state


class ClientStateStore:
    """The place of a client's state: a file in the folder, or Flower's context."""

    def __init__(self, context: Context, folder: Path | None) -> None:
        self._context = context
        self._stored: ClientState | None = None
        self._file = None if folder is None else folder / f"client-{client_name(context)}.npz"
        # What to do about a state that cannot be used.
        self.how_to_reset = (
            f"delete the client's file {self._file}" if folder else "restart the node"
        )

    def before_round(self, identity: str) -> ClientState:
        """Return the state that a round begins with; a repeated round begins with the same."""
        state = self._read()
        if state.round == identity and state.previous is not None:
            return replace(state.previous.for_round(identity), frozen=state.frozen)
        return state.for_round(identity)

    def current(self, identity: str) -> ClientState:
        """Return the state after the last round."""
        return self._read().for_round(identity)

    def write(self, state: ClientState) -> None:
        """Store the state; remove a stored one that nothing is left of."""
        stored = self._read()
        if not state.has_changing and not state.frozen:
            if self._file is None:
                self._context.state.pop(_RECORD, None)
            else:
                with translated("remove", self._file):
                    self._file.unlink(missing_ok=True)
        elif state.has_changing or stored.has_changing or not _same(state.frozen, stored.frozen):
            self._replace(state)
        self._stored = None

    def _read(self) -> ClientState:
        if self._stored is None:
            self._stored = self._in_context() if self._file is None else self._in_file(self._file)
        return self._stored

    def _in_context(self) -> ClientState:
        record = self._context.state.config_records.get(_RECORD)
        data = b"" if record is None else bytes(record["kept"])
        return ClientState.from_bytes(data, "the state in the context") if data else ClientState()

    def _in_file(self, file: Path) -> ClientState:
        with translated("read", file):
            if not file.exists():
                return ClientState()
            claim(file, self._context, _OWN_FILE)
            data = file.read_bytes()
        state = ClientState.from_bytes(data, f"the client's file {file}")
        mark = self._context.state.config_records.get(_MARK)
        if mark is not None and state.owner not in ("", mark["node"]):
            # Not this node before a restart: the node has written the file since it started.
            _refuse(file, f"node {mark['node']}", f"node {state.owner}", _OWN_FILE)
        return state

    def _replace(self, state: ClientState) -> None:
        if self._file is None:
            self._context.state[_RECORD] = ConfigRecord({"kept": state.to_bytes()})
            return
        claim(self._file, self._context, _OWN_FILE)
        if given_name(self._context) is None:
            # As text: node ids have 64 bits, and integers in records are signed.
            state = replace(state, owner=str(self._context.node_id))
            self._context.state[_MARK] = ConfigRecord({"node": state.owner})
        replace_file(self._file, state.to_bytes())


def _same(some: Mapping[str, Array], others: Mapping[str, Array]) -> bool:
    """Whether both hold the same array objects."""
    return some.keys() == others.keys() and all(some[name] is others[name] for name in some)


# ---- names of clients and owners of files --------------------------------------------------------

_OWN_FILE = "give each a 'client-name' in its node's configuration, or a folder of its own"
_claims: dict[Path, str] = {}
_lock = threading.Lock()


def claim(file: Path, context: Context, advice: str) -> None:
    """Raise an error if another client of this process uses the file."""
    name = given_name(context)
    client = f"node {context.node_id}" if name is None else f"client {name}"
    with _lock:
        first = _claims.setdefault(file.absolute(), client)
    if first != client:
        _refuse(file, first, client, advice)


def _refuse(file: Path, one: str, other: str, advice: str) -> NoReturn:
    raise StateError(f"two clients, {one} and {other}, share the file {file}: {advice}")


def given_name(context: Context) -> str | None:
    """Return the client's name in the node's configuration, usable in a file name."""
    for key in ("client-name", "partition-id"):
        if key in context.node_config:
            given = str(context.node_config[key])
            if not given.strip("."):  # a folder's own name, or that of the one above
                return quote(given).replace(".", "%2E")
            return "".join(c if c.isalnum() or c in "-_." else quote(c, safe="") for c in given)
    return None


def client_name(context: Context) -> str:
    """Return the client's name among those that share its folder.

    A node gets a new id whenever it connects. So a node without a name must have the folder for
    itself; it finds its file again after a restart.
    """
    name = given_name(context)
    return "0" if name is None else name


def client_number(context: Context) -> int:
    """Return the number that seeds a client's random numbers."""
    given = context.node_config.get("partition-id", context.node_id)
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    number = int(given if isinstance(given, int | float) else context.node_id)
    return abs(number) & (2**63 - 1)  # node ids have 64 bits; integers in messages are signed
