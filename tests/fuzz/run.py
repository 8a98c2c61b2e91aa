"""Feeds hostile files to every reader, and says which of them broke one.

    python tests/fuzz/run.py [--minutes 5 | --files 10000] [--seed 0] [--guided] [reader ...]

Readers run in processes of their own. For each file they must answer within 5 seconds, read it or
raise one of our errors, and take no more memory than twice the file and a fixed amount. What breaks
one is kept in `.fuzz/failures`; move it to `tests/fuzz/corpus/<reader>` when the reader is mended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from mutations import mutated  # noqa: E402
from readers import PROGRAMS, READERS, kept, run_saved  # noqa: E402

FAILURES = ROOT / ".fuzz" / "failures"
SECONDS = 5.0  # for a file; the first one waits for imports
STARTING = 120.0
MOST = 3 << 30  # bytes of memory, beyond which a program is ended at once


class Broken(Exception):
    """A reader crashed, hung, or took too much memory."""


class Program:
    """The process that reads, in one of the languages, and what it takes."""

    def __init__(self, language: str) -> None:
        self._run = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._run.write(run_saved())
        self._run.flush()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            PROGRAMS[language],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env={**os.environ, "ONNXTRAIN_FUZZ_RUN": self._run.name},
        )
        self._buffer = b""
        self._warm: set[str] = set()
        self._proc = Path(f"/proc/{self._process.pid}")

    def warm_up(self, name: str, path: Path) -> None:
        """Let a reader load what it loads once, which is not the doing of a hostile file."""
        if name not in self._warm:
            for data in 2 * READERS[name].seeds():
                path.write_bytes(data)
                answer = self.read(name, path, STARTING, measure=False)
                assert answer["outcome"] == "read", f"{name}: a good file: {answer}"
            self._warm.add(name)

    def read(
        self, name: str, path: Path, seconds: float = SECONDS, measure: bool = True
    ) -> dict[str, str]:
        """Let a reader read a file, and return its answer."""
        assert self._process.stdin is not None
        before = self._memory("VmRSS") if measure else 0
        if before:
            (self._proc / "clear_refs").write_text("5")  # the peak counts from here
        try:
            self._process.stdin.write(f"{name}\t{path}\n".encode())
            answer = self._answer(seconds)
        except BrokenPipeError:
            raise Broken(f"it ended: {self._last_words()}") from None
        taken = self._memory("VmHWM") - before if before else 0
        most = 2 * path.stat().st_size + READERS[name].room
        if taken > most:
            raise Broken(f"it took {taken >> 20} MB for a file of {path.stat().st_size} bytes")
        return answer

    def _answer(self, seconds: float) -> dict[str, str]:
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], 0.05)
            if ready:
                part = self._process.stdout.read(1 << 16)
                if not part:
                    code = self._process.wait()
                    raise Broken(f"it ended with {code}: {self._last_words()}")
                self._buffer += part
            elif time.monotonic() > end:
                raise Broken(f"it did not answer within {seconds:g} s")
            elif self._memory("VmRSS") > MOST:
                raise Broken(f"it took more than {MOST >> 30} GB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, str] = json.loads(line)
        return found

    def _memory(self, what: str) -> int:
        """Return the memory of the process in bytes; 0 where the system does not tell."""
        try:
            lines = (self._proc / "status").read_text().splitlines()
        except OSError:
            return 0
        return next((1024 * int(x.split()[1]) for x in lines if x.startswith(f"{what}:")), 0)

    def _last_words(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-2000:].decode("utf-8", "replace")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr, self._run):
            if stream is not None:
                stream.close()


@dataclass
class Result:
    """What came of the files of a reader; `failures` by where it broke, with one file for each."""

    files: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    slowest: float = 0.0

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        return f"{self.files} files: {counts}; the slowest took {1000 * self.slowest:.0f} ms"


class Programs:
    """The programs that run, by language; a broken one is started again."""

    def __init__(self) -> None:
        self._running: dict[str, Program] = {}

    def read(self, name: str, path: Path, data: bytes) -> dict[str, str]:
        """Let a reader read, in the program of its language."""
        language = READERS[name].language
        if language not in self._running:
            self._running[language] = Program(language)
        program = self._running[language]
        program.warm_up(name, path)
        path.write_bytes(data)
        try:
            return program.read(name, path)
        except Broken as broken:
            self._running.pop(language).close()
            return {"outcome": "broken", "error": str(broken)}

    def close(self) -> None:
        """End all."""
        for program in self._running.values():
            program.close()


def fuzz(
    name: str, programs: Programs, *, seed: int, files: int | None = None, seconds: float = 1e9
) -> Result:
    """Feed a reader: the corpus first, then mutations, so many or so long."""
    reader, result = READERS[name], Result()
    good, corpus = reader.seeds(), kept(name)
    chooser = random.Random(f"{name} {seed}")
    end = math.inf  # until the program has started
    with tempfile.TemporaryDirectory(prefix="onnxtrain-fuzz-") as folder:
        path = Path(folder, "hostile")
        while result.files < (files or 10**12) and time.monotonic() < end:
            if result.files < len(corpus):
                data = corpus[result.files]
            else:
                data = mutated(reader.kind, chooser, chooser.choice(good + corpus), good)
                data = reader.repair(data) if chooser.random() < 0.8 else data
            began = time.monotonic()
            answer = programs.read(name, path, data)
            if end == math.inf:
                end = time.monotonic() + seconds
            else:
                result.slowest = max(result.slowest, time.monotonic() - began)
            result.files += 1
            result.outcomes[answer["outcome"]] += 1
            if "error" in answer:
                result.failures.setdefault(where(answer["error"]), (data, answer["error"]))
    return result


def where(error: str) -> str:
    """Return what two failures of the same cause have in common: the place, and the last line."""
    lines = [line.strip() for line in error.strip().splitlines()]
    places = [line for line in lines if line.startswith(("File ", "at "))]
    kind = lines[-1].partition(":")[0] if places and places[-1].startswith("File") else lines[0]
    return f"{places[-1] if places else ''} {kind}"


def _report(name: str, result: Result) -> None:
    for where, (data, error) in result.failures.items():
        folder = FAILURES / name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / hashlib.sha1(data).hexdigest()[:12]
        file.write_bytes(data)
        file.with_suffix(".txt").write_text(error)
        print(f"  FAILED {where}\n         {file}", flush=True)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("readers", nargs="*", metavar="reader", help="; ".join(READERS))
    parser.add_argument("--minutes", type=float, default=5.0, help="for all readers together")
    parser.add_argument("--files", type=int, help="for each reader, whatever time that takes")
    parser.add_argument("--seed", type=int, help="by default another one each time")
    parser.add_argument("--guided", action="store_true", help="also guided by coverage (atheris)")
    options = parser.parse_args()
    names = options.readers or list(READERS)
    unknown = [name for name in names if name not in READERS]
    if unknown:
        parser.error(f"there is no reader {unknown[0]!r}: there are {', '.join(READERS)}")
    if shutil.which("node") is None or not (ROOT / "js/dist/index.js").exists():
        left_out = [name for name in names if READERS[name].language == "javascript"]
        names = [name for name in names if name not in left_out]
        if left_out:
            print(f"NOT RUN, without Node and js/dist: {', '.join(left_out)}", flush=True)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    guided = [name for name in names if READERS[name].make] if options.guided else []
    seconds = 60 * options.minutes / (len(names) + len(guided))
    print(f"seed {seed}", flush=True)
    failed, programs = False, Programs()
    for name in names:
        limit = 1e9 if options.files else seconds
        result = fuzz(name, programs, seed=seed, files=options.files, seconds=limit)
        print(f"{name:18} {result}", flush=True)
        _report(name, result)
        failed |= bool(result.failures)
    programs.close()
    for name in guided:
        from guided import explore

        failed |= explore(name, seconds, FAILURES / name)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
