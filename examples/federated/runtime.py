"""Starts Flower's own programs on this machine, for the examples and the tests.

Everything is in a folder of its own (FLWR_HOME) and on ports that are free, so that it gets in
nobody's way; what was started is stopped in the end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent


class Flower:
    """Flower's programs, with a home and a SuperLink of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.home.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._running: list[subprocess.Popen[bytes]] = []
        (self.home / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every program: nothing is reported, asked or installed."""
        return {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # A machine that is busy takes longer to start Ray than Ray would wait.
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_worker_register_timeout_seconds": "300",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONWARNINGS": "ignore",
        }

    def superlink(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a SuperLink, and wait until it answers."""
        process = self.start(
            "superlink", "flower-superlink", "--insecure", "--host", "127.0.0.1",
            "--port", str(self.port), *options,
        )  # fmt: skip
        self._wait_until_healthy(process)
        return process

    def supernode(self, name: str, config: str) -> subprocess.Popen[bytes]:
        """Start a SuperNode that works for the SuperLink."""
        return self.start(
            name, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
            "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def run(self, app: Path, *options: str, wait: bool = True) -> str | subprocess.Popen[bytes]:
        """Run an app: return what it logged, or the process that follows it."""
        command = ["flwr", "run", str(app), "--stream", *options]
        if not wait:
            return self.start("run", *command)
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"flwr run failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def start(self, name: str, program: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a program; what it says goes to a file of its name."""
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / program), *options], env=self.environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def log(self, name: str) -> str:
        """What a program has said so far."""
        return (self.home / f"{name}.log").read_text(errors="replace")

    def _wait_until_healthy(self, process: subprocess.Popen[bytes], seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            time.sleep(0.2)
        raise RuntimeError(f"the SuperLink did not start:\n{self.log('superlink')}")

    def stop(self) -> None:
        """Stop all that was started, with all that it started."""
        for process in reversed(self._running):
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program and its children: politely, then not."""
    import signal

    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    process.wait()


@contextlib.contextmanager
def flower(home: Path) -> Iterator[Flower]:
    """Flower's programs for the time being."""
    made = Flower(home)
    try:
        yield made
    finally:
        made.stop()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_options(settings: Sequence[tuple[str, object]]) -> str:
    """Return settings as `flwr run --run-config` takes them."""
    return " ".join(
        f"{key}='{value}'" if isinstance(value, str) else f"{key}={value}"
        for key, value in settings
    )
