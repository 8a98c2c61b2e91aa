"""The kernel that docs/native.md writes step by step compiles as it stands there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("compiler", ["c++", "aarch64-linux-gnu-g++", "clang++"])
def test_the_kernel_of_the_page_compiles(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    page = (ROOT / "docs" / "native.md").read_text(encoding="utf-8")
    table, computation, kernel = re.findall(r"^```cpp\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    source = tmp_path / "square_plus.cpp"
    source.write_text(
        '#include <algorithm>\n#include <cmath>\n#include "families.h"\n#include "isa.h"\n'
        f"namespace onnxtrain {{\n{table}}}\n{computation}\nnamespace onnxtrain {{\n{kernel}}}\n"
    )
    folders = [f"-I{ROOT / 'native' / name}" for name in ("runtime", "kernels")]
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-DONNXTRAIN_ISA=portable"]
    made = subprocess.run(
        [*command, *folders, "-fsyntax-only", str(source)], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
