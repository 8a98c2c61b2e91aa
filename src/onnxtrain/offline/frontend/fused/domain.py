"""The domain of onnxruntime's own operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxtrain.offline.autodiff.definitions import F, definition
from onnxtrain.offline.autodiff.registry import refuse

MICROSOFT = "com.microsoft"
_ALWAYS = (
    "it is expanded only where the element types and the ranks of its inputs can be inferred: give "
    "the inputs of the model a shape"
)


def fused(*op_types: str, ranks: Sequence[int] = (), lacking: str = "") -> Callable[[F], F]:
    """Register a function as the definition of operators of com.microsoft.

    `lacking` says which forms it does not cover, for the error that names a node left in place.
    """
    reason = f"it is not expanded with {lacking}; and {_ALWAYS}" if lacking else _ALWAYS
    refuse(*op_types, domain=MICROSOFT, reason=reason)
    return definition(*op_types, domain=MICROSOFT, ranks=ranks)
