"""A strategy around a strategy, which keeps bad replies out of the average.

The inner strategy, any of Flower's, samples clients and averages. This one adds settings, a token
and the version of the artifacts to each message, decompresses updates, turns replies that would
spoil the average into errors (see `checks`), and counts bytes.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError, InconsistentMessageReplies
from flwr.serverapp.strategy import Strategy

from onnxtrain.errors import OnnxTrainError
from onnxtrain.federated.arrays import read_record, to_record
from onnxtrain.federated.checks import (
    Checks,
    Expected,
    as_sent,
    bound_examples,
    check_arrays,
    check_metrics,
    check_token,
    not_believed,
    too_large,
)
from onnxtrain.federated.files import pack_arrays
from onnxtrain.federated.messages import ABOUT, CLIENT, as_error, printable, size_of
from onnxtrain.federated.rounds import (
    CLIP,
    FEDERATION,
    FLOWER_CLIP,
    INITIAL,
    LAST,
    ROUND,
    TOKEN,
    VERSION,
)
from onnxtrain.federated.stragglers import Stragglers
from onnxtrain.format.checkpoint.content import Array

_log = logging.getLogger("flwr")
T = TypeVar("T")
Settings = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
# Larger initial values are not sent; they belong in the client's artifacts.
MOST_INITIAL_BYTES = 1 << 28


@dataclass(frozen=True)
class LeftOut:
    """A client that was excluded from a round, and the reason."""

    round: int
    node: int
    reason: str


class Guarded(Strategy):
    """Any strategy, made robust.

    Args:
        strategy: the strategy that samples clients and averages their replies.
        config: settings of rounds, or a function from the number of the round to settings.
        name: the identity of the federation; a resumed one has the same.
        version: the version of the artifacts, which clients compare with their own.
        initial: initial values of the parameters that are not shared.
        rounds: the total number of rounds.
        done: the number of rounds that an earlier run has completed.
        variances: parameters that cannot be negative.
        statistics: running statistics, which include the variances.
        checks: what is checked in replies.
        after_round: called with the number of the round, the averaged arrays and the metrics.
        after_evaluation: called with the number of the round and its metrics.

    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        config: Settings | None = None,
        name: str = "",
        version: str | None = None,
        initial: Mapping[str, Array] | None = None,
        rounds: int = 0,
        done: int = 0,
        variances: Collection[str] = (),
        statistics: Collection[str] = (),
        checks: Checks | None = None,
        after_round: Callable[[int, ArrayRecord, MetricRecord], None] | None = None,
        after_evaluation: Callable[[int, MetricRecord], None] | None = None,
    ) -> None:
        self.strategy = strategy
        self.left_out: list[LeftOut] = []
        self.updates = 0
        # Nodes that have trained, and so have the initial values. Not saved: a node's context may
        # not outlive the run, and sending the values again does no harm.
        self._known: set[int] = set()
        self._config = config or {}
        self._variances, self._statistics = frozenset(variances), frozenset(statistics)
        self._checks = checks or Checks()
        self._name, self._version = name, version
        self._initial = _packed(initial or {})
        self._rounds, self._done = rounds, done
        self._after_round, self._after_evaluation = after_round, after_evaluation
        self._sent: dict[str, Array] = {}
        self._asked: dict[int, str | None] = {}  # nodes, and the tokens of their messages
        self._clip_norm: float | None = None
        self._stragglers = Stragglers()
        self._least = least_nodes(strategy)
        self._bytes_down, self._sent_at = 0, time.monotonic()
        # The metric by which the strategy weights replies, and its names of the records.
        self._weight = str(setting_of(strategy, "weighted_by_key", "num-examples"))
        arrays = str(setting_of(strategy, "arrayrecord_key", "arrays"))
        self._keys = {ArrayRecord: arrays, MetricRecord: "metrics"}

    def summary(self) -> None:
        """Log the settings of the strategy."""
        self.strategy.summary()

    # ---- training ------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages with weights and settings for the clients that the strategy samples."""
        self._sent = read_record(arrays)
        number, config, grid = self._settle(server_round, config, grid)
        return self._asking(self.strategy.configure_train(number, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy average the good replies."""
        number = server_round + self._done
        received = list(replies)
        seconds = time.monotonic() - self._sent_at
        bytes_up = sum(size_of(reply) for reply in received if not reply.has_error())
        good, bad = self._sorted(number, received, is_train=True)
        without = {*self._note_absent(number, received), *_nodes(bad)}
        self._known = (self._known - without) | _nodes(good)
        averaged = _averaged(self.strategy.aggregate_train, number, [*good, *bad])
        arrays, metrics = averaged or (None, None)
        arrays = self._checked_average(number, arrays)
        self.updates += arrays is not None
        if arrays is None:
            _log.warning("round %d: no update; the weights stay as they are", number)
        metrics = MetricRecord() if metrics is None else metrics
        metrics["clients"] = len(good)
        metrics["left-out"] = len(without)
        metrics["round_seconds"] = seconds
        metrics["bytes-up"], metrics["bytes-down"] = bytes_up, self._bytes_down
        _log.info("round %d: %d clients, %s bytes sent, %s received", number, len(good),
                  f"{self._bytes_down:,}", f"{bytes_up:,}")  # fmt: skip
        if self._after_round is not None:
            final = to_record(self._sent) if arrays is None else arrays
            self._after_round(number, final, metrics)
        return arrays, metrics

    def _checked_average(self, number: int, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """Return averaged arrays in the types that are sent, or None if one is not finite."""
        if arrays is None:
            return None
        values = {n: a.astype(self._sent[n].dtype) for n, a in read_record(arrays).items()}
        for name, array in values.items():
            if not np.isfinite(array).all():
                _log.warning(
                    "round %d: the strategy's average of %r is not finite; the round is discarded",
                    number, name,
                )  # fmt: skip
                return None
            if name in self._variances and (array < 0).any():
                # Momentum and noise overshoot; a negative variance makes the model return NaN.
                _log.warning("round %d: %r was below zero and is set to zero", number, name)
                values[name] = np.maximum(array, 0)
        return to_record({name: values[name] for name in self._sent if name in values})

    # ---- evaluation ----------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages with weights for the clients that evaluate them."""
        number, config, grid = self._settle(server_round, config, grid)
        return self._asking(self.strategy.configure_evaluate(number, arrays, config, grid))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Let the strategy average the good metrics."""
        number = server_round + self._done
        received = list(replies)
        good, bad = self._sorted(number, received, is_train=False)
        self._note_absent(number, received, round_ends=False)
        if not good:
            return None
        metrics = _averaged(self.strategy.aggregate_evaluate, number, [*good, *bad])
        if metrics is not None and self._after_evaluation is not None:
            self._after_evaluation(number, metrics)
        return metrics

    # ---- messages ------------------------------------------------------------------------------

    def _asking(self, configured: Iterable[Message]) -> list[Message]:
        """Record who is asked for what, and how many bytes that takes."""
        messages = list(configured)
        self._asked, self._clip_norm = {}, None
        self._bytes_down = sum(self._begin(message) + size_of(message) for message in messages)
        self._sent_at = time.monotonic()
        return messages

    def _settle(
        self, server_round: int, config: ConfigRecord, grid: Grid
    ) -> tuple[int, ConfigRecord, Grid]:
        """Return the number of the round, its settings, and the grid without skipped nodes.

        The settings are a copy: Flower passes one record from round to round, where strategies
        leave theirs.
        """
        number = server_round + self._done
        given = self._config(number) if callable(self._config) else self._config
        made = ConfigRecord({**config, **given})
        made[ROUND], made[LAST] = number, number == self._rounds
        made[FEDERATION] = self._name
        if self._version is not None:
            made[VERSION] = self._version
        return number, made, self._stragglers.exclude_from(grid, self._least)

    def _begin(self, message: Message) -> int:
        """Add a token, and initial values for a client that has not trained yet.

        Returns the size of these values.
        """
        node, records = message.metadata.dst_node_id, message.content.config_records
        self._asked[node] = None
        if not records:  # a strategy of its own kind
            return 0
        key, config = next(iter(records.items()))
        bounds = [config[name] for name in (CLIP, FLOWER_CLIP) if name in config]
        self._clip_norm = min((float(bound) for bound in bounds), default=self._clip_norm)
        self._asked[node] = token = secrets.token_hex(16)
        values = {**config, TOKEN: token}
        begins = bool(self._initial) and node not in self._known
        if begins:
            values[INITIAL] = self._initial
        message.content = RecordDict({**message.content, key: ConfigRecord(values)})
        return len(self._initial) if begins else 0

    def _leave_out(self, number: int, node: int, reason: str) -> None:
        reason = printable(reason)
        self.left_out.append(LeftOut(number, node, reason))
        _log.warning("round %d: node %d is left out: %s", number, node, reason)

    def _note_absent(
        self, number: int, replies: list[Message], *, round_ends: bool = True
    ) -> list[int]:
        """Record which nodes did not answer, with what the SuperLink reports."""
        # The reports do not name a node.
        said = "; ".join(dict.fromkeys(
            reply.error.reason for reply in replies
            if reply.has_error() and reply.metadata.src_node_id not in self._asked
        ))  # fmt: skip
        absent = self._stragglers.record(set(self._asked), _nodes(replies), round_ends=round_ends)
        for node in absent:
            self._leave_out(number, node, said or "it did not answer in time")
        return absent

    def _sorted(
        self, number: int, replies: list[Message], *, is_train: bool
    ) -> tuple[list[Message], list[Message]]:
        """Separate good replies from bad ones, and record why these are bad."""
        good: list[Message] = []
        bad: list[Message] = []

        def leave_out(reply: Message, reason: str) -> None:
            if reply.metadata.src_node_id in self._asked:  # or else a report of the SuperLink
                self._leave_out(number, reply.metadata.src_node_id, reason)
            bad.append(as_error(reply, reason))

        expected = Expected(self._sent, self._variances, self._statistics, self._clip_norm)
        for reply in self._asked_for(number, replies):
            if reply.has_error():
                leave_out(reply, reply.error.reason or f"error {reply.error.code}")
                continue
            try:
                token = self._asked[reply.metadata.src_node_id]
                if token is not None and self._checks.reply_token:
                    check_token(reply, token)
                if is_train:
                    check_arrays(reply, expected, self._checks)
                check_metrics(reply, self._weight, self._checks)
                as_sent(reply, self._keys)
            except OnnxTrainError as error:
                leave_out(reply, str(error))
            except Exception as error:  # a hostile reply may have any content
                leave_out(reply, f"it cannot be read: {type(error).__name__}: {error}")
            else:
                good.append(reply)

        def without(found: Mapping[int, str]) -> list[Message]:
            for place, reason in found.items():
                leave_out(good[place], reason)
            return [reply for place, reply in enumerate(good) if place not in found]

        good = without(not_believed(good, self._weight, self._checks))
        for place, claim in bound_examples(good, self._weight, self._checks).items():
            _log.warning("round %d: node %d claims %r = %s, far above the others; not all count",
                         number, good[place].metadata.src_node_id, self._weight, claim)  # fmt: skip
        if is_train:
            good = without(too_large(good, expected, self._weight, self._checks))
        _keep_common_metrics(good)
        # A sum of floats depends on the order of its terms, so they are not added as they arrive.
        return sorted(good, key=_place), bad

    def _asked_for(self, number: int, replies: list[Message]) -> Iterable[Message]:
        """Return errors, and the first reply of each node that was asked."""
        seen: set[int] = set()
        for reply in replies:
            node = reply.metadata.src_node_id
            if node in seen or (node not in self._asked and not reply.has_error()):
                _log.warning("round %d: node %d replies unasked; it is ignored", number, node)
                continue
            if node in self._asked:
                seen.add(node)
            yield reply


def _averaged(average: Callable[..., T], number: int, replies: list[Message]) -> T | None:
    """Return the strategy's average, or None: a failure costs one round only."""
    try:
        return average(number, replies)
    except (AggregationError, InconsistentMessageReplies) as error:
        _log.warning("round %d: the replies could not be averaged: %s", number, error)
    except Exception:  # a strategy may call the user's functions
        _log.exception("round %d: the replies could not be averaged", number)
    return None


def _nodes(replies: Iterable[Message]) -> set[int]:
    return {reply.metadata.src_node_id for reply in replies}


def _place(reply: Message) -> tuple[int, int]:
    own = reply.content.config_records.get(ABOUT)
    number = own.get(CLIENT) if own is not None else None
    node = reply.metadata.src_node_id
    return (number, node) if isinstance(number, int) else (1 << 63, node)


def _packed(initial: Mapping[str, Array]) -> bytes:
    size = sum(array.nbytes for array in initial.values())
    if size > MOST_INITIAL_BYTES:
        _log.warning(
            "%s bytes of parameters are not shared, too many to send: clients need "
            "artifacts with weights (pack(..., weights=True), or the folder)", f"{size:,}",
        )  # fmt: skip
        return b""
    return pack_arrays(initial) if initial else b""


def setting_of(strategy: Strategy, name: str, default: Any) -> Any:
    """Return a setting of the outermost of nested strategies that has it."""
    while not hasattr(strategy, name) and hasattr(strategy, "strategy"):
        strategy = strategy.strategy
    return getattr(strategy, name, default)


def least_nodes(strategy: Strategy) -> int:
    """Return the number of nodes that a strategy waits for, at least one."""
    names = ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes")
    return max(1, *(int(setting_of(strategy, name, 1)) for name in names))


def _keep_common_metrics(replies: list[Message]) -> None:
    """Drop metrics that some replies lack, or have in another length."""
    records = [next(iter(reply.content.metric_records.values())) for reply in replies]
    kinds = [
        {(key, len(value) if isinstance(value, list) else -1) for key, value in record.items()}
        for record in records
    ]
    common = {key for key, _ in set.intersection(*kinds)} if kinds else set()
    for record in records:
        for key in [key for key in record if key not in common]:
            del record[key]
