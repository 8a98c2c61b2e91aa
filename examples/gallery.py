"""Run the examples and write their pages: prose, code, output and pictures.

    python examples/gallery.py [NAME ...]

An example is a Python file in cells, as editors and notebooks know them: prose in comments below
`# %% [markdown]`, code below `# %%`. Tests run each example, and compare its code with its page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGES = HERE.parent / "docs" / "tutorials"
PICTURES = (".png", ".svg")
NOTEBOOKS = ("01_mnist",)


@dataclass(frozen=True)
class Cell:
    is_code: bool
    text: str


def examples() -> list[Path]:
    return sorted(HERE.glob("[0-9]*.py"))


def cells_of(source: str) -> list[Cell]:
    """Split an example into cells; everything above the first mark is left out."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)[1:]
    cells = []
    for mark, body in zip(parts[::2], parts[1::2], strict=True):
        if "markdown" in mark:
            text = "\n".join(re.sub(r"^# ?", "", line) for line in body.strip().splitlines())
            cells.append(Cell(False, text))
        else:
            cells.append(Cell(True, body.strip()))
    return cells


def page_name(example: Path) -> str:
    return example.stem.replace("_", "-") + ".md"


def write_page(example: Path) -> Path:
    """Run an example in an empty folder and write its page."""
    cells = cells_of(example.read_text(encoding="utf-8"))
    target = PAGES / page_name(example)
    images = PAGES / "images"
    images.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    names: dict[str, object] = {"__name__": "__main__", "__file__": str(example)}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        seen: set[Path] = set()
        for cell in cells:
            if not cell.is_code:
                lines += [cell.text, ""]
                continue
            lines += ["```python", cell.text, "```", ""]
            printed = run(cell.text, names, example.name)
            if printed:
                lines += ["```text", printed, "```", ""]
            made = {p for p in Path().iterdir() if p.suffix in PICTURES}
            for picture in sorted(made - seen):
                copy = images / f"{example.stem.replace('_', '-')}-{picture.name}"
                shutil.copy(picture, copy)
                lines += [f"![{picture.stem}](images/{copy.name})", ""]
            seen |= made
    lines += [f"The whole script is `examples/{example.name}`."]
    renew(target, "\n".join(lines) + "\n")
    return target


def renew(target: Path, text: str) -> None:
    """Write a page, unless only durations have changed."""
    if not target.exists() or timeless(target.read_text(encoding="utf-8")) != timeless(text):
        target.write_text(text, encoding="utf-8")


def timeless(text: str) -> str:
    return re.sub(r"\b\d+s\b", "#s", text)


def run(code: str, names: dict[str, object], file: str) -> str:
    """Execute code; return what it printed to standard output and standard error."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        exec(compile(code, file, "exec"), names)
    return stream.getvalue().rstrip()


def write_notebook(example: Path) -> Path:
    """Write an example as an executed notebook."""
    import nbformat
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    cells = cells_of(example.read_text(encoding="utf-8"))
    notebook = new_notebook(
        cells=[
            (new_code_cell if cell.is_code else new_markdown_cell)(cell.text, id=f"cell-{number}")
            for number, cell in enumerate(cells)
        ]
    )
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    notebook.metadata["language_info"].pop("version", None)
    target = HERE / f"{example.stem}.ipynb"
    renew(target, nbformat.writes(notebook) + "\n")
    return target


def joined(outputs: list[Any]) -> list[Any]:
    """Join consecutive outputs of a stream, and drop warnings, which name temporary files."""
    kept: list[Any] = []
    for output in outputs:
        is_stream = output.output_type == "stream"
        if is_stream and output.name == "stderr" and "Warning: " in output.text:
            continue
        if is_stream and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(HERE))
    os.environ.setdefault("ONNXTRAIN_MODELS", str(HERE.parent / ".venv" / "models"))
    if not names:  # each in its own process, so that no example sees the imports of another
        for example in examples():
            subprocess.run([sys.executable, __file__, example.stem], check=True)
    for name in names:
        example = HERE / f"{name}.py"
        print(write_page(example))
        if name in NOTEBOOKS:
            print(write_notebook(example))


if __name__ == "__main__":
    main(sys.argv[1:])
