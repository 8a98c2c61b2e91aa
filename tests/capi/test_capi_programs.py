"""The examples in C and C++, compiled with onnxruntime's own headers and ours.

The variable `ONNXRUNTIME_HEADERS` names the folder of onnxruntime's headers, which its wheels lack.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from small_runs import GOLDEN, open_session, samples
from upstream_table import library_of_the_wheel

ROOT = Path(__file__).parents[2]
STEPS = 5


@pytest.fixture(scope="module")
def headers() -> Path:
    given = os.environ.get("ONNXRUNTIME_HEADERS")
    if not given:
        pytest.skip("ONNXRUNTIME_HEADERS does not name the folder of onnxruntime's headers")
    return Path(given)


@pytest.fixture
def compiled(headers: Path, library: Path, tmp_path: Path):
    """A function that compiles an example."""

    def compile_example(name: str) -> Path:
        (tmp_path / "libonnxruntime.so.1").symlink_to(library_of_the_wheel())
        is_c = name.endswith(".c")
        program = tmp_path / "program"
        command = ["cc", "-std=c11"] if is_c else ["c++", "-std=c++17"]
        command += ["-Wall", "-Wextra", "-Werror"]
        command += [f"-I{ROOT / 'native' / 'include'}", "-isystem", str(headers)]
        command += [str(ROOT / "native" / "examples" / name), "-o", str(program)]
        command += [str(library), str(tmp_path / "libonnxruntime.so.1")]
        command += [f"-Wl,-rpath,{library.parent}:{tmp_path}"]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        return program

    return compile_example


def run(program: Path, folder: Path, *given: object) -> list[float]:
    inputs, labels = samples(16)
    inputs.tofile(folder / "inputs")
    labels.tofile(folder / "labels")
    words = [program, GOLDEN / "mlp", folder / "inputs", folder / "labels", 16, *given]
    made = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return list(map(float, made.stdout.split()))


def test_the_page_shows_parts_of_the_example() -> None:
    page = (ROOT / "docs" / "c-api.md").read_text(encoding="utf-8")
    example = (ROOT / "native" / "examples" / "train.cpp").read_text(encoding="utf-8")
    shown = re.findall(r"^```cpp\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(shown) == 2 and all(part in example for part in shown)


def test_a_program_in_upstreams_style(compiled, tmp_path) -> None:
    losses = run(compiled("train.cpp"), tmp_path, STEPS, tmp_path / "cpp")
    session, expected = open_session(), []
    session.register_linear_lr_scheduler(0, STEPS, float(np.float32(0.05)))
    for _ in range(STEPS):
        expected.append(session.train_step(*samples(16))[0])
        session.optimizer_step()
        session.scheduler_step()
        session.lazy_reset_grad()
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    resumed = open_session(checkpoint=tmp_path / "cpp")
    assert resumed.optimizer.step_count == STEPS and resumed.get_property("steps") == STEPS
    for name, parameter in session.state.parameters:
        np.testing.assert_allclose(resumed.get_parameter(name), parameter.data, rtol=0, atol=1e-6)


def test_a_program_in_c(compiled, tmp_path) -> None:
    losses = run(compiled("train.c"), tmp_path, 8, STEPS, tmp_path / "c")
    session = open_session(learning_rate=0.05)
    expected = [session.step(*samples(16))[0] for _ in range(STEPS)]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    assert open_session(checkpoint=tmp_path / "c").optimizer.step_count == STEPS
