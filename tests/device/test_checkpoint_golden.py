"""Checkpoints that ONNX Runtime wrote, intact and damaged in every way that could be thought of."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
from checkpoints import GOLDEN, a_training_state, as_plain_data, without_checksum
from forger import Forger

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint.content import RawTensor
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint

WEIGHT = np.array([[0.5, -1.0], [1.5, 2.0], [-0.25, 0.125]], np.float32)
INLINE = ["generated", "nominal", "saved", "version1"]


def test_a_generated_checkpoint() -> None:
    content = read_checkpoint(GOLDEN / "generated")
    assert list(content.trainable) == ["fc.weight", "fc.bias"]
    np.testing.assert_array_equal(content.trainable["fc.weight"], WEIGHT)
    np.testing.assert_array_equal(content.trainable["fc.bias"], np.float32([0.5, -1]))
    np.testing.assert_array_equal(content.frozen["scale"], np.float32([2, 3]))
    assert content.frozen["shape"].tolist() == [-1, 2]
    assert content.frozen["shape"].dtype == np.int64 and content.frozen["shape"].flags.aligned
    assert not content.nominal and not content.optimizer_groups and not content.properties


def test_a_nominal_checkpoint() -> None:
    content = read_checkpoint(GOLDEN / "nominal")
    assert content.nominal
    tensors = {**content.trainable, **content.frozen}
    assert all(
        isinstance(tensor, RawTensor) and not tensor.data.size for tensor in tensors.values()
    )
    codes = {name: tensor.code for name, tensor in tensors.items()}
    assert codes == {"fc.weight": 1, "fc.bias": 1, "scale": 1, "shape": 7}


def test_a_saved_checkpoint() -> None:
    content = read_checkpoint(GOLDEN / "saved")
    for name, values in json.loads((GOLDEN / "saved.json").read_text()).items():
        np.testing.assert_array_equal(content.trainable[name], np.float32(values))
    assert content.properties == {
        "epoch": 3,
        "zero": 0,
        "negative": -5,
        "best loss": float(np.float32(0.1)),
        "name": "trié",
        "empty": "",
    }
    group = content.optimizer_groups["group0"]
    assert group.step == 2 and group.initial_learning_rate == float(np.float32(0.001))
    assert {name: [m.shape for m in moments] for name, moments in group.states.items()} == {
        "fc.bias": [(2,), (2,)],
        "fc.weight": [(3, 2), (3, 2)],
    }
    # Of two steps with the gradient g: m = 0.19 g and v = 0.001999 g².
    m, v = group.states["fc.weight"]
    np.testing.assert_allclose(v, 0.001999 * (m / 0.19) ** 2, rtol=1e-2)


def test_a_checkpoint_with_external_data() -> None:
    content = read_checkpoint(GOLDEN / "external")
    assert content.has_external_data
    table = content.frozen["table"]
    np.testing.assert_array_equal(table, np.arange(40, dtype=np.float32).reshape(5, 8))
    assert not table.flags.writeable
    np.testing.assert_array_equal(content.trainable["fc.weight"], WEIGHT)
    assert table.tobytes() in (GOLDEN / "external.data").read_bytes()


def test_a_checkpoint_of_version_1() -> None:
    content = read_checkpoint(GOLDEN / "version1")
    np.testing.assert_array_equal(content.trainable["fc.weight"], WEIGHT)
    np.testing.assert_array_equal(content.frozen["scale"], np.float32([2, 3]))


@pytest.mark.parametrize("name", [*INLINE, "external"])
def test_what_was_read_is_written_alike(tmp_path, name) -> None:
    content = read_checkpoint(GOLDEN / name)
    write_checkpoint(tmp_path / name, content, sort=False)
    assert as_plain_data(read_checkpoint(tmp_path / name)) == as_plain_data(content)


def outcome(data: bytes):
    """What reading gives: None for a `CheckpointError`. Any other exception fails the test."""
    try:
        return as_plain_data(read_checkpoint(data))
    except CheckpointError as error:
        assert len(str(error)) > 20
        return None


@pytest.fixture(params=[*INLINE, "own", "own without checksum"])
def small_file(request, tmp_path):
    if request.param in INLINE:
        return GOLDEN / request.param
    path = tmp_path / "own"
    write_checkpoint(path, a_training_state())
    if request.param != "own":
        path.write_bytes(without_checksum(path.read_bytes()))
    return path


def test_a_file_that_ends_anywhere(small_file) -> None:
    whole = small_file.read_bytes()
    intact = outcome(whole)
    for length in range(len(whole)):
        # What is missing of the last string may be the zeros that fill it up to four bytes.
        if outcome(whole[:length]) is not None:
            assert outcome(whole[:length]) == intact and not any(whole[length:]), length


@pytest.mark.slow
def test_every_single_bit_flipped(small_file) -> None:
    whole = small_file.read_bytes()
    intact = outcome(whole)
    start = np.frombuffer(whole, np.uint8).ctypes.data
    content = read_checkpoint(whole)
    arrays = [t.data if isinstance(t, RawTensor) else t
              for t in (content.trainable | content.frozen).values()]  # fmt: skip
    elements = {array.ctypes.data - start + i for array in arrays for i in range(array.nbytes)}
    unnoticed = []
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        if outcome(bytes(damaged)) == intact:
            unnoticed.append(bit // 8)
    # Unnoticed is what has no meaning: padding, and sizes that are too generous.
    assert not elements & set(unnoticed)
    assert len(unnoticed) < 2 * len(whole)


def test_random_damage(small_file) -> None:
    whole = small_file.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 6)):
            at = 4 * rng.integers(0, len(whole) // 4)
            value = rng.choice([0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFC])
            noise = int(rng.integers(0, 2**32)) if rng.random() < 0.3 else int(value)
            damaged[at : at + 4] = struct.pack("<I", noise)
        outcome(bytes(damaged))


def test_damage_to_the_files_of_a_checkpoint_with_external_data(tmp_path) -> None:
    shutil.copy(GOLDEN / "external.data", tmp_path / "c.data")
    whole = (GOLDEN / "external").read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        if bit % 7 == 0:
            (tmp_path / "c").write_bytes(damaged)
            try:
                as_plain_data(read_checkpoint(tmp_path / "c"))
            except CheckpointError:
                continue
    (tmp_path / "c").write_bytes(whole)
    data = (GOLDEN / "external.data").read_bytes()
    for length in range(0, len(data), 5):
        (tmp_path / "c.data").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="external data"):
            read_checkpoint(tmp_path / "c")
    (tmp_path / "c.data").unlink()
    with pytest.raises(CheckpointError, match=r"c\.data does not exist"):
        read_checkpoint(tmp_path / "c")


def test_files_that_are_no_checkpoints(tmp_path) -> None:
    for name, data, message in [
        ("empty", b"", "ends after 0 bytes"),
        ("short", b"\x10\0\0\0ODT", "ends after 7 bytes"),
        ("model", b"\x08\x07\x12\x07pytorch", "identifier"),
        ("zeros", bytes(64), "identifier"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=message) as caught:
            read_checkpoint(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(CheckpointError, match="directory"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_checkpoint(tmp_path / "missing")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(CheckpointError, match="regular file"):
            read_checkpoint(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="contiguous"):
        read_checkpoint(memoryview(bytes(100))[::2])


HOSTILE = {
    "version 0": (lambda f: f.file(version=0), "version is 0"),
    "version 3": (lambda f: f.file(version=3), "version is 3"),
    "huge dims": (lambda f: f.file(u1=f.module(f.tensor(dims=(2**62, 2**62)))), "impossible"),
    "huge empty": (lambda f: f.file(u1=f.module(f.tensor(dims=(2**62, 9, 0)))), "impossible"),
    "product of 2": (lambda f: f.file(u1=f.module(f.tensor(dims=(2**31, 2**33)))), "impossible"),
    "negative dims": (lambda f: f.file(u1=f.module(f.tensor(dims=(-1, -2)))), "impossible"),
    "rank 33": (lambda f: f.file(u1=f.module(f.tensor(dims=(1,) * 33))), "at most 32"),
    "more dims": (lambda f: f.file(u1=f.module(f.tensor(dims=(2**40,)))), "bytes of data"),
    "fewer dims": (lambda f: f.file(u1=f.module(f.tensor(dims=(1,)))), "bytes of data"),
    "type 0": (lambda f: f.file(u1=f.module(f.tensor(code=0))), "element type 0"),
    "type 27": (lambda f: f.file(u1=f.module(f.tensor(code=27))), "element type 27"),
    "type -1": (lambda f: f.file(u1=f.module(f.tensor(code=-1))), "element type -1"),
    "bool 2": (lambda f: f.file(u1=f.module(f.tensor(code=9, raw=b"\1\2"))), "neither 0 nor 1"),
    "raw strings": (lambda f: f.file(u1=f.module(f.tensor(code=8))), "0 strings"),
    "no name": (lambda f: f.file(u1=f.module(f.table(i3=1))), "name is missing"),
    "empty name": (lambda f: f.file(u1=f.module(f.tensor(name=""))), "name is missing"),
    "same name": (lambda f: f.file(u1=f.module(f.tensor(), f.tensor())), "twice"),
    "same table": (lambda f: f.file(u1=f.module(*[f.tensor()] * 2)), "twice"),
    "not UTF-8": (lambda f: f.file(u1=f.module(f.tensor(name=b"\xff\xfe"))), "UTF-8"),
    "external -2": (
        lambda f: f.file(u1=f.module(f.tensor(q6=-2), b3=True)),
        "read it by its path",
    ),
    "external without": (lambda f: f.file(u1=f.module(f.tensor(q6=8))), "has none"),
    "nominal with data": (lambda f: f.file(u1=f.module(f.tensor(), b2=True)), "nominal"),
    "groups twice": (
        lambda f: f.file(u2=f.vector([f.table(u0=f.string("g")), f.table(u0=f.string("g"))])),
        "twice",
    ),
    "step -1": (lambda f: f.file(u2=f.vector([f.table(u0=f.string("g"), q1=-1)])), "step is -1"),
    "momentum": (
        lambda f: f.file(
            u2=f.vector(
                [
                    f.table(
                        u0=f.string("g"),
                        u3=f.vector(
                            [f.table(u0=f.string("w"), u1=f.vector([f.tensor("momentum1")]))]
                        ),
                    )
                ]
            )
        ),
        "momentum0",
    ),
    "property twice": (
        lambda f: f.file(
            u3=f.table(
                u0=f.vector([f.table(u0=f.string("p"), q1=1)]),
                u2=f.vector([f.table(u0=f.string("p"), u1=f.string("x"))]),
            )
        ),
        "twice",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_forged_files(case) -> None:
    make, message = HOSTILE[case]
    data = make(Forger())
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(data)


def test_empty_tensors_of_unusual_shape_are_fine() -> None:
    forger = Forger()
    data = forger.file(u1=forger.module(forger.tensor(dims=(2**40, 0), raw=b"")))
    assert read_checkpoint(data).trainable["w"].shape == (2**40, 0)


def test_offsets_of_external_data_are_checked(tmp_path) -> None:
    for offset, fine in [(0, True), (8, True), (9, False), (-2, False), (2**62, False)]:
        forger = Forger()
        # Offset 0 is not the default; the builder must be told to write it.
        forger.builder.ForceDefaults(True)
        tensor = forger.tensor(q6=offset, raw=b"")
        (tmp_path / "c").write_bytes(forger.file(u1=forger.module(tensor, b3=True)))
        (tmp_path / "c.data").write_bytes(bytes(16))
        if fine:
            assert read_checkpoint(tmp_path / "c").trainable["w"].tolist() == [0, 0]
        else:
            with pytest.raises(CheckpointError, match="external data"):
                read_checkpoint(tmp_path / "c")


@pytest.mark.slow
def test_a_file_that_refers_to_itself_without_end_is_refused_at_once() -> None:
    """Many groups that share one vector of many states would be 2.5 billion tables."""
    forger = Forger()
    states = [forger.table(u0=forger.string(f"p{i}")) for i in range(50_000)]
    shared = forger.vector(states)
    groups = [forger.table(u0=forger.string(f"g{i}"), u3=shared) for i in range(50_000)]
    data = forger.file(u2=forger.vector(groups))
    with pytest.raises(CheckpointError, match="overlap"):
        read_checkpoint(data)


def test_strings_that_overlap_are_refused_at_once() -> None:
    """Each of 100,000 strings is half a megabyte of one and the same zeros."""
    count = 100_000
    forger = Forger()
    body = struct.pack("<I", 0x00080000) * count + bytes(0x80000)
    raw = forger.raw(body)
    tables = [forger.table(u0=raw) for _ in range(count)]
    data = bytearray(forger.file(u3=forger.table(u0=forger.vector(tables))))
    start = bytes(data).index(body[:64])
    field = 0
    for position in range(0, start - 4, 4):
        if position + struct.unpack_from("<I", data, position)[0] == start - 4 and field < count:
            struct.pack_into("<I", data, position, start + 4 * field - position)
            field += 1
    assert field > count // 2
    with pytest.raises(CheckpointError, match=r"overlap|truncated"):
        read_checkpoint(bytes(data))
