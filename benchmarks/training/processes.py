"""The processes that train, seen from the one that measures."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cores import Cores
from plan import THREADS, Peer, Setting, Workload, folder_of, write_workload

HERE = Path(__file__).parent
# Compiling may take minutes; a step never does.
_START_LIMIT, _BURST_LIMIT = 1200.0, 600.0
_PEAK = (
    "print([int(line.split()[1]) * 1024 for line in open('/proc/self/status')"
    " if line.startswith('VmHWM:')][0])"
)


class PeerFailed(Exception):
    """A peer cannot run a workload; the text is its own message."""


@dataclass(frozen=True)
class Site:
    """Where things are: the folder of the workloads, the interpreter of each environment, cores."""

    root: Path
    interpreters: Mapping[str, str]
    cores: Cores

    def environment(self, setting: Setting) -> dict[str, str]:
        """The environment of a process that trains."""
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self.root / "torch-compiled")}
        return {**os.environ, "OMP_NUM_THREADS": str(THREADS), **caches, **setting.environment}


class Child:
    """A process that trains one workload with one peer; it rests unless it is asked for steps."""

    def __init__(self, site: Site, peer: Peer, setting: Setting, workload: Workload) -> None:
        self.peer, self.setting, self.workload = peer, setting, workload
        given = {
            "workload": write_workload(workload),
            "peer": peer.module,
            "folder": str(folder_of(site.root, workload)),
            "options": dict(setting.options),
            "threads": THREADS,
        }
        log = site.root / "logs" / f"{workload.name}-{peer.name}-{setting.name}.txt"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as errors:
            command = [site.interpreters[peer.place], str(HERE / "child.py"), json.dumps(given)]
            environment = site.environment(setting)
            self.started = time.monotonic_ns()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )
        try:
            first = self._receive(_START_LIMIT)
        except PeerFailed:
            self.close()
            raise
        self.losses: list[float] = [first["loss"]]
        self.start_seconds = (first["first_step_end"] - self.started) / 1e9
        self.peak = 0
        self.failure = ""

    def burst(self, seconds: float, least: int, most: int = 1_000_000) -> list[float]:
        """Let it take steps for a while; return the milliseconds of each, then wait for silence."""
        asked = {"seconds": seconds, "least": least, "most": most}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it has ended is seen below
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        answer = self._receive(_BURST_LIMIT)
        self.losses += answer["losses"]
        self.peak = answer["peak"]
        self._wait_for_silence()
        return [ns / 1e6 for ns in answer["times"]]

    def _receive(self, limit: float) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(limit):
                self.close()
                raise PeerFailed(f"no answer within {limit:.0f} seconds")
        line = stream.readline()
        if not line:
            raise PeerFailed(_how_it_ended(self._process.wait()))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def _wait_for_silence(self) -> None:
        """Wait until its threads sleep: after a run they go on looking for work for a while.

        So nobody's settings have to be changed for the sake of the next one.
        """
        end = time.monotonic() + 1.0
        before = _busy_ns(self._process.pid)
        while time.monotonic() < end:
            time.sleep(0.005)
            now = _busy_ns(self._process.pid)
            if now - before < 200_000:
                return
            before = now

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _busy_ns(pid: int) -> int:
    """The time that the threads of a process have run; 0 where the system does not tell."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/schedstat") as stat:
                total += int(stat.read().split()[0])
    return total


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with code {code}"


def borrow_memory(size: int = 1 << 30) -> None:
    """Use memory and give it back, so that the next process finds some that the host has lent.

    The host of a virtual machine takes free memory back after seconds. To get it again costs many
    times what the system itself needs for a page, and nothing tells whom it will hit.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size, flags) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):  # some processes ask for large pages, others do not
            memory.madvise(mmap.MADV_HUGEPAGE)
        for place in range(0, size, mmap.PAGESIZE):
            memory[place] = 1


def bare_peak(interpreter: str) -> int:
    """The memory of the interpreter alone."""
    run = subprocess.run([interpreter, "-c", _PEAK], capture_output=True, text=True, check=True)
    return int(run.stdout)
