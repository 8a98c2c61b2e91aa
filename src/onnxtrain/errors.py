"""All exceptions of onnxtrain.

All derive from `OnnxTrainError`, a `RuntimeError`, because scripts for ONNX Runtime's training API
catch that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# What moves the cursor, rings, or turns the direction of text; and halves of characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return a text that is safe to show on a terminal, as parts of it may be from a file."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def one_line(value: object) -> str:
    """Return a name or a text out of a file as it is shown within a line."""
    return printable(str(value).replace("\n", "\\n").replace("\t", "\\t"))


class OnnxTrainError(RuntimeError):
    """The base class of all errors of onnxtrain.

    `message` says what happened. `advice` is meant for the program that called the function, and
    follows the message in `str(error)`; a server that relays errors of its clients leaves it out.
    """

    def __init__(self, message: str = "", *, advice: str = "") -> None:
        self.message, self.advice = printable(message), advice
        super().__init__(f"{self.message} {advice}" if advice else self.message)


class ModelError(OnnxTrainError):
    """The model cannot be read, is inconsistent, or is not supported."""


class ShapeInferenceError(ModelError):
    """Two shapes contradict each other, or a shape that a gradient needs is unknown."""


class ArgumentError(OnnxTrainError, ValueError):
    """An argument has a value that the function does not accept."""


class ArgumentTypeError(OnnxTrainError, TypeError):
    """An argument has a type that the function does not accept."""


class UnknownNameError(OnnxTrainError, LookupError):
    """A name is not in the model."""


class UnknownNameWarning(UserWarning):
    """A name that is to be frozen is not in the model."""


class TrainingWarning(UserWarning):
    """Training works, but not as well as the caller may think; the message says what to do."""


class MemoryBudgetError(OnnxTrainError):
    """A training step does not fit into its memory budget."""


class CheckpointError(OnnxTrainError):
    """A checkpoint cannot be read or written, or its content is inconsistent."""


class CheckpointDataError(CheckpointError):
    """The external data of a checkpoint was not found."""


class AdapterError(OnnxTrainError):
    """An adapter cannot be read or written, or does not fit the model."""


class InputError(OnnxTrainError, ValueError):
    """The inputs of a graph have a wrong number, shape or type."""


class RunError(OnnxTrainError):
    """onnxruntime failed to run a graph."""


class StateError(OnnxTrainError):
    """A call came too early or too late, or the object lacks what it needs."""


class NonFiniteError(OnnxTrainError, ArithmeticError):
    """Training or evaluation produced a value that is infinite or NaN.

    `step` is the step of the run, from 1, `parameters` are the names of parameters that are not
    finite, if known, and `in_data` says that the data already had such values.
    """

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        step: int | None = None,
        parameters: Sequence[str] = (),
        in_data: bool = False,
    ) -> None:
        self.step = step
        self.in_data = in_data
        self.parameters = tuple(parameters)
        super().__init__(message, advice=advice)


class NotDifferentiableError(OnnxTrainError):
    """The output has no gradient with respect to the value."""


class BlockError(OnnxTrainError):
    """A block of `onnxtrain.onnxblock` was used incorrectly."""


class NotProvidedError(OnnxTrainError, ImportError):
    """A part of `onnxruntime.training` is not provided, or a package is not installed."""


@dataclass(frozen=True)
class MissingRule:
    """A node without a gradient rule, and the path on which its gradient is needed."""

    op: str
    node: str
    reason: str
    path: Sequence[str]


class MissingGradientError(NotDifferentiableError):
    """Operators on the gradient path have no gradient rule; the message lists all of them.

    The advice fits the function that was called: `training`, or else `onnxtrain.gradient`.
    """

    def __init__(self, missing: Sequence[MissingRule], *, training: bool = False) -> None:
        self.missing = tuple(missing)
        between = "the loss and what trains" if training else "the output and what it depends on"
        lines = [f"no gradient for {len(missing)} node(s) between {between}:"]
        for item in missing:
            lines.append(f"  - {item.op} (node {item.node!r}): {item.reason}")
            lines.append(f"      reached from {' -> '.join(item.path)}")
        advice = [
            "register a rule: @onnxtrain.offline.autodiff.rule('Op', domain='...')",
            "train only what comes after the node: freeze the parameters before it",
            "train without gradients, which is slow: optimizer='mezo'",
        ]
        if not training:
            advice[1:] = [
                "ask for no gradient of what comes before the node",
                "let the gradient through unchanged, where the shape is: straight_through=['Op']",
            ]
        lines += ["ways out:", *(f"  * {way}" for way in advice)]
        super().__init__("\n".join(lines))
