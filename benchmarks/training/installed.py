"""What an environment takes on the disk and in the system's cache, and which versions are in it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

# What every environment begins with.
_TOOLS = ("pip", "setuptools", "_distutils_hack", "distutils-precedence", "pkg_resources", "wheel")
_ASK = """
import importlib.metadata as m, json, sys, sysconfig
names = ("onnxtrain", "onnxtrain-native", "onnxruntime", "onnxruntime-training-cpu", "torch",
         "onnxsim", "onnx", "numpy")
found = {d.metadata["Name"]: d.version for d in m.distributions()}
print(json.dumps([sysconfig.get_path("purelib"), sys.version.split()[0],
                  {n: found[n] for n in names if n in found}]))
"""


def ask(interpreter: str) -> tuple[Path, str]:
    """Return the site-packages of an interpreter, and its versions as text."""
    run = subprocess.run([interpreter, "-c", _ASK], capture_output=True, text=True, check=True)
    folder, python, versions = json.loads(run.stdout)
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Path(folder), f"Python {python}, {listed}"


def size(site_packages: Path, without: tuple[str, ...] = ()) -> int:
    """Add up the files that had to be installed; compiled Python is not among them."""
    total = 0
    for entry in site_packages.iterdir():
        if entry.name == "__pycache__" or entry.name.startswith((*_TOOLS, *without)):
            continue
        files = entry.rglob("*") if entry.is_dir() else [entry]
        total += sum(
            file.stat().st_size
            for file in files
            if file.is_file() and file.suffix != ".pyc" and not file.is_symlink()
        )
    return total


def evict(site_packages: Path) -> None:
    """Drop the files from the system's cache, so that all environments begin alike.

    Files that were written a moment ago lie there in large pieces, and each piece counts as memory
    of a process that reads a part of it: 12 MB more in a process that takes 82.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    os.sync()  # what is not on the disk yet cannot be dropped
    for file in site_packages.rglob("*"):
        if file.is_file() and not file.is_symlink():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
