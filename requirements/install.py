"""Installs locked packages, each file checked against its hash, into a virtual environment.

    python requirements/install.py .venv dev torch -- torch==2.13.0 .[dev]

Names before the dashes are lock files. If they cannot be installed (another Python, or another
build of torch), what follows the dashes is installed without them, with a message; LOCKED=1 makes
that an error, as in CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent


def main(folder: str, *arguments: str) -> int:
    """Make the environment and install into it."""
    split = arguments.index("--")
    locks, newest = arguments[:split], arguments[split + 1 :]
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    python = str(Path(folder, "Scripts" if os.name == "nt" else "bin", "python"))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # A lock names all that its packages need. Some versions of pip do not see that an extra of a
    # locked package is locked with it, and want its newest release: pip is not asked for more.
    locked = [*install, "--no-deps", "--require-hashes"]
    for lock in locks:
        done = subprocess.run([*locked, "-r", str(HERE / f"{lock}.txt")])
        if done.returncode:
            print(
                f"requirements/{lock}.txt cannot be installed here: another Python or system than "
                "it was made for, or a file that is not the one that was locked.",
                file=sys.stderr,
            )
            if os.environ.get("LOCKED"):
                return 1
            print("Installing the newest packages instead, without hashes.", file=sys.stderr)
            return subprocess.run([*install, *newest]).returncode
    return subprocess.run([python, "-m", "pip", "check", "--disable-pip-version-check"]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
