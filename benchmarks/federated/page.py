"""Write figures into docs/federated.md, between markers."""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "federated.md"


def write(mark: str, text: str) -> None:
    """Replace the text between the markers of a section."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    found = re.search(f"{begin}.*{end}", page, re.DOTALL)
    assert found is not None, mark
    made = page[: found.start()] + f"{begin}\n{text}\n{end}" + page[found.end() :]
    PAGE.write_text(made, encoding="utf-8")


def machine(load: float) -> str:
    """Return date, machine and load of a measurement."""
    quiet = "" if load < 0.5 else (
        f" The machine had other load ({load:.1f} before the run), so ratios are more reliable "
        "than times."
    )  # fmt: skip
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.system()}.{quiet}"
