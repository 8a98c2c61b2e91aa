"""A SuperLink and three SuperNodes, as separate processes on this machine; one is killed.

python examples/federated/deploy.py
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from runtime import Flower, flower

NODES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="a folder for logs, states and models")
    given = parser.parse_args()
    if given.home is not None:
        deploy(given.home)
    else:
        with tempfile.TemporaryDirectory() as folder:
            deploy(Path(folder))


def deploy(home: Path, rounds: int = 4, kill_in: int = 2) -> str:
    """Run the app and kill a device in the middle of a round; return the server's log."""
    home = home.absolute()
    with flower(home / "flower") as here:
        here.superlink()
        nodes = [start_node(here, home, number) for number in range(NODES)]
        config = (
            f"num-server-rounds={rounds} model='{home / 'server.onnx'}' state='{home / 'state'}'"
        )
        run = here.run(HERE / "deployment", "--run-config", config, wait=False)
        assert isinstance(run, subprocess.Popen)
        wait_for(here, run, rf"\[ROUND {kill_in}/")
        print(f"round {kill_in} has begun: device 2 is killed", flush=True)
        os.killpg(nodes[2].pid, signal.SIGKILL)
        wait_for(here, run, rf"accuracy after round {rounds}: .*\n")
        log = here.log("run")
    for line in log.splitlines():
        if re.search(r"left out|clients$|accuracy after", line):
            print(line)
    return log


def start_node(here: Flower, home: Path, number: int) -> subprocess.Popen[bytes]:
    """Start a device, with a folder of its own for what stays on it."""
    folder = home / f"device-{number}"
    return here.supernode(
        f"device-{number}",
        f"partition-id={number} num-partitions={NODES} state-dir='{folder}'",
    )


def wait_for(
    here: Flower, run: subprocess.Popen[bytes], pattern: str, seconds: float = 900
) -> None:
    """Wait until the server's log has a line."""
    end = time.monotonic() + seconds
    while True:
        ended = run.poll() is not None  # before the log is read, which is complete then
        if re.search(pattern, here.log("run")):
            return
        if ended or time.monotonic() > end:
            logs = {file.name: file.read_text(errors="replace")[-3000:]
                    for file in here.home.glob("*.log")}  # fmt: skip
            raise RuntimeError(f"{pattern!r} did not come: {logs}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
