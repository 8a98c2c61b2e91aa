"""Builds the native library once for all workers, and lets the tests of this folder use it.

The build writes each call of a kernel to build/native-cases, for `make native-sanitize` and
`make native-aarch64`, which call the kernels again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ROOT / "build" / "native-cases"
VARIABLE = "ONNXTRAIN_NATIVE"


@pytest.fixture(scope="session")
def built() -> Path | None:
    """The library: the one that the variable names, or a new build of the checkout."""
    given = os.environ.get(VARIABLE, "")
    if given not in ("", "0", "1"):
        return Path(given)
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        assert not os.environ.get("LOCKED"), "the native library needs cmake and a C++ compiler"
        return None
    folder = ROOT / "build" / "native-record"
    folder.parent.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker builds, the others wait
        library = folder / "libonnxtrain_native.so"
        build(folder)
        forget_cases_of_others(library)
    return library


def forget_cases_of_others(library: Path) -> None:
    """Remove calls that another build of the library has recorded."""
    stamp, now = CASES / "library", str(library.stat().st_mtime_ns)
    if not stamp.exists() or stamp.read_text() != now:
        shutil.rmtree(CASES, ignore_errors=True)
        CASES.mkdir(parents=True)
        stamp.write_text(now)


def build(folder: Path) -> None:
    jobs = str(os.cpu_count() or 1)
    configure = ["-S", str(ROOT / "native"), "-B", str(folder), "-DONNXTRAIN_RECORD=ON"]
    targets = ["onnxtrain_native", "replay", "onnxtrain"]
    for command in (configure, ["--build", str(folder), "-j", jobs, "--target", *targets]):
        made = subprocess.run(["cmake", *command], capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr


@pytest.fixture(autouse=True)
def native_library(built: Path | None, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    """Where there is no compiler, tests that need the library skip themselves."""
    if built is not None:
        monkeypatch.setenv(VARIABLE, str(built))
        monkeypatch.setenv("ONNXTRAIN_RECORD", str(CASES))
    return built
