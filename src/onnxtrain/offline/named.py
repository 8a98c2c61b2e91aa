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


def make_named(text: str, table: Mapping[str, Callable[..., Any]], argument: str) -> Any:
    """Make what a text names, such as "sgd:momentum=0.9"; `argument` is what it was given as."""
    name, _, settings = text.partition(":")
    kind = table.get(name.strip().lower().replace("-", "_"))
    if kind is None:
        near = difflib.get_close_matches(name, table, 1)
        raise ArgumentError(
            f"{argument} is {text!r}, which is none of {', '.join(table)}"
            f"{f': did you mean {near[0]!r}?' if near else ''}"
        )
    given = dict(_setting(item, text) for item in settings.split(",") if item.strip())
    if "clip_norm" in given:
        given["clip_grad"] = ClipGradNorm(given.pop("clip_norm"))
    known = inspect.signature(kind).parameters
    wrong = [key for key in given if key not in known]
    if wrong:
        raise ArgumentError(
            f"{argument} is {text!r}, but {name} has no {wrong[0]}: it has {', '.join(known)}"
        )
    for key, value in given.items():
        usual = known[key].default
        if isinstance(value, str) and isinstance(usual, bool | int | float):
            raise ArgumentError(
                f"{argument} is {text!r}, but {key} takes a value such as {usual!r}, not {value!r}"
            )
    return kind(**given)


def _setting(item: str, text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in item.partition("="))
    if not equals or not key.isidentifier():
        raise ArgumentError(f"{text!r}: settings are written name=value, not {item.strip()!r}")
    if value.lower() in _WORDS:
        return key, _WORDS[value.lower()]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


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
