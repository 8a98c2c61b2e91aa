"""The demo command."""

from __future__ import annotations

import argparse
from pathlib import Path

from onnxtrain.cli.console import Console
from onnxtrain.errors import ArgumentError


def demo_command(options: argparse.Namespace, console: Console) -> int:
    """Run the demo, from pretraining to inference."""
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{options.output!r} is a file: --output takes a folder")
    import matplotlib  # noqa: F401  (fail early if one is missing)
    import onnx_ir  # noqa: F401
    import sklearn  # noqa: F401

    from onnxtrain.cli.demo.story import summary, tell

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{options.output!r} cannot be created ({error.strerror}): give another --output"
        ) from None
    values = tell(folder, options.seed, console)
    console.result(values, summary(values))
    return 0
