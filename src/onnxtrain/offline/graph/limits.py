"""What a model may cost before anything of it is run, folded, inlined or inferred.

A file of 200 bytes can ask for 2**40 elements, and functions that call others twice, sixty levels
deep, for more nodes than there is memory. Such a model is refused with an error that says which
limit it exceeds; whoever trusts it raises that limit.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import onnx_ir as ir

from onnxtrain.errors import ArgumentTypeError, ModelError
from onnxtrain.offline.graph.error_context import model_error_context
from onnxtrain.offline.graph.sweep import collector_paused

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Limits:
    """How much a model may ask for; the defaults suit every model that a workstation can train.

    Attributes:
        file_bytes: the size of the file itself, without external data. Protobuf reads 2 GB.
        nodes: the number of nodes in the file.
        inlined_nodes: the number of nodes once the functions of the model are inlined.
        elements: of any one tensor whose shape is known before the model runs.
        constant_elements: of a tensor that onnxtrain itself computes: a folded constant, the
            positions that a gradient writes to, the coefficients of a resampling.

    Examples:
        >>> onnxtrain.inspect("mobilenet.onnx", limits=onnxtrain.Limits(elements=2**34))

    """

    file_bytes: int = 2**31
    nodes: int = 2_000_000
    inlined_nodes: int = 100_000
    elements: int = 2**31
    constant_elements: int = 2**24

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ArgumentTypeError(f"Limits: {field.name} is a positive int, not {number!r}")


DEEPEST = 32  # subgraphs in each other; protobuf reads and writes no more, so no limit to raise
_DEFAULT = Limits()
_current: ContextVar[Limits] = ContextVar("limits", default=_DEFAULT)


@contextmanager
def limits_in_force(limits: Limits | None) -> Iterator[None]:
    """Apply limits to all that is done inside; None keeps those that hold already."""
    if limits is not None and not isinstance(limits, Limits):
        raise ArgumentTypeError(f"limits is an onnxtrain.Limits, not {type(limits).__name__}")
    token = _current.set(limits or _current.get())
    try:
        yield
    finally:
        _current.reset(token)


def limited(doing: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function of the public interface apply its argument `limits`.

    What it cannot foresee becomes an error of onnxtrain that says what was done.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            _require_arguments(function.__name__, signature, args, kwargs)
            limits: Any = kwargs.get("limits")
            with limits_in_force(limits), collector_paused(), model_error_context(doing):
                return function(*args, **kwargs)

        return call

    return decorate


def _require_arguments(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    unknown = [key for key in kwargs if key not in signature.parameters]
    if unknown:
        near = difflib.get_close_matches(unknown[0], signature.parameters, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(signature.parameters)}"
        raise ArgumentTypeError(f"{name}() has no argument {unknown[0]!r}: {hint}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(f"{name}(): {error}") from None


def require(limit: str, number: int, what: str) -> None:
    """Raise a ModelError if a number exceeds a limit; `what` goes before the number."""
    most = getattr(_current.get(), limit)
    if number > most:
        shown = f"{number:,}" if number < 10**15 else f"about 2**{number.bit_length() - 1}"
        raise ModelError(
            f"{what} {shown}, where {most:,} are allowed. If the model is to be trusted and the "
            f"machine is large enough, raise the limit: onnxtrain.Limits({limit}=...)"
        )


def require_constant(elements: int, node: ir.Node | None, what: str) -> None:
    """Raise a ModelError, before it is made, for a constant that is too large."""
    label = "" if node is None else f" of {node.op_type} (node {node.name!r})"
    require("constant_elements", elements, f"{what}{label} would have a number of elements of")


def require_moderate_shapes(values: Iterable[ir.Value]) -> None:
    """Raise a ModelError for a value whose known dimensions alone make it too large."""
    most = _current.get().elements
    for value in values:
        shape = value.shape
        if shape is None or value.const_value is not None:
            continue
        count = math.prod([d for d in shape if isinstance(d, int) and d > 0])
        if count > most:
            maker = value.producer()
            by = f", made by {maker.op_type} (node {maker.name!r})," if maker is not None else ""
            what = f"the value {value.name!r}{by} has the shape {shape}: its number of elements is"
            require("elements", count, what)
