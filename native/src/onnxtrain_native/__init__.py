"""Native kernels for onnxtrain: a library of custom operators for the stock onnxruntime.

onnxtrain finds this package by itself; `onnxtrain doctor` says what is in use.
"""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
__all__ = ["__version__", "library"]


def library() -> str:
    """Return the path of the shared library."""
    folder = Path(__file__).parent
    for path in sorted(folder.glob("*onnxtrain_native.*")):
        if path.suffix in (".so", ".dylib", ".dll"):
            return str(path)
    raise FileNotFoundError(f"{folder} has no shared library: install onnxtrain-native again")
