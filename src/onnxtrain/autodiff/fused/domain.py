"""The domain of onnxruntime's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxtrain.autodiff.definitions import F, definition

MICROSOFT = "com.microsoft"


def fused(*op_types: str, ranks: Sequence[int] = ()) -> Callable[[F], F]:
    """Register a function as the definition of operators of com.microsoft."""
    return definition(*op_types, domain=MICROSOFT, ranks=ranks)
