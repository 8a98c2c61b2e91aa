"""Every code block in the documentation is run by a test, and none is of an unknown kind."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from onnxtrain.cli.parser import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)(```+|~~~+) *(\S*).*?\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
# Which test runs which language. Text is output, or a drawing.
RUN_BY = {
    "python": "tests/docs/test_pages.py, tests/docs/test_examples.py, tests/device",
    "console": "tests/docs/test_examples.py",
    "sh": "this file",
    "js": "js/test",
    "cpp": "tests/native/test_documented_kernel.py, tests/capi/test_capi_programs.py",
    "c": "tests/capi/test_capi_programs.py",
    "cmake": "tests/capi/test_capi_programs.py",
    "py": "this file",
    "text": "nobody",
}


class Block(NamedTuple):
    page: str
    indent: str
    language: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(str(page.relative_to(ROOT)), *(match[1], match[3], match[4]))
        for page in PAGES
        for match in FENCE.finditer(page.read_text(encoding="utf-8"))
    ]


def test_every_block_says_what_it_is() -> None:
    found = blocks()
    assert len(found) > 60
    for block in found:
        assert block.language in RUN_BY, f"{block.page}: a block of {block.language or 'nothing'}"
        # The tests that run blocks do not find indented ones.
        assert not block.indent, f"{block.page}: an indented block"
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = len(re.findall(r"^ *(```|~~~)", text, re.MULTILINE))
        assert fences == 2 * len(FENCE.findall(text)), page


def test_blocks_stand_where_tests_look_for_them() -> None:
    where: dict[str, set[str]] = {}
    for block in blocks():
        where.setdefault(block.language, set()).add(block.page)
    assert where["console"] == {"docs/command-line.md"}
    outside = {page for page in where["python"] if not page.startswith("docs/")}
    assert outside == {"README.md", "CONTRIBUTING.md"}
    assert where["js"] == {"docs/javascript.md"}
    assert where["cpp"] == {"docs/native.md", "docs/c-api.md"}
    assert where["cmake"] == {"docs/c-api.md"}


def test_python_that_needs_other_packages_compiles() -> None:
    """Code of converters and large models, which the tests do not have, is marked `py`."""
    found = [block for block in blocks() if block.language == "py"]
    pages = {"docs/adapters.md", "docs/exporting.md", "docs/finetune.md"}
    assert {block.page for block in found} == pages
    for block in found:
        compile(block.text, block.page, "exec")


def commands() -> list[tuple[str, str]]:
    """Return the commands of all shell blocks, each with its page."""
    lines = [
        (block.page, line.split(" #")[0].strip())
        for block in blocks()
        if block.language == "sh"
        for line in block.text.splitlines()
    ]
    return [(page, line) for page, line in lines if line]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_of_a_page(page, command, tmp_path) -> None:
    program = command.split()[0]
    if program == "make":
        make(command)
    elif program == "pip":
        install(command)
    elif "benchmarks/" in command:
        measure(command)
    elif program == "onnxtrain":
        make_parser().parse_args(shlex.split(command)[1:])
    else:
        run(command, tmp_path)


def make(command: str) -> None:
    """Check that a target exists and is listed; running it would take too long."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    target = command.split()[1]
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"make {target} " in listed


def install(command: str) -> None:
    """Let pip resolve the command, with this folder in place of the index.

    Other packages must be in our extras or in the Makefile.
    """
    pytest.importorskip("hatchling", reason="the package is built with it; `make test` installs it")
    named = shlex.split(command)[2:]
    known = (ROOT / "pyproject.toml").read_text() + (ROOT / "Makefile").read_text()
    for other in (word for word in named if not word.startswith(("onnxtrain", "-"))):
        assert re.search(rf'["\s]{re.escape(other.split("[")[0])}[=>"\[]', known), other
    words = [
        re.sub("^onnxtrain", str(ROOT), word) for word in named if word.startswith("onnxtrain")
    ]
    if not words:
        return
    options = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stdout + done.stderr


def measure(command: str) -> None:
    """Check that the benchmark takes these arguments; running it would take minutes."""
    words = shlex.split(command)
    main = ROOT / words[1] / "__main__.py"
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(main.parent)!r})\n"
        f"sys.argv = {words[1:]!r}\n"
        f"print(runpy.run_path({str(main)!r})['_arguments']())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(command: str, folder: Path) -> None:
    """Run a command in a folder with the scripts that pages name."""
    for name in ("script.py", "module.py"):
        (folder / name).write_text(
            "import sys\nfrom onnxruntime.training import artifacts\nprint(sys.argv[1:])\n"
        )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env={**os.environ, "PATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['arguments', '...']\n"
