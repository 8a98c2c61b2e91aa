"""What a client keeps between rounds, and never sends: personal layers, moments, what was rounded.

With a folder it survives restarts of the device; otherwise it is in the context of the run, which
Flower keeps while the node is up.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

import numpy as np
from flwr.app import ConfigRecord, Context

from onnxtrain.errors import StateError
from onnxtrain.federated.files import pack_arrays, remove_file, replace_file, unpack_arrays
from onnxtrain.format.checkpoint.content import Array, OptimizerGroup, RawTensor, Tensor

_RECORD, _MARK = "onnxtrain", "onnxtrain-file"
_LOCAL, _FROZEN, _MOMENT, _RESIDUAL = "local", "frozen", "moment", "residual"
_STEP, _ROUND, _OWNER, _BEFORE = "step", "round", "owner", "before/"


@dataclass
class Kept:
    """What a client keeps: parameters by name, the optimizer's state, the rest of compression.

    `local` are values that training changes, `frozen` those that the server sent once and nobody
    changes. `round` is the one that it is the result of, as federation/number, and `before` what
    there was before it, but for the frozen values: a server that was killed asks for the round
    again, which then begins with the same. `owner` is the node that wrote it, if it has no name.
    """

    local: dict[str, Array] = field(default_factory=dict)
    frozen: dict[str, Array] = field(default_factory=dict)
    optimizer: OptimizerGroup | None = None
    residual: dict[str, Array] = field(default_factory=dict)
    round: str = ""
    owner: str = ""
    before: Kept | None = None

    @property
    def has_changing(self) -> bool:
        """Whether there is anything that a round changes."""
        if self.local or self.residual or self.optimizer is not None:
            return True
        return self.before is not None and self.before.has_changing

    def entering(self, identity: str) -> Kept:
        """Return a copy for a round; of another federation it has the client's own values only."""
        federation = _federation(self.round)
        if federation and federation != _federation(identity):
            return Kept(local=self.local, round=self.round)
        return replace(self)

    def as_before(self) -> Kept:
        """Return what a round that is repeated needs of it."""
        return replace(self, frozen={}, owner="", before=None)

    def to_bytes(self) -> bytes:
        """Return all of it as bytes."""
        arrays = self._arrays()
        if self.before is not None:
            arrays |= {f"{_BEFORE}{key}": a for key, a in self.before._arrays().items()}
        return pack_arrays(arrays)

    def _arrays(self) -> dict[str, Array]:
        arrays = {f"{_LOCAL}:{name}": array for name, array in self.local.items()}
        arrays |= {f"{_FROZEN}:{name}": array for name, array in self.frozen.items()}
        arrays |= {f"{_RESIDUAL}:{name}": array for name, array in self.residual.items()}
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
    def from_bytes(cls, data: bytes, where: str) -> Kept:
        """Return what `to_bytes` gave bytes of."""
        arrays = unpack_arrays(data, where)
        earlier = {k[len(_BEFORE) :]: a for k, a in arrays.items() if k.startswith(_BEFORE)}
        now = {k: a for k, a in arrays.items() if not k.startswith(_BEFORE)}
        kept = cls._of(now, where)
        kept.before = cls._of(earlier, where) if earlier else None
        return kept

    @classmethod
    def _of(cls, arrays: Mapping[str, Array], where: str) -> Kept:
        kept = cls()
        moments: dict[str, dict[int, Array]] = {}
        step = None
        for key, array in arrays.items():
            kind, _, name = key.partition(":")
            if kind == _STEP:
                step = int(array)
            elif kind == _ROUND:
                kept.round = array.tobytes().decode()
            elif kind == _OWNER:
                kept.owner = array.tobytes().decode()
            elif kind == _LOCAL:
                kept.local[name] = array
            elif kind == _FROZEN:
                kept.frozen[name] = array
            elif kind == _RESIDUAL:
                kept.residual[name] = array
            elif kind.startswith(_MOMENT) and kind[len(_MOMENT) :].isdecimal():
                moments.setdefault(name, {})[int(kind[len(_MOMENT) :])] = array
            else:
                raise StateError(f"{where} has the unknown entry {key!r}: delete it to start anew")
        if step is not None:
            states: dict[str, list[Tensor]] = {
                name: [of[k] for k in sorted(of)] for name, of in moments.items()
            }
            kept.optimizer = OptimizerGroup(step, 0.0, states)
        return kept


