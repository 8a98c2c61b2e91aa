"""A short run of the fuzzer with fixed seeds: the corpus, and some mutations of it.

`make fuzz` runs it for minutes or hours, also guided by coverage. JavaScript's readers have their
short run in `js/test/fuzz.test.js`.
"""

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import mutations
import readers
from run import Programs, fuzz, where

NAMES = [name for name, reader in readers.READERS.items() if reader.language == "python"]
# The slow ones read a file in a twentieth of a second.
FILES = {"model": 15, "records": 25, "show": 25, "graphs": 40}


@pytest.fixture(scope="module")
def programs():
    """One process that reads for all tests here."""
    running = Programs()
    yield running
    running.close()


@pytest.mark.parametrize("name", NAMES)
def test_hostile_files_are_read_or_refused(name, programs) -> None:
    count = len(readers.kept(name)) + FILES.get(name, 80)
    result = fuzz(name, programs, seed=0, files=count)
    assert not result.failures, "\n".join(error for _, error in result.failures.values())
    assert result.outcomes["refused"] > result.files // 10


def test_a_reader_that_fails_is_noticed(monkeypatch, tmp_path) -> None:
    """A test of the test: errors that are not ours, in the process and in what it reports."""

    def read(path):
        raise KeyError(path.name)

    found = readers.outcome(read, tmp_path / "x")
    assert found["outcome"] == "foreign" and "KeyError" in found["error"]
    assert "in read KeyError" in where(found["error"])


BROKEN = {
    "ends": "import os; input(); os._exit(3)",
    "hangs": "import time; input(); time.sleep(60)",
    "takes too much": "input(); x = bytearray(300 << 20); x[::4096] = x[::4096]; print('{}')",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_program_that_breaks_is_noticed(how, monkeypatch, tmp_path) -> None:
    import run

    if how == "takes too much" and not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not tell what a process takes")
    monkeypatch.setitem(run.PROGRAMS, "python", [sys.executable, "-c", BROKEN[how]])
    monkeypatch.setattr(run, "SECONDS", 0.5)
    (tmp_path / "x").write_bytes(b"data")
    program = run.Program("python")
    try:
        with pytest.raises(run.Broken):
            program.read("checkpoint", tmp_path / "x", 5.0 if how != "hangs" else 0.5)
    finally:
        program.close()


@pytest.mark.parametrize("kind", ["bytes", *mutations.STRUCTURED])
def test_mutations_are_the_same_for_the_same_seed(kind) -> None:
    good = [json.dumps({"a": [1, {"b": "c"}], "d": 2.5}).encode() * 3, b"\x08\x01\x12\x02ab" * 9]
    made = [
        [mutations.mutated(kind, random.Random(seed), good[seed % 2], good) for seed in range(300)]
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert len(set(made[0])) > 100


def test_the_corpus_is_small() -> None:
    files = [path for path in readers.CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert {path.parent.name for path in files} <= set(readers.READERS)
