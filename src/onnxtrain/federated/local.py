"""A federation in one process: no Ray, no network, the same apps. For tests, notebooks, scripts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

from onnxtrain.errors import ArgumentError

_log = logging.getLogger("flwr")
_RAISED = 2
Call = Callable[[Message, Context], Message]


class LocalGrid(Grid):
    """Calls clients instead of sending messages to them.

    Args:
        client: a `ClientApp`, or any function of a message and a context that returns a reply.
        clients: how many there are, or the configuration of each node.
        run_config: the configuration of the run.
        workers: how many clients work at the same time, in threads.

    """

    def __init__(
        self,
        client: ClientApp | Call,
        clients: int | Iterable[Mapping[str, Any]],
        run_config: Mapping[str, Any] | None = None,
        workers: int = 1,
    ) -> None:
        if isinstance(clients, int):
            clients = [{"partition-id": i, "num-partitions": clients} for i in range(clients)]
        self._client = client
        self._workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self._answers: dict[str, Future[Message]] = {}
        self.contexts = {
            number: Context(1, number, dict(node), RecordDict(), dict(run_config or {}))
            for number, node in enumerate(clients, start=1)
        }
        if not self.contexts:
            raise ArgumentError("a federation has at least one client")
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Any) -> None:
        """There is one run only."""

    @property
    def run(self) -> Any:
        """There is nothing to be known of the run."""
        raise NotImplementedError("a local federation has no run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let clients begin to answer, in threads; return the numbers of the messages."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers)
        numbers = []
        for message in messages:
            number = secrets.token_hex(8)
            message.metadata.__dict__["_message_id"] = number
            self._answers[number] = self._pool.submit(self._answer, message)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers that are there."""
        done = [n for n in message_ids if n in self._answers and self._answers[n].done()]
        return [self._answers.pop(number).result() for number in done]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Let clients answer."""
        if self._workers == 1:
            return [self._answer(message) for message in messages]
        with ThreadPoolExecutor(self._workers) as pool:
            return list(pool.map(self._answer, messages))

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            # Each has records of its own, as it would have them from the network.
            configs = {k: ConfigRecord(dict(v)) for k, v in message.content.config_records.items()}
            own = Message(RecordDict({**message.content, **configs}), metadata=message.metadata)
            return self._client(own, context)
        except Exception as error:  # a client that fails is none of the others' business
            _log.exception("a client failed")
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(code=_RAISED, reason=reason), reply_to=message)


def run_locally(
    server: ServerApp,
    client: ClientApp | Call,
    clients: int | Iterable[Mapping[str, Any]],
    run_config: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> LocalGrid:
    """Run an app in this process, with so many clients; see `LocalGrid`."""
    grid = LocalGrid(client, clients, run_config, workers)
    server(grid, Context(1, 0, {}, RecordDict(), dict(run_config or {})))
    return grid
