"""Faults for a while: system calls that fail, a disk that is full, a clock that jumps."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Faults:
    """What goes wrong in calls under a folder, each with some probability."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder = str(folder)
        self._rng = rng
        self._open = builtins.open

    def some(self) -> str:
        """Return the name of a fault, or of none."""
        return self._rng.choice(["none", "none", *self.kinds])

    @property
    def kinds(self) -> list[str]:
        """Return the names of all faults."""
        return ["full disk", "write", "read", "fsync", "rename", "remove", "clock"]

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Let something fail."""
        with contextlib.ExitStack() as stack:
            if kind == "full disk":
                stack.enter_context(self._full_disk())
            elif kind in ("write", "read"):
                for module in (builtins, io):
                    stack.enter_context(_replaced(module, "open", self._opening(kind)))
            elif kind == "clock":
                jump = self._rng.uniform(-1e9, 1e9)
                original = time.time
                stack.enter_context(_replaced(time, "time", lambda: original() + jump))
            calls = {"fsync": ["fsync"], "rename": ["replace", "rename"], "remove": ["unlink"]}
            for name in calls.get(kind, []):
                stack.enter_context(_replaced(os, name, self._failing(getattr(os, name))))
            yield

    def _strikes(self) -> bool:
        return self._rng.random() < 0.25

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._strikes():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(*arguments, **keywords)

        return call

    def _opening(self, kind: str) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            path = os.fsdecode(file) if isinstance(file, str | bytes | os.PathLike) else ""
            if (
                path.startswith(self._folder)
                and "b" in mode
                and "+" not in mode
                and self._strikes()
            ):
                raw = _FaultyFile(path, mode.replace("b", ""))
                if kind == "write" and mode != "rb":
                    return io.BufferedWriter(raw)
                if kind == "read" and mode == "rb":
                    return io.BufferedReader(raw)
                raw.close()
            return self._open(file, mode, *arguments, **keywords)

        return opened

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        """Fill the disk, if it is a small one; otherwise no file may grow."""
        if os.path.ismount(self._folder):
            filler = Path(self._folder, "filler")
            with contextlib.suppress(OSError), self._open(filler, "wb", buffering=0) as file:
                room = self._rng.choice([0, 512, 4096])
                free = os.statvfs(self._folder).f_bavail * os.statvfs(self._folder).f_frsize
                file.write(bytes(max(0, free - room)))
            try:
                yield
            finally:
                filler.unlink()
            return
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._rng.choice([0, 100, 1000]), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class _FaultyFile(io.FileIO):
    """A file whose second read or write fails."""

    calls = 0

    def _fail(self, reason: int) -> None:
        self.calls += 1
        if self.calls > 1:
            raise OSError(reason, os.strerror(reason))

    def write(self, data: Any) -> int:
        self._fail(errno.ENOSPC if len(data) % 2 else errno.EIO)
        return super().write(memoryview(data)[: max(1, len(data) // 2)])

    def readinto(self, buffer: Any) -> int:
        self._fail(errno.EIO)
        return super().readinto(memoryview(buffer)[: max(1, len(buffer) // 2)])

    def readall(self) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
