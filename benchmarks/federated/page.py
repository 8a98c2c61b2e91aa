"""Puts figures into docs/federated.md, between marks."""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "federated.md"


def write(mark: str, text: str) -> None:
    """Replace what stands between the marks of a part of the page."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    found = re.search(f"{begin}.*{end}", page, re.DOTALL)
    assert found is not None, mark
    made = page[: found.start()] + f"{begin}\n{text}\n{end}" + page[found.end() :]
    PAGE.write_text(made, encoding="utf-8")


def machine(load: float) -> str:
    """Say when and where something was measured, and whether the machine was quiet."""
    quiet = "" if load < 0.5 else (
        f" **The machine was not quiet** (load {load:.1f} before the run): ratios within the run "
        "mean something, times little."
    )  # fmt: skip
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}.{quiet}"
