"""Losses and optimizers by name: "huber", or with settings "huber:delta=0.5"."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxtrain.errors import ArgumentError, ArgumentTypeError
from onnxtrain.offline.optimizers import BY_NAME, ClipGradNorm, Optimizer

_WORDS = {"true": True, "false": False, "none": None}
# What a text has in the place of `clip_grad`.
_CLIP_NORM = inspect.Parameter("clip_norm", inspect.Parameter.KEYWORD_ONLY, default=1.0)


def make_named(text: str, table: Mapping[str, Callable[..., Any]], argument: str) -> Any:
    """Make what a text names, such as "sgd:momentum=0.9"; `argument` is what it was given as."""
    name, _, settings = text.partition(":")
    kind = {_plain(key): value for key, value in table.items()}.get(_plain(name))
    if kind is None:
        near = difflib.get_close_matches(name, table, 1) if len(name) > 2 else []
        raise ArgumentError(
            f"{argument} is {text!r}, which is none of {', '.join(table)}"
            f"{f': did you mean {near[0]!r}?' if near else ''}"
        )
    given = dict(_setting(item, text) for item in settings.split(",") if item.strip())
    known = dict(inspect.signature(kind).parameters)
    if "clip_grad" in known:
        known["clip_norm"] = _CLIP_NORM
    wrong = [key for key in given if key not in known]
    if wrong:
        raise ArgumentError(
            f"{argument} is {text!r}, but {name} has no {wrong[0]}: it has {', '.join(known)}"
        )
    values = {key: _value(written, known[key]) for key, written in given.items()}
    for key, value in values.items():
        if not _is_of(known[key], value):
            raise ArgumentError(
                f"{argument} is {text!r}, but {key} takes a value such as {known[key].default!r}, "
                f"not {given[key]!r}"
            )
    if "clip_norm" in values:
        values["clip_grad"] = ClipGradNorm(values.pop("clip_norm"))
    return kind(**values)


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")


def _setting(item: str, text: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in item.partition("="))
    if not equals or not key.isidentifier():
        raise ArgumentError(f"{text!r}: settings are written name=value, not {item.strip()!r}")
    return key, value


def _value(written: str, parameter: inspect.Parameter) -> Any:
    """Return what a setting means: "none" and numbers may be words of their own."""
    is_text = isinstance(parameter.default, str) or "str" in str(parameter.annotation)
    if written.lower() in _WORDS and not is_text:
        return _WORDS[written.lower()]
    try:
        found = ast.literal_eval(written)
    except (ValueError, SyntaxError):
        return written
    return written if is_text and not isinstance(found, str | tuple | list) else found


def _is_of(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether a value is of the kind that a parameter has by default, or may have."""
    usual, kinds = parameter.default, str(parameter.annotation)
    if isinstance(usual, bool):
        return value in (True, False)
    if isinstance(usual, int | float) or "int" in kinds:
        numbers = int if "int" in kinds else int | float
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        return is_number or (value is None and "None" in kinds)
    if isinstance(value, str):
        return isinstance(usual, str) or "str" in kinds
    if isinstance(value, tuple | list):
        return not isinstance(usual, str) or "Sequence" in kinds
    return usual is None


def require_choice(argument: str, given: str, choices: Sequence[str]) -> None:
    """Refuse what is none of the choices of an argument."""
    if given not in choices:
        raise ArgumentTypeError(f"{argument} is {' or '.join(map(repr, choices))}, not {given!r}")


def make_optimizer(optimizer: str | Optimizer | None, proximal: bool = False) -> Optimizer | None:
    """Return an optimizer that was given by name or as an object; None stays None."""
    if proximal and optimizer is None:
        raise ArgumentError("proximal=True is a term of the update: it needs an optimizer")
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        made: Optimizer = make_named(optimizer, BY_NAME, "optimizer")
        return made
    raise ArgumentTypeError(
        f"optimizer is a name ({', '.join(BY_NAME)}) or an optimizer of onnxtrain.optim, not "
        f"{optimizer!r}"
    )
