"""What the site does to pages: links that lead out of the documents become plain text."""

import re
from typing import Any

# `[text](../benchmarks/x.py)` works where the repository is browsed; the site has no such file.
_OUTWARD = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:benchmarks|src|tests|js|examples|CONTRIBUTING)[^)]*\)"
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return _OUTWARD.sub(r"\1", markdown)
