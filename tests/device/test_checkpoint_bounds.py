"""A small file cannot make the reader take much memory or time, whatever it claims."""

import os
import struct
import sys
from pathlib import Path

import pytest
from checkpoints import a_training_state, with_checksum
from forger import Forger
from reading_cost import costs_of

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint

MEGABYTE = 2**20


def external(*tensors: tuple[int, int]) -> bytes:
    """A checkpoint with float tensors of some (offset, number of elements) in external data."""
    forger = Forger()
    forger.builder.ForceDefaults(True)
    made = [
        forger.tensor(f"w{i}", dims=(count,), raw=b"", q6=offset)
        for i, (offset, count) in enumerate(tensors)
    ]
    return forger.file(u1=forger.module(*made, b3=True))


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([(0, 4), (0, 4)], "overlap"),
        ([(0, 4), (12, 4)], "overlap"),
        ([(16, 4), (0, 8)], "overlap"),
        ([(0, 4), (4, 1)], "overlap"),
        ([(2, 4)], "not a multiple of 4"),
        ([(-4, 1)], "not a multiple of 4"),
        ([(2**40, 1)], "unused"),
        ([(0, 4), (16 + 4096, 4)], "unused"),
        ([(0, 2**40)], "are needed"),
        ([(0, MEGABYTE)], "are needed"),
    ],
)
def test_external_tensors_that_overlap_or_lie_elsewhere(tmp_path, tensors, message) -> None:
    (tmp_path / "c").write_bytes(external(*tensors))
    (tmp_path / "c.data").write_bytes(bytes(MEGABYTE))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "c")
    (tmp_path / "c").write_bytes(external((0, 4), (16, 8), (4000, 2), (100, 0)))
    assert len(read_checkpoint(tmp_path / "c").trainable) == 4
    (tmp_path / "c").write_bytes(external((2**40, 0)))
    assert read_checkpoint(tmp_path / "c").trainable["w0"].shape == (0,)


def test_a_file_of_ours_has_tensors_at_multiples_of_64(tmp_path) -> None:
    """Even if its checksum is right."""
    write_checkpoint(tmp_path / "c", a_training_state(size=101), external_data_threshold=0)
    whole = bytearray((tmp_path / "c").read_bytes())
    offset = struct.pack("<q", 1664)  # of the table behind 101 · 4 floats
    assert whole.count(offset) == 1
    struct.pack_into("<q", whole, whole.index(offset), 1632)
    (tmp_path / "c").write_bytes(with_checksum(bytes(whole)))
    with pytest.raises(CheckpointError, match="not a multiple of 64"):
        read_checkpoint(tmp_path / "c")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_data_behind_a_link_out_of_the_folder_are_not_read(tmp_path) -> None:
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    secret.write_bytes(bytes(range(64)))
    (folder / "c").write_bytes(external((0, 4)))
    (folder / "c.data").symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_checkpoint(folder / "c")
    # Where both are links, as in a cache of downloads, they lead to one folder.
    links, store = tmp_path / "links", tmp_path / "store"
    links.mkdir()
    store.mkdir()
    write_checkpoint(store / "c", a_training_state(size=40), external_data_threshold=0)
    for name in ("c", "c.data"):
        (links / name).symlink_to(store / name)
    assert read_checkpoint(links / "c").trainable["w"].shape == (40, 4)


def shared_bytes() -> bytes:
    """Tensors that all have the same bytes of the file."""
    forger = Forger()
    raw = forger.raw(bytes(400))
    names = [forger.string(f"w{i}") for i in range(3)]
    dims = forger.dims(100)
    made = [forger.table(u0=name, u2=dims, u4=raw, i3=1) for name in names]
    return forger.file(u1=forger.module(*made))


def test_tensors_of_the_file_that_share_bytes_are_refused() -> None:
    """Training one would change the other."""
    padding = bytes(4000)  # so that the sum of the sizes is not what is wrong
    forger = Forger()
    raw = forger.raw(bytes(400))
    first = forger.table(u0=forger.string("a"), u2=forger.dims(100), u4=raw, i3=1)
    second = forger.table(u0=forger.string("b"), u2=forger.dims(100), u4=raw, i3=1)
    text = forger.string(padding)
    tensors = forger.module(first, second)
    properties = forger.table(u2=forger.vector([forger.table(u0=forger.string("p"), u1=text)]))
    with pytest.raises(CheckpointError, match="overlap"):
        read_checkpoint(forger.file(u1=tensors, u3=properties))
    with pytest.raises(CheckpointError, match="overlap"):
        read_checkpoint(shared_bytes())


def many_strings() -> bytes:
    """A tensor of half a million strings, all the same."""
    forger = Forger()
    text = forger.string("x")
    strings = forger.vector([text] * 500_000)
    made = forger.table(u0=forger.string("w"), u2=forger.dims(500_000), u5=strings, i3=8)
    return forger.file(u1=forger.module(made))


def many_groups() -> bytes:
    """Tables that all lead to one vector."""
    forger = Forger()
    shared = forger.vector([forger.table(u0=forger.string(f"p{i}")) for i in range(3000)])
    groups = [forger.table(u0=forger.string(f"g{i}"), u3=shared) for i in range(3000)]
    return forger.file(u2=forger.vector(groups))


def shaped(*dims: int, code: int = 1) -> bytes:
    forger = Forger()
    return forger.file(u1=forger.module(forger.tensor(dims=dims, raw=b"", code=code)))


ATTACKS = {
    # 2 KB that claim 60 GB: each tensor is all of the data.
    "one file many times": (external(*[(0, 10 * MEGABYTE)] * 30), 40 * MEGABYTE),
    "shifted": (external(*[(4 * i, 10 * MEGABYTE - 400) for i in range(30)]), 40 * MEGABYTE),
    "a terabyte": (external((0, 2**38)), 2**40),
    "far away": (external((2**40 - 4, 1)), 2**40),
    "far apart": (external(*[(i * 2**35, 1) for i in range(30)]), 2**40),
    "shared bytes": (shared_bytes(), None),
    "many strings": (many_strings(), None),
    "many groups": (many_groups(), None),
    "empty but huge": (shaped(2**57, 0), None),
    "empty and impossible": (shaped(2**57, 2, 0), None),
    "overflow": (shaped(2**32, 2**32), None),
    "strings of nothing": (shaped(2**40, 0, code=8), None),
    "strings that are not there": (shaped(2**40, code=8), None),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is told by Linux")
def test_small_files_take_little_memory_and_time(tmp_path) -> None:
    paths = []
    for index, (main, size) in enumerate(ATTACKS.values()):
        paths.append(tmp_path / str(index))
        paths[-1].write_bytes(main)
        if size is not None:
            sparse(tmp_path / f"{index}.data", size)
    costs = costs_of("checkpoint", paths)
    for name, (error, kilobytes, seconds) in zip(ATTACKS, costs, strict=True):
        assert kilobytes < 40_000, (name, kilobytes)
        assert seconds < 5, (name, seconds)
        assert error is not None or name in ("many strings", "empty but huge", "strings of nothing")
