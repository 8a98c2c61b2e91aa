"""Damage to the files of a checkpoint is always found, wherever it is."""

import subprocess
import sys
import zlib

import numpy as np
import pytest
from checkpoints import GOLDEN, a_training_state, as_plain_data, with_checksum, without_checksum

from onnxtrain.errors import CheckpointError
from onnxtrain.format.checkpoint.content import CheckpointContent
from onnxtrain.format.checkpoint.file import read_checkpoint, write_checkpoint

EXTERNAL = 0
BLOCK = 1 << 20


def is_refused(path_or_bytes) -> bool:
    try:
        read_checkpoint(path_or_bytes)
    except CheckpointError:
        return True
    return False


@pytest.fixture
def whole(tmp_path):
    write_checkpoint(tmp_path / "c", a_training_state())
    return (tmp_path / "c").read_bytes()


def test_every_flipped_bit_is_found(whole) -> None:
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        assert is_refused(bytes(damaged)), bit


def test_a_file_that_is_cut_or_has_lost_its_end_is_refused(whole) -> None:
    size = len(whole)
    noise = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    for length in range(size):
        assert is_refused(whole[:length]), length
        assert is_refused(whole[:length] + bytes(size - length)) or not any(whole[length:]), length
        assert is_refused(whole[:length] + noise[length:]), length
    for more in (b"\0", bytes(16), whole[-16:], whole):
        assert is_refused(whole + more)