class Keeper:
    """Where a client's `Kept` is: in a file of the folder, or in the context."""

    def __init__(self, context: Context, folder: Path | None) -> None:
        self._context = context
        self._is_named = given_name(context) is not None
        self._file = None if folder is None else folder / f"client-{client_name(context)}.npz"
        self._stored: Kept | None = None

    @property
    def way_out(self) -> str:
        """What to do about a `Kept` that cannot be used."""
        if self._file is None:
            return "restart the node"
        return f"delete the client's file {self._file}"

    def begin(self, identity: str) -> Kept:
        """Return what a round begins with; the same if it is repeated."""
        kept = self._read()
        if kept.round == identity and kept.before is not None:
            return replace(kept.before.entering(identity), frozen=kept.frozen)
        return kept.entering(identity)

    def present(self, identity: str) -> Kept:
        """Return what the last round has left."""
        return self._read().entering(identity)

    def write(self, kept: Kept) -> None:
        """Keep it until the next round; an old one that nothing is left of is removed."""
        stored = self._read()
        if not kept.has_changing and not kept.frozen:
            self._remove()
        elif kept.has_changing or stored.has_changing or not _same(kept.frozen, stored.frozen):
            self._replace(kept)
        self._stored = None

    def _read(self) -> Kept:
        if self._stored is None:
            self._stored = self._from_context() if self._file is None else self._from(self._file)
        return self._stored

    def _from_context(self) -> Kept:
        record = self._context.state.config_records.get(_RECORD)
        if record is None:
            return Kept()
        return Kept.from_bytes(bytes(record["kept"]), "what the context keeps")

    def _from(self, file: Path) -> Kept:
        if not file.exists():
            return Kept()
        claim(file, self._context, _OWN_FILE)
        kept = Kept.from_bytes(file.read_bytes(), f"the client's file {file}")
        mark = self._context.state.config_records.get(_MARK)
        if mark is not None and kept.owner not in ("", mark["node"]):
            # It is not this node after a restart: that has written it since it was started.
            raise StateError(_shared(file, f"node {mark['node']}", f"node {kept.owner}", _OWN_FILE))
        return kept

    def _replace(self, kept: Kept) -> None:
        if self._file is None:
            self._context.state[_RECORD] = ConfigRecord({"kept": kept.to_bytes()})
            return
        claim(self._file, self._context, _OWN_FILE)
        if not self._is_named:
            # As text: nodes have 64 bits, and numbers in records a sign.
            kept = replace(kept, owner=str(self._context.node_id))
            self._context.state[_MARK] = ConfigRecord({"node": kept.owner})
        replace_file(self._file, kept.to_bytes())

    def _remove(self) -> None:
        if self._file is None:
            self._context.state.pop(_RECORD, None)
        else:
            remove_file(self._file)


def _federation(identity: str) -> str:
    return identity.rpartition("/")[0]


def _same(some: Mapping[str, Array], others: Mapping[str, Array]) -> bool:
    """Whether these are the very arrays that were read."""
    return some.keys() == others.keys() and all(some[name] is others[name] for name in some)


# ---- whose is it ---------------------------------------------------------------------------------

_OWN_FILE = "give each a 'client-name' in its node's configuration, or a folder of its own"
_claims: dict[Path, str] = {}
_lock = threading.Lock()


def claim(file: Path, context: Context, advice: str) -> None:
    """Refuse a file that another client of this process uses."""
    name = given_name(context)
    client = f"node {context.node_id}" if name is None else f"client {name}"
    with _lock:
        first = _claims.setdefault(file.absolute(), client)
    if first != client:
        raise StateError(_shared(file, first, client, advice))


def _shared(file: Path, one: str, other: str, advice: str) -> str:
    return f"two clients, {one} and {other}, share the file {file}: {advice}"


def given_name(context: Context) -> str | None:
    """Return the name that a node's configuration gives a client, fit for the name of a file."""
    for key in ("client-name", "partition-id"):
        if key in context.node_config:
            given = str(context.node_config[key])
            return "".join(c if c.isalnum() or c in "-_." else quote(c, safe="") for c in given)
    return None


def client_name(context: Context) -> str:
    """Return what tells a client from others that keep their things in the same folder.

    A node gets another number each time it connects, so one without a name has the folder for
    itself, and finds its file again after a restart.
    """
    name = given_name(context)
    return "0" if name is None else name


def client_number(context: Context) -> int:
    """Return the number that a client's random numbers follow from."""
    given = context.node_config.get("partition-id", context.node_id)
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    number = int(given if isinstance(given, int | float) else context.node_id)
    return abs(number) & (2**63 - 1)  # nodes have 64 bits, and numbers in messages a sign
