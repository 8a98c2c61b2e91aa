"""Clients that attack a federation: an honest app, with replies that are spoiled on the way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

Values = dict[str, np.ndarray]
# The three kinds of a federation of ten with three hostile clients.
THREE = ("huge", "count", "replay-or-nan")


def hostile(honest: Any, kinds: Sequence[str] | Mapping[int, str] = THREE) -> ClientApp:
    """Return an app whose first clients attack, each in its own way; the others are honest."""
    attacks = kinds if isinstance(kinds, Mapping) else dict(enumerate(kinds))
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        sent = values_of(message.content["arrays"])
        number = message.content["config"]["server-round"]
        reply = honest(message, context)
        kind = attacks.get(int(context.node_config["partition-id"]))
        if kind is None or reply.has_error():
            return reply
        return Message(ATTACKS[kind](reply.content, sent, number, context), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return honest(message, context)

    return app


def values_of(record: ArrayRecord) -> Values:
    """Return the arrays of a record."""
    return {name: array.numpy().astype(np.float64) for name, array in record.items()}


def with_arrays(content: RecordDict, values: Values) -> RecordDict:
    """Return a reply with other arrays."""
    made = ArrayRecord({n: Array(np.asarray(a, np.float32)) for n, a in values.items()})
    return RecordDict({**content, "arrays": made})


def with_count(content: RecordDict, count: Any) -> RecordDict:
    """Return a reply that claims a number of samples."""
    made = MetricRecord({**content["metrics"], "num-examples": count})
    return RecordDict({**content, "metrics": made})


def times(factor: float) -> Callable[..., RecordDict]:
    """Return an attack that multiplies the update, and turns it around if negative."""

    def attack(content: RecordDict, sent: Values, *_: Any) -> RecordDict:
        moved = values_of(content["arrays"])
        return with_arrays(content, {n: sent[n] + factor * (a - sent[n]) for n, a in moved.items()})

    return attack


def largest(content: RecordDict, sent: Values, *_: Any) -> RecordDict:
    """Reply with the largest numbers that are finite."""
    return with_arrays(content, {name: np.full_like(a, 3e38) for name, a in sent.items()})


def with_nan(content: RecordDict, *_: Any) -> RecordDict:
    """Reply with one NaN."""
    values = values_of(content["arrays"])
    next(iter(values.values())).flat[0] = np.nan
    return with_arrays(content, values)


def replay(content: RecordDict, sent: Values, number: int, context: Context) -> RecordDict:
    """Reply with the first reply again, and again."""
    if "replay-metrics" not in context.state:
        for key in ("arrays", "metrics", "onnxtrain"):
            context.state[f"replay-{key}"] = content[key]
    kept = {key: context.state[f"replay-{key}"] for key in ("arrays", "metrics", "onnxtrain")}
    return RecordDict(kept)


def stale(content: RecordDict, sent: Values, number: int, context: Context) -> RecordDict:
    """Reply with the first weights again, as if they were of this round."""
    return RecordDict({**replay(content, sent, number, context), "onnxtrain": content["onnxtrain"]})


def constant(content: RecordDict, sent: Values, *_: Any) -> RecordDict:
    """Reply with the weights that were sent: a client that only takes."""
    return with_arrays(content, sent)


ATTACKS: dict[str, Callable[..., RecordDict]] = {
    "huge": times(-1000.0),
    "large": times(-20.0),
    "flipped": times(-1.0),
    "largest": largest,
    "nan": with_nan,
    "replay": replay,
    "stale": stale,
    "constant": constant,
    "count": lambda content, sent, *_: with_count(times(-1.0)(content, sent), 2**62),
    "count-float": lambda content, sent, *_: with_count(times(-1.0)(content, sent), 1e300),
    "count-many": lambda content, sent, *_: with_count(times(-1.0)(content, sent), 10**7),
    "replay-or-nan": lambda content, sent, number, context: (
        with_nan(content) if number % 2 else replay(content, sent, number, context)
    ),
}

__all__ = ["ATTACKS", "THREE", "hostile"]
