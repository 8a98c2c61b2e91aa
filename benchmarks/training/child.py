"""The process that trains: one workload with one peer, a burst of steps whenever it is asked.

Started by `measure.py` with one argument, JSON. It sends a line when its first step is done, and
one for each line that it is sent. What libraries print does not get into the way: the channel is
a descriptor of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time


def main() -> None:
    given = json.loads(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message) -> None:
        channel.write(json.dumps(message) + "\n")

    try:
        _serve(given, send)
    except Exception as error:  # whatever a peer fails with is a result of the benchmark
        import traceback

        traceback.print_exc()
        send(error=f"{type(error).__name__}: {error}")


def _serve(given, send) -> None:
    import data
    from plan import read_workload

    workload = read_workload(given["workload"])
    feed = data.endless(workload)
    peer = importlib.import_module(f"peers.{given['peer']}")
    step = peer.open_step(workload, given["folder"], given["options"], given["threads"])
    losses = [step(*next(feed))]
    send(first_step_end=time.monotonic_ns(), loss=losses[0])
    for line in sys.stdin:
        asked = json.loads(line)
        times, losses = _burst(step, feed, asked["seconds"], asked["least"], asked["most"])
        send(times=times, losses=losses, peak=peak_bytes())


def _burst(step, feed, seconds: float, least: int, most: int) -> tuple[list[int], list[float]]:
    """Take steps for some time; return the nanoseconds that each took, and the losses."""
    times, losses = [], []
    end = time.perf_counter_ns() + int(seconds * 1e9)
    while len(times) < most and (len(times) < least or time.perf_counter_ns() < end):
        x, labels = next(feed)
        start = time.perf_counter_ns()
        loss = step(x, labels)
        times.append(time.perf_counter_ns() - start)
        losses.append(loss)
    return times, losses


def peak_bytes() -> int:
    """The most memory that this process has had at any time."""
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
