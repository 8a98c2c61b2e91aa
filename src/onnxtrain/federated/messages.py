"""Flower messages: their contents, and what replies carry beside arrays and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message

from onnxtrain.errors import ArgumentError
from onnxtrain.federated.failures import RAISED

# The record of a reply with the token of its message, and the number that orders clients.
ABOUT, REPLY, CLIENT = "onnxtrain", "reply", "client"
_LONGEST_REASON = 300


def contents(message: Message) -> tuple[ArrayRecord, ConfigRecord]:
    """Return the arrays and the configuration of a message."""
    configs = list(message.content.config_records.values())
    arrays = one_record(message.content.array_records, "arrays")
    return arrays, configs[0] if configs else ConfigRecord()


def as_error(reply: Message, reason: str) -> Message:
    """Return an error reply in place of a bad one."""
    return Message(error=Error(code=RAISED, reason=printable(reason)), metadata=reply.metadata)


def printable(text: Any) -> str:
    """Return what a client says, in one line for a log."""
    said = str(text)[:_LONGEST_REASON]
    return "".join(c if c.isprintable() else "?" for c in said)


def one_record(records: Mapping[str, Any], what: str) -> Any:
    """Return the only record of its kind."""
    if len(records) != 1:
        raise ArgumentError(f"the message has {len(records)} records of {what} instead of one")
    return next(iter(records.values()))


def size_of(message: Message) -> int:
    """Return the size of the arrays of a message in bytes."""
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())
