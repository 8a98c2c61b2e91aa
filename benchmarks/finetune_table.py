"""What the comparisons of fine-tuning share: each way in a process of its own, and one table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

Ways = Mapping[str, tuple[str, float, int]]  # by name: the way, its rate, and its epochs


def in_process(program: str, *arguments: str) -> Any:
    """Run a part of a program on its own; return the JSON that it prints last."""
    done = subprocess.run([sys.executable, program, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{program} {' '.join(arguments)} failed")
    return json.loads(done.stdout.splitlines()[-1])


def print_table(program: str, ways: Ways, is_prepared: Callable[[str], bool]) -> None:
    """Run all ways, and print what each trains, reaches and takes."""
    print("| | trains | epochs | accuracy | peak memory | CPU time |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (way, rate, epochs) in ways.items():
        if is_prepared(way):
            in_process(program, "--prepare", way)
        found = in_process(program, "--way", way, str(rate), str(epochs))
        print(
            f"| {name} | {found['trained']:,} | {epochs} | {100 * found['accuracy']:.1f} % | "
            f"{found['peak']:.0f} MB | {found['seconds']:.0f} s |",
            flush=True,
        )
