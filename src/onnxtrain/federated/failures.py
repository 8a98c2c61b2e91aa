"""What a server is told of a client's failure: a code and a place, and never a value.

Texts of exceptions hold data: "could not convert string to float: …" has the user's own text behind
it. So a reply names the kind of the error and the stage at which it happened, both from lists that
are fixed here. The whole text, with its traceback, is in the client's own log.
"""

from __future__ import annotations

import builtins
import logging
import re

from flwr.app import Error, Message

from onnxtrain import errors
from onnxtrain.federated.rounds import SETTINGS

_log = logging.getLogger(__name__)
RAISED = 2  # Flower's error code for an app that raised
STAGES = (
    "message", "artifacts", "artifacts version", "training data", "evaluation data",
    "client state", "received weights", "initial weights", "training", "evaluation", "export",
    "mods", "compression", "client",
)  # fmt: skip
PLACES = frozenset((*STAGES, *(f"setting {key}" for key in SETTINGS)))
_KINDS = {
    kind: kind.__name__
    for room in (builtins, errors)
    for kind in vars(room).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_SAID = re.compile(r"(\w+) at ([a-z -]+)")


class Stage:
    """Where a client is in its work."""

    def __init__(self) -> None:
        self.place = "message"

    def at(self, place: str) -> None:
        """Enter a stage; only those of the list are ever told."""
        self.place = place if place in PLACES else "client"


def told(error: BaseException, place: str) -> str:
    """Return what a server is told of an error.

    The kind is the nearest class that Python or onnxtrain defines: names of others are the user's.
    """
    return f"{next(_KINDS[kind] for kind in type(error).__mro__ if kind in _KINDS)} at {place}"


def error_reply(message: Message, error: BaseException, place: str) -> Message:
    """Log an error as a whole, and return the reply to a message that tells of it."""
    said = told(error, place)
    _log.error("the client could not answer: %s", said, exc_info=error)
    return Message(Error(code=RAISED, reason=said), reply_to=message)


def without_text(message: Message, reply: Message) -> Message:
    """Return an error reply, that of a mod for one, without any text but our own."""
    said = _SAID.fullmatch(reply.error.reason or "")
    if said is not None and said[1] in _KINDS.values() and said[2] in PLACES:
        return reply
    _log.error("a mod replied with an error: %s", reply.error.reason)
    return Message(Error(code=reply.error.code, reason="Exception at mods"), reply_to=message)
