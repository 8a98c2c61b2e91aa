"""A federation in one process, for tests, notebooks and scripts: no Ray, no network."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

from onnxtrain.errors import ArgumentError
from onnxtrain.federated.failures import error_reply

Call = Callable[[Message, Context], Message]


class LocalGrid(Grid):
    """A grid that calls clients instead of sending messages.

    Args:
        client: a `ClientApp`, or any function of a message and a context that returns a reply.
        clients: the number of clients, or the configuration of each node.
        run_config: the configuration of the run.
        workers: the number of clients that run at the same time, in threads.

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
        """Do nothing: there is only one run."""

    @property
    def run(self) -> Any:
        """Not available."""
        raise NotImplementedError("a local federation has no run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Start the clients in threads; return the ids of the messages."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers)
        ids = []
        for message in messages:
            ids.append(secrets.token_hex(8))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._answers[ids[-1]] = self._pool.submit(self._answer, message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        done = [i for i in message_ids if i in self._answers and self._answers[i].done()]
        return [self._answers.pop(i).result() for i in done]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Call the clients and return their replies."""
        if self._workers == 1:
            return [self._answer(message) for message in messages]
        with ThreadPoolExecutor(self._workers) as pool:
            return list(pool.map(self._answer, messages))

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        try:
            # Each client gets its own copy of the records, as over a network.
            configs = {k: ConfigRecord(dict(v)) for k, v in message.content.config_records.items()}
            own = Message(RecordDict({**message.content, **configs}), metadata=message.metadata)
            reply = self._client(own, context)
            # As over a network, where the SuperLink knows who is connected.
            reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
            return reply
        except Exception as error:  # one client must not end the others
            return error_reply(message, error, "client")


def run_locally(
    server: ServerApp,
    client: ClientApp | Call,
    clients: int | Iterable[Mapping[str, Any]],
    run_config: Mapping[str, Any] | None = None,
    workers: int = 1,
) -> LocalGrid:
    """Run a federation in this process; see `LocalGrid` for the arguments."""
    grid = LocalGrid(client, clients, run_config, workers)
    server(grid, Context(1, 0, {}, RecordDict(), dict(run_config or {})))
    return grid
