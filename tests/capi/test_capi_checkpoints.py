"""Checkpoints in C++: the bytes and the sentences are those of Python."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from capi_calls import error_of, killed_again_and_again
from checkpoints import GOLDEN, a_training_state, of_every_type, with_checksum
from mutations import mutated

from onnxtrain.format import strict_json
from onnxtrain.format.checkpoint.content import CheckpointContent
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint

HOSTILE = GOLDEN.parent / "hostile" / "checkpoints"
FILES = [GOLDEN / name for name in ("generated", "nominal", "saved", "external", "version1")]
FILES += [GOLDEN.parent / folder / "checkpoint" for folder in ("mlp", "cnn", "head", "earlier")]
LARGE = 1800 << 20


def assert_same_files(ours: Path, theirs: Path) -> None:
    identifier = read_bytes_of_identifier(theirs)
    own = read_bytes_of_identifier(ours)
    for suffix in ("", ".data"):
        expected, found = Path(f"{theirs}{suffix}"), Path(f"{ours}{suffix}")
        assert found.exists() == expected.exists()
        if found.exists():
            renamed = found.read_bytes().replace(own, identifier)
            end = len(renamed) - (16 if not suffix and own else 0)  # the checksum of the identifier
            assert renamed[:end] == expected.read_bytes()[:end]


def read_bytes_of_identifier(path: Path) -> bytes:
    data = Path(f"{path}.data")
    return data.read_bytes()[-16:] if data.exists() else b""


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.name}")
@pytest.mark.parametrize("order", ["sorted", "given"])
def test_a_copy_is_what_python_writes(calls, tmp_path, file, order) -> None:
    write_checkpoint(tmp_path / "python", read_checkpoint(file), sort=order == "sorted")
    calls.result("copy", file, tmp_path / "cpp", order, LARGE)
    assert_same_files(tmp_path / "cpp", tmp_path / "python")


@pytest.mark.parametrize("dims", [(), (3,), (5, 7, 2), (0, 4), (100,)])
@pytest.mark.parametrize("threshold", [1, LARGE])
def test_every_element_type(calls, tmp_path, dims, threshold) -> None:
    content = CheckpointContent(trainable=of_every_type(dims))
    write_checkpoint(tmp_path / "python", content, external_data_threshold=threshold)
    calls.result("copy", tmp_path / "python", tmp_path / "cpp", "sorted", threshold)
    assert_same_files(tmp_path / "cpp", tmp_path / "python")


def test_a_training_state_with_all_there_is(calls, tmp_path) -> None:
    write_checkpoint(tmp_path / "python", a_training_state())
    calls.result("copy", tmp_path / "python", tmp_path / "cpp", "sorted", LARGE)
    assert (tmp_path / "cpp").read_bytes() == (tmp_path / "python").read_bytes()
    calls.result("copy_bytes", tmp_path / "python", tmp_path / "bytes", "sorted")
    assert (tmp_path / "bytes").read_bytes() == (tmp_path / "python").read_bytes()


def test_large_external_data_are_verified(calls, tmp_path) -> None:
    tensors = {f"w{k}": np.arange(k * 300_000, dtype=np.float32) for k in (1, 2, 3)}
    path = tmp_path / "python"
    write_checkpoint(path, CheckpointContent(trainable=tensors), external_data_threshold=1)
    calls.result("copy", path, tmp_path / "cpp", "sorted", 1)
    assert_same_files(tmp_path / "cpp", path)
    data = Path(f"{path}.data")
    good = data.read_bytes()
    for change in (lambda d: d[:-1], lambda d: d[:2000000] + b"x" + d[2000001:], lambda d: b""):
        data.write_bytes(change(good))
        assert calls("read", path) == (False, error_of(read_checkpoint, path))
    data.unlink()
    assert calls("read", path) == (False, error_of(read_checkpoint, path))


def test_hostile_checkpoints(calls) -> None:
    for path in sorted(HOSTILE.iterdir()):
        expected = error_of(read_checkpoint, path)
        succeeded, text = calls("read", path)
        assert succeeded == (expected is None), path
        assert succeeded or text == expected


def test_what_is_no_file(calls, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe"):
        expected = error_of(read_checkpoint, path)
        assert calls("read", path) == (False, expected)


@pytest.mark.parametrize("seed", range(4))
def test_changed_files_are_refused_as_python_refuses_them(calls, tmp_path, seed) -> None:
    """`ONNXTRAIN_MUTATIONS` files for each seed; 300 by default."""
    chooser = random.Random(seed)
    write_checkpoint(tmp_path / "state", a_training_state())
    good = [path.read_bytes() for path in (*FILES, tmp_path / "state") if path.name != "external"]
    path = tmp_path / "changed"
    for _ in range(int(os.environ.get("ONNXTRAIN_MUTATIONS", "300"))):
        data = mutated("flatbuffers", chooser, chooser.choice(good), good)
        if data[8:16] == b"ODTCSIZE" and chooser.random() < 0.9:
            data = with_checksum(data)
        path.write_bytes(data)
        expected = error_of(read_checkpoint, path)
        succeeded, text = calls("read", path)
        assert succeeded == (expected is None), (expected, text)
        assert succeeded or text == expected
        if succeeded and not Path(f"{path}.data").exists():
            write_checkpoint(tmp_path / "python", read_checkpoint(path))
            calls.result("copy", path, tmp_path / "cpp", "sorted", LARGE)
            assert_same_files(tmp_path / "cpp", tmp_path / "python")


def test_a_small_file_cannot_fill_the_memory(calls, tmp_path) -> None:
    """A string that a million entries share is there once."""
    texts = np.array(["x" * 1_000_000] + ["y"] * 200_000, object)
    write_checkpoint(tmp_path / "state", CheckpointContent(frozen={"texts": texts}))
    data = bytearray((tmp_path / "state").read_bytes())
    count = len(texts).to_bytes(4, "little")
    first = data.index(count, data.index(count) + 1) + 4  # behind the dimensions
    target = first + int.from_bytes(data[first : first + 4], "little")
    for at in range(first, first + 4 * len(texts), 4):
        data[at : at + 4] = (target - at).to_bytes(4, "little")
    (tmp_path / "state").write_bytes(with_checksum(bytes(data)))
    assert read_checkpoint(tmp_path / "state").frozen["texts"][-1] == "x" * 1_000_000
    calls.result("read", tmp_path / "state")


@pytest.mark.parametrize(
    "value",
    [
        {
            "a": 0.1,
            "b": [1, 2.0, -0.0, 1e-5, 1e16, 123456789.125, 1e22, 5e-324, 1.7976931348623157e308],
        },
        {"learning_rate": float(np.float32(0.001)), 'é\n"\\': "\u2028\U0001f600\x7f\x01"},
        {"n": [math.nan, math.inf, -math.inf], "big": 2**70, "none": None, "yes": True, "o": {}},
    ],
)
def test_json_is_pythons(calls, value) -> None:
    text = strict_json.dumps(value)
    assert calls.result("json", text) == text
    assert calls.result("json", json.dumps(value)) == text


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        "[1,]",
        "[" * 200 + "]" * 200,
        "9" * 400,
        '"\x01"',
        "01",
        "1.",
        "",
        "{1: 2}",
    ],
)
def test_what_is_no_json(calls, text) -> None:
    with pytest.raises(ValueError):
        strict_json.loads(text)
    assert not calls("json", text)[0]


def test_random_floats_have_the_shortest_digits(calls) -> None:
    bits = np.random.default_rng(0).integers(0, 2**64, 300, np.uint64)
    numbers = [x for x in bits.view(np.float64).tolist() if math.isfinite(x)]
    assert calls.result("json", json.dumps(numbers)) == json.dumps(numbers)


def test_what_dead_processes_left_is_removed(calls, tmp_path) -> None:
    file = GOLDEN / "saved"
    (tmp_path / f".state.{'a' * 16}.tmp").write_bytes(b"left")
    (tmp_path / f"state.data.{'b' * 16}").write_bytes(b"left")
    (tmp_path / ".other").write_bytes(b"stays")
    calls.result("copy", file, tmp_path / "state", "sorted", LARGE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other", "state"]


def test_kills_leave_the_old_or_the_new(calls, program, tmp_path) -> None:
    """A process is killed while it saves; what it left is read by Python, and saved over."""
    tensors = [{"w": np.full(200_000, value, np.float32)} for value in (1, 2)]
    for name, held in zip(("one", "two"), tensors, strict=True):
        write_checkpoint(
            tmp_path / name, CheckpointContent(trainable=held), external_data_threshold=1
        )
    target = tmp_path / "state" / "checkpoint"
    target.parent.mkdir()
    shutil.copy(tmp_path / "one", target)
    shutil.copy(tmp_path / "one.data", f"{target}.data")
    lines = "".join(
        f"copy\t{tmp_path}/{name}\t{target}\tsorted\t1\n" for name in ("one", "two") * 40
    )
    for _ in killed_again_and_again(program, lines, longest=0.08):
        found = read_checkpoint(target).trainable["w"]
        assert (found == found[0]).all()
        calls.result("read", target)
    calls.result("copy", tmp_path / "two", target, "sorted", 1)
    assert sorted(path.name for path in target.parent.iterdir()) == [
        "checkpoint",
        "checkpoint.data",
    ]
