"""What the wheel weighs, by part, and what it would weigh if its sources were cut down.

    python benchmarks/wheel_weight.py

The figures of docs/decisions/0009-the-weight-of-the-wheel.md.
"""

from __future__ import annotations

import ast
import io
import lzma
import tokenize
import zlib
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"
WORKSTATION = ("autodiff", "onnxblock", "demo")
# Local and central header of a zip, a line of RECORD with a hash that does not compress.
PER_FILE = 30 + 46 + 45
REST = 7_000  # the metadata, the licence


def deflated(text: str) -> int:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
    return len(packer.compress(text.encode()) + packer.flush())


def without_comments(text: str) -> str:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return "\n".join(lines)


def without_docstrings(text: str) -> str:
    return ast.unparse(_Bare(annotations=True).visit(ast.parse(text)))


def without_annotations(text: str) -> str:
    return ast.unparse(_Bare(annotations=False).visit(ast.parse(text)))


class _Bare(ast.NodeTransformer):
    def __init__(self, annotations: bool) -> None:
        self._annotations = annotations

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        is_scope = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if is_scope and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef) and not self._annotations:
            node.returns = None
        if isinstance(node, ast.arg) and not self._annotations:
            node.annotation = None
        return node


FORMS: dict[str, Callable[[str], str]] = {
    "as they are": lambda text: text,
    "no comments": without_comments,
    "no docstrings either": without_docstrings,
    "no annotations either": without_annotations,
}


def main() -> None:
    files = sorted(SOURCES.rglob("*.py"))
    names = sum(2 * len(str(path.relative_to(SOURCES))) for path in files)
    beside = PER_FILE * len(files) + names + REST
    print(f"{len(files)} files; beside their content: {beside / 1000:.0f} KB")
    for form, change in FORMS.items():
        texts = [change(path.read_text(encoding="utf-8")) for path in files]
        plain = sum(map(deflated, texts))
        solid = len(lzma.compress("".join(texts).encode(), preset=9))
        print(f"{form:22} wheel {(plain + beside) / 1000:5.0f} KB, one xz {solid / 1000:5.0f} KB")
    device = [p for p in files if p.relative_to(SOURCES).parts[1] not in WORKSTATION]
    weight = sum(deflated(path.read_text(encoding="utf-8")) for path in device)
    print(f"without {', '.join(WORKSTATION)}: {(weight + PER_FILE * len(device)) / 1000:.0f} KB")


if __name__ == "__main__":
    main()
