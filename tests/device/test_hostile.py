"""Broken and hostile checkpoints end in an error, before anything is trained or written."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import CHECKSUM_SIZE, without_checksum
from small_runs import open_session, samples

HERE = Path(__file__).resolve().parent
HOSTILE = HERE.parent / "golden" / "hostile"
sys.path.insert(0, str(HOSTILE))

import make_checkpoints  # noqa: E402


def outcomes(paths):
    """What comes of training from each of some checkpoints: an error, or None."""
    result = subprocess.run(
        [sys.executable, str(HERE / "hostile_program.py"), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, (
        f"{paths[len(lines)]} brought the process down: {result.stderr[-2000:]}"
    )
    return [json.loads(line) for line in lines]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


STRUCTURE = 1800  # bytes in front of the elements
MESSAGES = {
    "empty": "ends after 0 bytes",
    "identifier": "identifier",
    "version_3": "version is 3; versions (1, 2) can be read",
    "data_past_the_end": "bytes of external data are needed",
    "data_missing": "does not exist",
    "data_elsewhere": "does not exist",
    "another_name": "'fc1.weight', and the checkpoint does not",
    "a_name_more": "'fc3.weight' as a parameter that trains",
    "a_name_less": "'fc2.bias', and the checkpoint does not",
    "frozen_instead": "'fc1.weight', which the checkpoint has as frozen",
    "transposed": "'fc1.weight' is float [16, 8] in",
    "float64": "double [16, 8] in the checkpoint",
    "one_moment": "saved with another optimizer",
    "moments_transposed": "another shape or type than the parameter",
    "moments_of_others": "none for the parameter 'fc1.bias'",
    "steps_negative": "the step is -1",
    "rate_nan": "damaged record",
    "random_negative": "damaged record",
}


def test_hostile_checkpoints(tmp_path) -> None:
    shutil.copytree(HOSTILE / "checkpoints", tmp_path / "c")
    before = files_in(tmp_path / "c")
    names = list(make_checkpoints.CASES)
    for name, outcome in zip(names, outcomes([tmp_path / "c" / n for n in names]), strict=True):
        assert outcome is not None, f"{name} was trained from"
        assert outcome[0] in ("CheckpointError", "CheckpointDataError", "ModelError"), name
        assert MESSAGES.get(name, "") in outcome[1], name
    assert files_in(tmp_path / "c") == before
    assert not (tmp_path / "stolen").exists()


def test_the_hostile_checkpoints_are_those_that_the_script_writes(tmp_path) -> None:
    make_checkpoints.write(tmp_path / "c")
    assert files_in(tmp_path / "c") == files_in(HOSTILE / "checkpoints")


@pytest.fixture(scope="module")
def saved():
    """A checkpoint after three steps."""
    session = open_session()
    for _ in range(3):
        session.step(*samples(8))
    return session.state.to_bytes(include_optimizer_state=True)


def test_truncated_checkpoints(saved, tmp_path) -> None:
    """At every kilobyte here; `test_checkpoint_golden` has every byte."""
    paths = []
    for length in [*range(0, len(saved), 1024), len(saved) - CHECKSUM_SIZE - 1]:
        paths.append(tmp_path / str(length))
        paths[-1].write_bytes(saved[:length])
    before = files_in(tmp_path)
    assert all(outcome is not None for outcome in outcomes(paths))
    assert files_in(tmp_path) == before


def test_flipped_bits(saved, tmp_path) -> None:
    chooser = random.Random(0)
    paths = []
    for bit in chooser.sample(range(8 * len(saved)), 100):
        damaged = bytearray(saved)
        damaged[bit // 8] ^= 1 << bit % 8
        paths.append(tmp_path / str(bit))
        paths[-1].write_bytes(damaged)
    before = files_in(tmp_path)
    assert all(outcome is not None for outcome in outcomes(paths))
    assert files_in(tmp_path) == before


@pytest.mark.slow
def test_flipped_bits_where_there_is_no_checksum(saved, tmp_path) -> None:
    """Such as in a file of ONNX Runtime: an error, or other numbers; never a crash."""
    chooser = random.Random(1)
    content = without_checksum(saved)
    paths = []
    for _ in range(60):
        damaged = bytearray(content)
        for at in chooser.sample(
            range(1800), 2
        ):  # in front of the elements is all that has structure
            damaged[at] ^= 1 << chooser.randrange(8)
        paths.append(tmp_path / str(len(paths)))
        paths[-1].write_bytes(damaged)
    found = outcomes(paths)
    assert sum(outcome is not None for outcome in found) > 20


def test_a_checkpoint_that_is_replaced_by_a_broken_one_while_training(saved, tmp_path) -> None:
    """What was loaded stays; saving puts the file in order."""
    path = tmp_path / "c"
    path.write_bytes(saved)
    session = open_session(checkpoint=path)
    path.unlink()
    path.write_bytes(saved[: len(saved) // 2])
    session.step(*samples(8))
    session.save_checkpoint(path)
    assert open_session(checkpoint=path).optimizer.step_count == 4
