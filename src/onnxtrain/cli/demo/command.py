"""The command demo."""

from __future__ import annotations

import argparse
from pathlib import Path

from onnxtrain.cli.console import Console
from onnxtrain.errors import ArgumentError


def demo_command(options: argparse.Namespace, console: Console) -> int:
    """Tell the whole story, from pretraining to inference."""
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"{options.output!r} is a file: give the name of a folder to --output")
    import matplotlib  # noqa: F401  (what is missing is to be said before, not after)
    import onnx_ir  # noqa: F401
    import sklearn  # noqa: F401

    from onnxtrain.cli.demo.story import summary, tell

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{options.output!r} cannot be made ({error.strerror}): give another folder to --output"
        ) from None
    values = tell(folder, options.seed, console)
    console.result(values, summary(values))
    return 0
