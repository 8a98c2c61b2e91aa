"""Builds the wheels of onnxtrain-native for Linux, x86-64 and aarch64, into a folder.

    make native-wheel

The other architecture than this machine's is cross-compiled by Debian's compiler for it. The
platform in the name of a wheel is the oldest C library that has all symbols which the shared
library uses, as objdump lists them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
MACHINES = ("x86_64", "aarch64")
MOST_BYTES = 3_000_000
# What each Linux with onnxruntime has.
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|gcc_s|pthread|dl)\.so|ld-linux")


def main(target: str, *machines: str) -> None:
    """Build the wheels of some machines, or of all."""
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    for machine in machines or MACHINES:
        wheel = build(machine, folder)
        size = wheel.stat().st_size
        print(f"{wheel}: {size / 1e6:.2f} MB")
        if size > MOST_BYTES:
            sys.exit(f"{wheel} has more than {MOST_BYTES / 1e6:.0f} MB")


def build(machine: str, folder: Path) -> Path:
    """Build a wheel and give it the name of its platform."""
    tools = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    environment = os.environ | {"_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    settings = []
    if tools:
        compiler = f"{tools}g++"
        if shutil.which(compiler) is None:
            sys.exit(f"there is no {compiler}: apt-get install g++-{machine}-linux-gnu")
        settings = [
            f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_SYSTEM_NAME=Linux",
            f"-DCMAKE_SYSTEM_PROCESSOR={machine}",
        ]  # fmt: skip
    with tempfile.TemporaryDirectory() as drafts:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", drafts]
        command += [f"-Ccmake.args={';'.join(settings)}"] if settings else []
        subprocess.run([*command, str(HERE)], check=True, env=environment, stdout=sys.stderr)
        (draft,) = Path(drafts).glob("*.whl")
        major, minor = oldest_libc(draft, f"{tools}objdump")
        tag = f"manylinux_{major}_{minor}_{machine}"
        subprocess.run(
            [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(draft)],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        (made,) = Path(drafts).glob("*.whl")
        for old in folder.glob(f"onnxtrain_native-*_{machine}.whl"):
            old.unlink()
        return Path(shutil.copy(made, folder))


def oldest_libc(wheel: Path, objdump: str) -> tuple[int, int]:
    """Return the version of glibc that the library in a wheel needs."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        library = archive.extract(name, folder)
        shown = subprocess.run(
            [objdump, "-p", "-T", library], check=True, capture_output=True, text=True
        ).stdout
    others = [n for n in re.findall(r"NEEDED\s+(\S+)", shown) if not SYSTEM_LIBRARIES.match(n)]
    if others:
        sys.exit(f"{wheel.name} needs {', '.join(others)}, which not every system has")
    versions = re.findall(r"\(?GLIBC_(\d+)\.(\d+)", shown)
    return max((int(major), int(minor)) for major, minor in versions)


if __name__ == "__main__":
    main(*sys.argv[1:])
