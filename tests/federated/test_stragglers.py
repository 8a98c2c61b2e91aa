"""Clients that do not answer: rounds do not wait for ever, and do not ask them again at once."""

import threading
import time

import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, of_client
from flwr.serverapp.strategy import FedAvg

from onnxtrain.errors import ArgumentError
from onnxtrain.federated import LocalGrid, client_app, open_artifacts, server_app
from onnxtrain.federated.server import Server
from onnxtrain.federated.stragglers import DeadlineGrid, Stragglers

good = client_app(GOLDEN / "mlp", of_client)


def test_a_round_does_not_wait_for_a_client_that_hangs() -> None:
    released = threading.Event()
    asked = []

    def client(message, context):
        number = next(iter(message.content.config_records.values()))["server-round"]
        asked.append((number, context.node_config["partition-id"]))
        if context.node_config["partition-id"] == 1 and number in (2, 4):
            released.wait(120)
        return good(message, context)

    server = Server(
        open_artifacts(GOLDEN / "mlp"), FedAvg(fraction_evaluate=0.0, min_train_nodes=2), rounds=6
    )
    began = time.monotonic()
    grid = LocalGrid(client, 3, workers=6)
    try:
        result = server.run(DeadlineGrid(grid, 1.5, 2, seconds=2.0), FAST)
    finally:
        released.set()
    assert time.monotonic() - began < 100  # it would have been two times 120 otherwise
    clients = [m["clients"] for _, m in sorted(result.train_metrics_clientapp.items())]
    # Left out in 2, not asked in 3, left out in 4, not asked in 5 and 6: twice as long.
    assert clients == [3, 2, 2, 2, 2, 2]
    assert [number for number, client in asked if client == 1] == [1, 2, 4]
    assert server.guarded is not None
    assert [(o.round, o.reason) for o in server.guarded.left_out] == [
        (2, "it did not answer in time"), (4, "it did not answer in time"),
    ]  # fmt: skip


def test_how_long_a_silent_node_is_passed_over() -> None:
    stragglers, grid = Stragglers(), LocalGrid(good, 3)
    assert stragglers.record({1, 2, 3}, {1, 2, 3}) == []
    assert stragglers.exclude_from(grid, 2) is grid
    assert stragglers.record({1, 2, 3}, {1, 3}) == [2]
    assert list(stragglers.exclude_from(grid, 2).get_node_ids()) == [1, 3]
    assert stragglers.exclude_from(grid, 3) is grid  # too few would be left
    assert stragglers.record({1, 3}, {1, 3}) == []
    assert stragglers.exclude_from(grid, 2) is grid
    assert stragglers.record({1, 2, 3}, {1, 3}) == [2]
    for _ in range(2):
        assert list(stragglers.exclude_from(grid, 2).get_node_ids()) == [1, 3]
        stragglers.record({1, 3}, {1, 3})
    assert stragglers.exclude_from(grid, 2) is grid
    stragglers.record({1, 2, 3}, {1, 2, 3})
    stragglers.record({1, 2, 3}, {1, 3})
    stragglers.record({1, 3}, {1, 3})
    assert stragglers.exclude_from(grid, 2) is grid  # an answer makes up for what was before


def test_a_grid_that_waits_passes_everything_on() -> None:
    grid = LocalGrid(good, 3, workers=3)
    waiting = DeadlineGrid(grid, 2.0, 3)
    server = Server(open_artifacts(GOLDEN / "mlp"), FedAvg(fraction_evaluate=0.0), rounds=2)
    result = server.run(waiting, FAST)
    assert [m["clients"] for m in result.train_metrics_clientapp.values()] == [3, 3]


def test_a_deadline_ends_a_round() -> None:
    released = threading.Event()

    def nobody(message, context):
        released.wait(60)
        return good(message, context)

    server = Server(open_artifacts(GOLDEN / "mlp"), FedAvg(fraction_evaluate=0.0), rounds=1)
    try:
        result = server.run(
            DeadlineGrid(LocalGrid(nobody, 3, workers=3), 2.0, 2), FAST, timeout=0.5
        )
    finally:
        released.set()
    assert result.train_metrics_clientapp[1]["left-out"] == 3


def test_patience_that_makes_no_sense() -> None:
    with pytest.raises(ArgumentError, match="patience"):
        server_app(GOLDEN / "mlp", patience=0.5)
