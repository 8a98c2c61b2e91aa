"""A reader explored by its own code: atheris keeps files that reach new branches, and changes them.

    python tests/fuzz/guided.py <reader> <folder for failures> <seconds>

`run.py --guided` starts it for each reader of Python. It needs the package atheris, which has
wheels for a few versions of Python on Linux and macOS.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE)]


def explore(name: str, seconds: float, failures: Path) -> bool:
    """Explore a reader in a process of its own; return whether it failed."""
    if importlib.util.find_spec("atheris") is None:
        print(f"{name:18} NOT GUIDED BY COVERAGE: there is no atheris for this Python", flush=True)
        return False
    failures.mkdir(parents=True, exist_ok=True)
    before = set(failures.iterdir())
    command = [sys.executable, __file__, name, str(failures), str(max(1, int(seconds)))]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    lines = [line for line in done.stderr.splitlines() if line.startswith(("stat::", "Done "))]
    found = sorted(set(failures.iterdir()) - before)
    if done.returncode and not found:
        (failures / "guided.txt").write_text(done.stderr[-8000:])
        found = [failures / "guided.txt"]
    print(f"{name:18} guided: {lines[0] if lines else done.stderr[-300:]}", flush=True)
    for file in found:
        print(f"  FAILED {file}", flush=True)
    return bool(found)


def main() -> None:
    """Explore until the time is over; failures are written to files, one for each place."""
    import atheris

    name, failures, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    with atheris.instrument_imports(include=["onnxtrain"]):
        from mutations import mutated
        from readers import READERS, kept, outcome
        from run import where

        # Readers import more when they first read.
        reader = READERS[name]
        assert reader.make is not None
        read, good = reader.make(), reader.seeds()
        seed_file = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"), "seed")
        seed_file.write_bytes(good[0])
        outcome(read, seed_file)
    folder = Path(tempfile.mkdtemp(prefix="onnxtrain-fuzz-"))
    path, corpus = folder / "hostile", folder / "corpus"
    corpus.mkdir()
    for index, data in enumerate(good + kept(name)):
        (corpus / str(index)).write_bytes(data)
    seen: set[str] = set()

    def change(data: bytes, most: int, seed: int) -> bytes:
        chooser = random.Random(seed)
        if chooser.random() < 0.3:
            changed = atheris.Mutate(data, most)
        else:
            changed = mutated(reader.kind, chooser, data, good)
        return reader.repair(changed)[:most]

    def try_one(data: bytes) -> None:
        path.write_bytes(data)
        answer = outcome(read, path)
        if "error" in answer and where(answer["error"]) not in seen:
            seen.add(where(answer["error"]))
            file = failures / hashlib.sha1(data).hexdigest()[:12]
            file.write_bytes(data)
            file.with_suffix(".txt").write_text(answer["error"])

    options = [
        f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=3000", "-max_len=65536",
        "-print_final_stats=1", f"-artifact_prefix={failures}/",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], try_one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
