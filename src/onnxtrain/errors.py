"""Every exception that onnxtrain raises on purpose, on one page.

All of them are `OnnxTrainError`, which is a `RuntimeError` because that is what scripts written
for ONNX Runtime's training API catch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class OnnxTrainError(RuntimeError):
    """The base of every error of this package.

    `message` says what happened. `advice` is meant for the program that called the function, and
    follows the message in `str(error)`; a server that relays errors of its clients leaves it out.
    """

    def __init__(self, message: str = "", *, advice: str = "") -> None:
        self.message, self.advice = message, advice
        super().__init__(f"{message} {advice}" if advice else message)


class ModelError(OnnxTrainError):
    """The model cannot be read, is inconsistent, or lies outside what onnxtrain accepts."""


class ShapeInferenceError(ModelError):
    """A shape contradicts another, or a shape that a gradient needs cannot be inferred."""


class ArgumentError(OnnxTrainError, ValueError):
    """An argument is not of a kind, or not one of the choices, that the function takes."""


class ArgumentTypeError(OnnxTrainError, TypeError):
    """An argument is of a type that the function does not take."""


class UnknownNameError(OnnxTrainError, LookupError):
    """A name that was asked for is not in the model."""


class UnknownNameWarning(UserWarning):
    """A name that is to be frozen is not in the model."""


class MemoryBudgetError(OnnxTrainError):
    """A training step cannot be made to fit into the memory that it may take."""


class CheckpointError(OnnxTrainError):
    """A checkpoint file cannot be read or written, or its content is not consistent."""


class CheckpointDataError(CheckpointError):
    """The external data that belong to a checkpoint were not found."""


class InputError(OnnxTrainError, ValueError):
    """What was fed to a graph has the wrong number, shape or type, or does not fit the graph."""


class RunError(OnnxTrainError):
    """onnxruntime failed to run a graph."""


class StateError(OnnxTrainError):
    """Something was asked for before, or after, it could be given."""


class NonFiniteError(OnnxTrainError, ArithmeticError):
    """Training or evaluation came to a number that is infinite or not a number.

    `step` is the step of the run, counted from 1, and `parameters` are the names of those that are
    not finite, where they are known. `in_data` says that the data had such numbers to begin with.
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
    """There is no gradient of the asked output with respect to the asked value."""


class BlockError(OnnxTrainError):
    """A block of `onnxtrain.onnxblock` was used in a way, or in a place, that makes no sense."""


class NotProvidedError(OnnxTrainError, ImportError):
    """A part of `onnxruntime.training` that has no counterpart in onnxtrain, or lacks a package."""


@dataclass(frozen=True)
class MissingRule:
    """One node whose gradient is unknown, and how the differentiation came to need it."""

    op: str
    node: str
    reason: str
    path: Sequence[str]


class MissingGradientError(NotDifferentiableError):
    """Operators on the gradient path have no gradient rule; all of them are listed at once.

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
        ]
        if not training:
            advice[1:] = [
                "ask for no gradient of what comes before the node",
                "let the gradient through unchanged, where the shape is: straight_through=['Op']",
            ]
        lines += ["ways out:", *(f"  * {way}" for way in advice)]
        super().__init__("\n".join(lines))
