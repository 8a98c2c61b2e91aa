"""Flower messages: their contents, the round they belong to, replies that report an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message

from onnxtrain.errors import ArgumentError
from onnxtrain.federated.rounds import FEDERATION

RAISED = 2  # Flower's error code for an app that raised


def contents(message: Message) -> tuple[ArrayRecord, ConfigRecord]:
    """Return the arrays and the configuration of a message."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ArgumentError(f"a message has one record of arrays, not {len(records)}")
    configs = list(message.content.config_records.values())
    return records[0], configs[0] if configs else ConfigRecord()


def round_identity(config: Mapping[str, Any], number: int) -> str:
    """Return the identity of a round, federation/number; a repeated round has the same."""
    return f"{config.get(FEDERATION, '')}/{number}"


def federation_of(identity: str) -> str:
    """Return the federation of a round."""
    return identity.rpartition("/")[0]


def error_reply(message: Message, reason: str) -> Message:
    """Return the reply to a message that reports an error."""
    return Message(Error(code=RAISED, reason=reason), reply_to=message)
