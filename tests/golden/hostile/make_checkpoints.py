"""Writes the checkpoints in `checkpoints/`: each is broken, or made to harm, in one way.

    python tests/golden/hostile/make_checkpoints.py

Each pretends to be one of the golden model `mlp`. Training from any of them must end in an error
of `onnxtrain.errors` before anything is trained or written.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from onnxtrain.format.checkpoint.content import CheckpointContent, OptimizerGroup, RawTensor
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "device"))

from checkpoints import without_checksum  # noqa: E402

FOLDER = HERE / "checkpoints"
GOLDEN = HERE.parent / "mlp" / "checkpoint"
TRAINING = "__onnxtrain__.training"
DIGITS = b"0123456789abcdef"
Change = Callable[[CheckpointContent], None]


def content() -> CheckpointContent:
    """A state of the golden model after some steps of AdamW."""
    read = read_checkpoint(GOLDEN)
    states = {name: [0 * np.array(v), 0 * np.array(v)] for name, v in read.trainable.items()}
    read.optimizer_groups["group0"] = OptimizerGroup(3, 0.1, states)
    return read


def written(change: Change, external: bool = False) -> dict[str, bytes]:
    """The files of the state with a change, by what their names end with."""
    state = content()
    state.has_external_data = external
    change(state)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c")
        write_checkpoint(path, state)
        found = {file.name.removeprefix("c"): file.read_bytes() for file in path.parent.iterdir()}
    # Those who harm would write a right checksum.
    found[""] = without_checksum(found[""])
    if external:
        drawn = found[".data"][-16:]
        found = {end: data.replace(drawn, DIGITS) for end, data in found.items()}
    return found


def set_at(obj: str, key: str, value: object) -> Change:
    """Set an entry of one of the mappings of a content."""

    def change(state: CheckpointContent) -> None:
        getattr(state, obj)[key] = value

    return change


def training(record: object) -> dict[str, bytes]:
    """The state with another record of the learning rate and so on."""
    text = record if isinstance(record, str) else json.dumps(record)
    return written(set_at("properties", TRAINING, text))


def group(**changes: object) -> dict[str, bytes]:
    """The state with another group of the optimizer."""

    def change(state: CheckpointContent) -> None:
        for name, value in changes.items():
            setattr(state.optimizer_groups["group0"], name, value)

    return written(change)


def moments(change: Callable[[list], list]) -> dict[str, bytes]:
    states = content().optimizer_groups["group0"].states
    return group(states={name: change(held) for name, held in states.items()})


def renamed(old: str, new: str) -> dict[str, bytes]:
    def change(state: CheckpointContent) -> None:
        state.trainable[new] = state.trainable.pop(old)
        states = state.optimizer_groups["group0"].states
        states[new] = states.pop(old)

    return written(change)


def patched(old: bytes, new: bytes) -> dict[str, bytes]:
    """The bytes of the state with a part replaced."""
    files = written(lambda state: None)
    assert files[""].count(old) == 1 and len(old) == len(new), (old, files[""].count(old))
    files[""] = files[""].replace(old, new)
    return files


def with_word(position: int, number: int) -> dict[str, bytes]:
    """The bytes of the state with another number in 32 bits at a position."""
    files = written(lambda state: None)
    data = bytearray(files[""])
    struct.pack_into("<I", data, position, number)
    return {"": bytes(data)}


def with_version(number: int) -> dict[str, bytes]:
    """The state as one of another version of the format."""
    data = written(lambda state: None)[""]
    root = struct.unpack_from("<I", data, 0)[0]
    vtable = root - struct.unpack_from("<i", data, root)[0]
    return with_word(root + struct.unpack_from("<H", data, vtable + 4)[0], number)


def frozen_instead() -> dict[str, bytes]:
    def change(state: CheckpointContent) -> None:
        state.frozen["fc1.weight"] = state.trainable.pop("fc1.weight")

    return written(change)


def nothing_trains() -> dict[str, bytes]:
    def change(state: CheckpointContent) -> None:
        state.frozen, state.trainable = state.trainable, {}

    return written(change)


def climbing(identifier: str) -> dict[str, bytes]:
    """External data that are said to be elsewhere; there are none beside the file."""
    files = written(lambda state: None, external=True)
    assert len(identifier) == 16 and files[""].count(DIGITS) == 1
    return {"": files[""].replace(DIGITS, identifier.encode())}


def data_cut() -> dict[str, bytes]:
    files = written(lambda state: None, external=True)
    # Without the mark at the end it looks like data that ONNX Runtime has written.
    return {**files, ".data": files[".data"][:-100]}


W = np.zeros((16, 8), np.float32)
CASES: dict[str, Callable[[], dict[str, bytes]]] = {
    "empty": lambda: {"": b""},
    "seven_bytes": lambda: {"": written(lambda s: None)[""][:7]},
    "half": lambda: {"": (data := written(lambda s: None)[""])[: len(data) // 2]},
    "zeros": lambda: {"": bytes(4096)},
    "text": lambda: {"": b"{\"version\": 2}" * 100},
    "identifier": lambda: patched(b"ODTC", b"ORTM"),
    "version_0": lambda: with_version(0),
    "version_3": lambda: with_version(3),
    "version_negative": lambda: with_version(2**32 - 2),
    "root_past_the_end": lambda: with_word(0, 2**31),
    "root_before_the_beginning": lambda: with_word(0, 2**32 - 4),
    "data_past_the_end": data_cut,
    "data_missing": lambda: {"": written(lambda s: None, external=True)[""]},
    "data_elsewhere": lambda: climbing("/../../../stolen"),
    "data_in_the_root": lambda: climbing("/etc/hostname\0\0\0"),
    "another_name": lambda: renamed("fc1.weight", "fc3.weight"),
    "a_name_more": lambda: written(set_at("trainable", "fc3.weight", W)),
    "a_name_less": lambda: written(lambda s: s.trainable.__delitem__("fc2.bias")),
    "frozen_instead": frozen_instead,
    "nothing_trains": nothing_trains,
    "transposed": lambda: written(set_at("trainable", "fc1.weight", W.T)),
    "another_rank": lambda: written(set_at("trainable", "fc1.weight", W[None])),
    "no_elements": lambda: written(set_at("trainable", "fc1.weight", W[:0])),
    "float64": lambda: written(set_at("trainable", "fc1.weight", W.astype(np.float64))),
    "bfloat16": lambda: written(
        set_at("trainable", "fc1.weight", RawTensor(16, (16, 8), np.zeros(256, np.uint8)))
    ),
    "strings": lambda: written(
        set_at("trainable", "fc1.weight", np.full((16, 8), "weight", object))
    ),
    "one_moment": lambda: moments(lambda m: m[:1]),
    "three_moments": lambda: moments(lambda m: [*m, m[0]]),
    "moments_transposed": lambda: moments(lambda m: [v.T for v in m]),
    "moments_of_float64": lambda: moments(lambda m: [v.astype(np.float64) for v in m]),
    "moments_of_others": lambda: group(states={"other": [W, W]}),
    "no_moments": lambda: group(states={}),
    "steps_without_end": lambda: group(step=2**63 - 1),
    "steps_negative": lambda: group(step=-1),
    "initial_rate_nan": lambda: group(initial_learning_rate=float("nan")),
    "rate_nan": lambda: training('{"learning_rate": NaN}'),
    "rate_infinite": lambda: training('{"learning_rate": 1e999}'),
    "rate_too_large": lambda: training('{"learning_rate": 1e300}'),
    "rate_in_words": lambda: training({"learning_rate": "fast"}),
    "rate_true": lambda: training({"learning_rate": True}),
    "record_no_json": lambda: training("{"),
    "record_a_list": lambda: training([]),
    "record_nested": lambda: training("[" * 100_000),
    "record_of_digits": lambda: training('{"random": {"seed": ' + "9" * 5000 + ', "draws": 0}}'),
    "random_without_seed": lambda: training({"random": {"draws": 3}}),
    "random_in_words": lambda: training({"random": {"seed": "1", "draws": 3}}),
    "random_fraction": lambda: training({"random": {"seed": 1.5, "draws": 3}}),
    "random_negative": lambda: training({"random": {"seed": 1, "draws": -3}}),
    "private_a_number": lambda: training({"private": 3}),
    "scheduler_a_list": lambda: training({"scheduler": [1]}),
}  # fmt: skip


def write(folder: Path) -> None:
    """Write all of them."""
    folder.mkdir(exist_ok=True)
    for name, make in CASES.items():
        for end, data in make().items():
            (folder / f"{name}{end}").write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
