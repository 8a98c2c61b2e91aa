"""Builds the program through which the tests call the device half in C++, once for all workers."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from capi_calls import Calls
from upstream_table import Host

from onnxtrain.device.random_state import set_seed

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "device"), str(ROOT / "tests" / "fuzz")]
TARGETS = "device_calls", "onnxtrain", "onnxtrain_static"
VARIABLE = "ONNXTRAIN_DEVICE_BUILD"  # the folder of another build


@pytest.fixture(scope="session")
def built() -> Path:
    """The folder that the variable names, or that of a new build of the checkout."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        assert not os.environ.get("LOCKED"), "the tests of C++ need cmake and a C++ compiler"
        pytest.skip("the device half in C++ is built by cmake and a compiler, which are not here")
    folder = ROOT / "build" / "native-device"
    folder.parent.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker builds, the others wait
        for command in (
            ["-S", str(ROOT / "native"), "-B", str(folder), "-DONNXTRAIN_KERNELS=OFF"],
            ["--build", str(folder), "-j", str(os.cpu_count() or 1), "--target", *TARGETS],
        ):
            made = subprocess.run(["cmake", *command], capture_output=True, text=True)
            assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture
def program(built: Path) -> Path:
    """The program that calls the device half."""
    return built / "device_calls"


@pytest.fixture
def library(built: Path) -> Path:
    """The library for programs in C and C++."""
    return built / "libonnxtrain.so"


@pytest.fixture
def host(library: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A program that draws the random numbers of Python, both without native kernels."""
    monkeypatch.setenv("ONNXTRAIN_NATIVE", "0")
    made = Host(library)
    made.train("SetSeed", ctypes.c_int64(7))
    set_seed(7)
    return made


@pytest.fixture
def calls(program: Path) -> Iterator[Calls]:
    running = Calls(program)
    yield running
    assert running.close() == 0
