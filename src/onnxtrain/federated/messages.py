"""Flower messages: their contents, replies that report an error, and checks of replies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message

from onnxtrain.errors import ArgumentError, OnnxTrainError
from onnxtrain.federated.arrays import to_record
from onnxtrain.federated.compression import decode
from onnxtrain.format.checkpoint.content import Array

RAISED = 2  # Flower's error code for an app that raised


def contents(message: Message) -> tuple[ArrayRecord, ConfigRecord]:
    """Return the arrays and the configuration of a message."""
    configs = list(message.content.config_records.values())
    arrays = one_record(message.content.array_records, "arrays")
    return arrays, configs[0] if configs else ConfigRecord()


def error_reply(message: Message, reason: str) -> Message:
    """Return the reply to a message that reports an error."""
    return Message(Error(code=RAISED, reason=reason), reply_to=message)


def check_arrays(reply: Message, sent: Mapping[str, Array]) -> None:
    """Put the arrays of a reply into the order and the types of the arrays that were sent.

    Names and shapes have to be those that were sent, and all values finite. Additional arrays that
    are not floats, such as counters of another framework, are dropped.
    """
    try:
        arrays = decode(one_record(reply.content.array_records, "arrays"), sent)
    except OnnxTrainError:
        raise
    except Exception as error:  # numpy has no common error for bytes that are no array
        raise ArgumentError(f"its arrays cannot be read: {error}") from None
    for name, array in arrays.items():
        if name not in sent and array.dtype.kind == "f":
            raise ArgumentError(f"it has {name!r}, which is unknown")
    for name, wanted in sent.items():
        if name not in arrays:
            raise ArgumentError(f"it has no {name!r}")
        array = arrays[name]
        if array.shape != wanted.shape:
            raise ArgumentError(
                f"its {name!r} has the shape {list(array.shape)} instead of {list(wanted.shape)}"
            )
        if array.dtype.kind != "f":
            raise ArgumentError(f"its {name!r} is {array.dtype.name} instead of a float")
        with np.errstate(over="ignore"):  # a wider type may hold larger values
            arrays[name] = array = array.astype(wanted.dtype, copy=False)
        bad = int(array.size - np.isfinite(array).sum())
        if bad:
            raise ArgumentError(f"its {name!r} has {bad} values that are not finite")
    key = next(iter(reply.content.array_records))
    reply.content[key] = to_record({name: arrays[name] for name in sent})


def check_metrics(reply: Message, weight: str) -> None:
    """Raise an error for metrics that would spoil the average."""
    metrics = one_record(reply.content.metric_records, "metrics")
    if weight not in metrics:
        raise ArgumentError(f"it has no {weight!r}")
    for name, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(math.isfinite(number) for number in numbers):
            raise ArgumentError(f"its {name!r} is {value}")
    amount = metrics[weight]
    if isinstance(amount, list) or amount <= 0:
        raise ArgumentError(f"its {weight!r} is {amount}: it has no data")


def as_error(reply: Message, reason: str) -> Message:
    """Return an error reply in place of a bad one."""
    return Message(error=Error(code=RAISED, reason=reason), metadata=reply.metadata)


def one_record(records: Mapping[str, Any], what: str) -> Any:
    """Return the only record of its kind."""
    if len(records) != 1:
        raise ArgumentError(f"the message has {len(records)} records of {what} instead of one")
    return next(iter(records.values()))


def size_of(message: Message) -> int:
    """Return the size of the arrays of a message in bytes."""
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())
