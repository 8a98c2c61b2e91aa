"""What a client keeps between rounds, and never sends: personal layers, moments, what was rounded.

With a folder it survives restarts of the device; otherwise it is in the context of the run, which
Flower keeps while the node is up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context

from onnxtrain.api.checkpoint_content import Array, OptimizerGroup, RawTensor, Tensor
from onnxtrain.errors import StateError
from onnxtrain.flower.files import pack_arrays, replace_file, unpack_arrays

_RECORD = "onnxtrain"
_LOCAL, _MOMENT, _RESIDUAL, _STEP = "local", "moment", "residual", "step"
_ROUND, _BEFORE = "round", "before/"


@dataclass
class Kept:
    """What a client keeps: parameters by name, the optimizer's state, the rest of compression.

    `round` is the one that it is the result of, and `before` what there was before it: a server
    that was killed asks for the round again, which then begins with the same.
    """

    local: dict[str, Array] = field(default_factory=dict)
    optimizer: OptimizerGroup | None = None
    residual: dict[str, Array] = field(default_factory=dict)
    round: str = ""
    before: Kept | None = None

    def to_bytes(self) -> bytes:
        """Return all of it as bytes."""
        arrays = self._arrays()
        if self.before is not None:
            arrays |= {f"{_BEFORE}{key}": a for key, a in self.before._arrays().items()}
        return pack_arrays(arrays)

    def _arrays(self) -> dict[str, Array]:
        arrays = {f"{_LOCAL}:{name}": array for name, array in self.local.items()}
        arrays |= {f"{_RESIDUAL}:{name}": array for name, array in self.residual.items()}
        arrays[_ROUND] = np.frombuffer(self.round.encode(), np.uint8)
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
            elif kind == _LOCAL:
                kept.local[name] = array
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
        self._file = None if folder is None else folder / f"client-{client_name(context)}.npz"

    def read(self, begins: str = "") -> Kept:
        """Return what is kept; what a round that is repeated began with, if it is this one."""
        kept = self._read()
        return kept.before if begins and kept.round == begins and kept.before else kept

    def _read(self) -> Kept:
        if self._file is not None:
            if not self._file.exists():
                return Kept()
            return Kept.from_bytes(self._file.read_bytes(), f"the client's file {self._file}")
        record = self._context.state.config_records.get(_RECORD)
        if record is None:
            return Kept()
        return Kept.from_bytes(bytes(record["kept"]), "what the context keeps")

    def write(self, kept: Kept) -> None:
        """Keep it until the next round."""
        if self._file is not None:
            replace_file(self._file, kept.to_bytes())
        else:
            self._context.state[_RECORD] = ConfigRecord({"kept": kept.to_bytes()})


def client_name(context: Context) -> str:
    """Return what tells a client from others that keep their things in the same folder.

    A node gets another number each time it connects, so it is not used where the node's
    configuration has a name or the number of a partition.
    """
    for key in ("client-name", "partition-id"):
        if key in context.node_config:
            return "".join(c if c.isalnum() or c in "-_." else "_" for c in
                           str(context.node_config[key]))  # fmt: skip
    return "0"


def client_number(context: Context) -> int:
    """Return the number that a client's random numbers follow from."""
    given = context.node_config.get("partition-id", context.node_id)
    number = int(given if isinstance(given, int | float) else context.node_id)
    return abs(number) & (2**63 - 1)  # nodes have 64 bits, and numbers in messages a sign