def test_damage_to_front_and_end_at_once_is_found(whole) -> None:
    """The front still says that there was a checksum if a few bytes of it are wrong."""
    for damaged_bytes in range(8, 12):
        damaged = bytearray(whole)
        damaged[damaged_bytes] ^= 0xFF
        damaged[-len(whole) // 2 :] = bytes(len(damaged[-len(whole) // 2 :]))
        assert is_refused(bytes(damaged))
        assert is_refused(bytes(damaged[:-16]))


def test_the_front_says_how_long_the_file_is_and_where_tensors_begin(whole) -> None:
    assert whole[8:16] == b"ODTCSIZE"
    assert int.from_bytes(whole[16:24], "little") == len(whole)
    structure = int.from_bytes(whole[24:32], "little")
    content = read_checkpoint(whole)
    start = np.frombuffer(whole, np.uint8).ctypes.data
    assert 0 < content.trainable["w"].ctypes.data - start - structure < 256


def test_files_without_a_front_are_read(whole) -> None:
    """Older versions of onnxtrain wrote the checksum alone, ONNX Runtime writes none."""
    intact = as_plain_data(read_checkpoint(whole))
    assert as_plain_data(read_checkpoint(without_checksum(whole))) == intact
    older = with_checksum(whole)[:8] + bytes(24) + whole[32:]
    older = older[:-16] + with_checksum_end(older)
    assert as_plain_data(read_checkpoint(older)) == intact
    for bit in range(0, 8 * len(older), 5):
        damaged = bytearray(older)
        damaged[bit // 8] ^= 1 << bit % 8
        assert is_refused(bytes(damaged)), bit
    for name in ("generated", "saved", "external", "version1", "nominal"):
        read_checkpoint(GOLDEN / name)


def with_checksum_end(data: bytes) -> bytes:
    return b"ODTCCRC=%08x" % zlib.crc32(data[:-16])


def test_a_checksum_that_is_right_does_not_excuse_a_wrong_length(whole) -> None:
    longer = with_checksum(whole[:-16] + bytes(64) + whole[-16:])
    assert not is_refused(longer)
    assert is_refused(longer[:16] + whole[16:24] + longer[24:-16] + longer[-16:])


@pytest.fixture
def external(tmp_path):
    """Four tensors of 1.5 MiB and small ones, in external data: seven blocks."""
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": rng.integers(0, 256, 3 * BLOCK // 2, np.uint8) for i in range(4)}
    tensors |= {f"small{i}": np.full(20 + i, i, np.float32) for i in range(5)}
    content = CheckpointContent(trainable=tensors)
    write_checkpoint(tmp_path / "c", content, external_data_threshold=EXTERNAL)
    assert not is_refused(tmp_path / "c")
    return tmp_path / "c"


def replace_data(path, data: bytes) -> None:
    path.with_name("c.data").write_bytes(data)


def test_damage_to_external_data_is_found_and_named(external) -> None:
    whole = external.with_name("c.data").read_bytes()
    rng = np.random.default_rng(1)
    end = 8 * len(whole)
    bits = [
        *rng.integers(0, end, 30),
        *range(end - 8 * 76, end - 8 * 24),
        *range(end - 192, end, 9),
    ]
    for bit in map(int, bits):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        replace_data(external, damaged)
        assert is_refused(external), bit
    damaged = bytearray(whole)
    damaged[2 * BLOCK + 5] ^= 1
    replace_data(external, damaged)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(external)
    assert "c.data is damaged: the checksum of bytes 2097152 to 3145728" in str(caught.value)
    assert "'w1'" in str(caught.value) and "'w3'" not in str(caught.value)
    # Who has checksums elsewhere may do without these.
    read_checkpoint(external, verify=False)


def test_external_data_in_another_order_or_of_another_length_are_refused(external) -> None:
    whole = external.with_name("c.data").read_bytes()
    end = whole.index(b"ODTCBLKS") - 4 * 7
    assert end // BLOCK == 6
    for changed in (
        whole[BLOCK : 2 * BLOCK] + whole[:BLOCK] + whole[2 * BLOCK :],  # two blocks swapped
        whole[:BLOCK] + bytes(BLOCK) + whole[2 * BLOCK :],  # zeros
        whole[:BLOCK] + whole[2 * BLOCK :],  # a block less
        whole[:BLOCK] + whole[:BLOCK] + whole[BLOCK:],  # a block more
        whole[:end],  # without checksums, as ONNX Runtime writes it
        whole[:end] + bytes(len(whole) - end),
        whole[:end] + whole[-24:],
        whole[:end] + whole[-48:],
        whole[:end] + whole[end + 4 : end + 28] + whole[end : end + 4] + whole[end + 28 :],
        whole[:-4096] + bytes(4096),
        whole + bytes(1),
        whole[1:],
        b"",
    ):
        replace_data(external, changed)
        assert is_refused(external)
        assert len(changed) == len(whole) or not_read(external)
    replace_data(external, whole)
    assert not is_refused(external)


def not_read(path) -> bool:
    """Whether a file of another length is refused even without looking at its content."""
    try:
        read_checkpoint(path, verify=False)
    except CheckpointError:
        return True
    return False


def test_external_data_of_older_versions_are_read(external) -> None:
    """They have the identifier at their end, and no checksums."""
    intact = as_plain_data(read_checkpoint(external))
    whole = external.with_name("c.data").read_bytes()
    end = whole.index(b"ODTCBLKS") - 4 * 7
    replace_data(external, whole[:end] + whole[-24:])
    external.write_bytes(without_checksum(external.read_bytes()))
    assert as_plain_data(read_checkpoint(external)) == intact


@pytest.mark.parametrize("sizes", [[], [16], [BLOCK // 4], [BLOCK // 4 - 16, 16], [BLOCK // 4 + 1]])
def test_data_that_end_anywhere_in_a_block(tmp_path, sizes) -> None:
    tensors = {f"w{i}": np.arange(size, dtype=np.float32) for i, size in enumerate(sizes)}
    content = CheckpointContent(trainable=tensors, has_external_data=True)
    write_checkpoint(tmp_path / "c", content)
    assert as_plain_data(read_checkpoint(tmp_path / "c")) == as_plain_data(content)


TRUNCATE = """
import sys
import numpy as np
from onnxtrain.api import CheckpointState
from onnxtrain.format.checkpoint.file import read_checkpoint

state = CheckpointState.load_checkpoint(sys.argv[1])
content = read_checkpoint(sys.argv[1])
sums = [float(array.sum()) for array in content.trainable.values()]
for name in sys.argv[1:]:
    with open(name, "r+b") as file:  # in place, as a shell's > does
        file.truncate(int(len(file.read()) * 0.3))
        file.write(bytes(100))
assert [float(array.sum()) for array in content.trainable.values()] == sums
assert [float(p.data.sum()) for _, p in state.parameters] == sums
CheckpointState.save_checkpoint(state, sys.argv[1])
again = CheckpointState.load_checkpoint(sys.argv[1])
assert [float(p.data.sum()) for _, p in again.parameters] == sums
"""


@pytest.mark.parametrize("external", [False, True])
def test_a_file_that_shrinks_while_it_is_in_use(tmp_path, external) -> None:
    """Memory that is mapped would be gone, and the process with it (SIGBUS)."""
    tensors = {f"w{i}": np.arange(2**20, dtype=np.float64) + i for i in range(3)}
    path = tmp_path / "c"
    write_checkpoint(path, CheckpointContent(trainable=tensors, has_external_data=external))
    files = [str(path), f"{path}.data"][: 1 + external]
    result = subprocess.run(
        [sys.executable, "-c", TRUNCATE, *files], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr[-1000:]
