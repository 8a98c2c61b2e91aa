"""Damaged files and messages: each reader of a federation takes them, or raises an error of ours.

ONNXTRAIN_FUZZ_FILES=10000 for more of them; `make fuzz` runs the same readers in processes.
"""

import os
import sys
import time
import tracemalloc
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")
sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

from federated_readers import FEDERATED
from mutations import mutated

from onnxtrain.errors import OnnxTrainError

FILES = int(os.environ.get("ONNXTRAIN_FUZZ_FILES", "80"))


@pytest.mark.parametrize("name", FEDERATED)
@pytest.mark.filterwarnings("ignore")
def test_mutated_files_give_errors_of_ours_in_little_time_and_memory(name, tmp_path) -> None:
    reader, path = FEDERATED[name], tmp_path / "file"
    read, seeds = reader.make(), reader.seeds()
    for seed in seeds:
        path.write_bytes(seed)
        read(path)  # as they are, they are good
    refused = 0
    for number in range(FILES):
        chooser = Random(f"{name} {number}")
        data = mutated(reader.kind, chooser, chooser.choice(seeds), seeds)
        path.write_bytes(data)
        began = time.monotonic()
        tracemalloc.start()
        try:
            read(path)
        except OnnxTrainError:
            refused += 1
        except BaseException as error:
            (tmp_path / "broken").write_bytes(data)
            raise AssertionError(f"file {number} of {name}: {error!r}") from error
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert time.monotonic() - began < 5
        assert peak < 2 * len(data) + (64 << 20)
    # A damaged history costs metrics alone, and a warning.
    assert refused > FILES / 10 or name == "federation_history"


@pytest.mark.parametrize("name", ["federation", "client_state", "initial_values"])
def test_no_bit_of_an_archive_can_flip_unnoticed(name, tmp_path) -> None:
    """Every byte of the arrays is under a checksum: a flip is refused, or changes nothing."""
    from onnxtrain.federated.files import unpack_arrays

    seed = FEDERATED[name].seeds()[0]
    good = unpack_arrays(seed, "the file")
    chooser = Random(0)
    for _ in range(300):
        data = bytearray(seed)
        data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        try:
            found = unpack_arrays(bytes(data), "the file")
        except OnnxTrainError:
            continue
        assert found.keys() == good.keys()
        assert all(found[key].tobytes() == good[key].tobytes() for key in good)
