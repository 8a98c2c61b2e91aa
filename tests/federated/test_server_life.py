"""What a server refuses before the first round, survives during one, and keeps after the last."""

import logging
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, arrays, federate, images, images_of_client, of_client, rows
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import strategy as flower

from onnxtrain.errors import ArgumentError, OnnxTrainError, StateError
from onnxtrain.federated import LocalGrid, client_app, open_artifacts, pack, server_app
from onnxtrain.federated.progress import Progress, capture, locked, restore, settings_of
from onnxtrain.federated.selection import variances
from onnxtrain.federated.server import Server

MLP, CNN = GOLDEN / "mlp", GOLDEN / "cnn"
good = client_app(MLP, of_client, of_client, metrics=["accuracy"])
ALONE = {"min_train_nodes": 1, "min_available_nodes": 1, "min_evaluate_nodes": 1}


def config_of(message):
    return next(iter(message.content.config_records.values()))


def is_training(message) -> bool:
    return message.metadata.message_type == "train"


# ---- settings ------------------------------------------------------------------------------------


def test_settings_of_a_round_do_not_last_into_the_next() -> None:
    seen = []

    def client(message, context):
        if context.node_config["partition-id"] == 0:
            seen.append({k: v for k, v in config_of(message).items() if k in ("clip-norm", "seed")})
        return good(message, context)

    federate(MLP, client, rounds=2,
             config=lambda n: {**FAST, "clip-norm": 0.5} if n == 1 else {"seed": 4})  # fmt: skip
    train_and_evaluate = 2
    assert seen == [{"clip-norm": 0.5, "seed": 3}] * train_and_evaluate + [{"seed": 4}] * 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"learning-rate": "0.05"}, "'learning-rate' is '0.05'"),
        ({"local-epochs": 0}, "'local-epochs' is 0"),
        ({"compression": "gzip"}, "gzip"),
        ({"learning-rate": None}, "'learning-rate' is None"),
        (lambda number: None, "returned None for round 1"),
    ],
)
def test_settings_that_no_client_can_satisfy_stop_the_server(config, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        federate(MLP, good, config=config)


def test_numbers_of_numpy_are_numbers_and_names_with_underscores_are_noticed(caplog) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        federate(MLP, good, rounds=1, config={**FAST, "learning-rate": np.float32(0.01),
                                             "local_epochs": 3})  # fmt: skip
    assert "'local_epochs'; did you mean 'local-epochs'?" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": flower.FedAvg}, r"FedAvg\(\)"),
        ({"strategy": "fedavgg"}, "one of Flower's"),
        ({"strategy": "krum"}, "number of hostile clients"),
        ({"strategy": "trimmed-mean:0.5"}, "trimmed-mean:0.3"),
        ({"checks": 5}, "Checks"),
        ({"which": 5}, "not 5"),
        ({"patience": "x"}, "patience is a number"),
        ({"wait_for": "x"}, "wait_for is a number"),
        ({"timeout": -1}, "timeout is a number"),
        ({"outputs": "scores", "export": "m.onnx"}, "outputs is a list"),
        ({"finish": lambda result: None}, "finish takes"),
    ],
)
def test_arguments_are_checked_when_the_app_is_made(arguments, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        server_app(MLP, **arguments)


@pytest.mark.parametrize("which", [[], ()])
def test_nothing_to_share_is_no_federation(which) -> None:
    with pytest.raises(ArgumentError, match="leaves no parameter to share"):
        federate(MLP, good, which=which)


def test_an_app_that_runs_twice_shares_the_same(tmp_path) -> None:
    app = server_app(MLP, num_rounds=1, which=(n for n in ["fc1.*"]), config=FAST, state=tmp_path,
                     resume=False)  # fmt: skip
    from onnxtrain.federated import run_locally

    for _ in range(2):
        run_locally(app, good, 2)
        assert set(Progress.read(tmp_path).arrays) == {"fc1.weight", "fc1.bias"}


@pytest.mark.parametrize(("export", "outputs"), [("m.onnx", ["nope"]), (".", ["output"])])
def test_an_export_that_can_only_fail_does_so_before_the_first_round(
    export, outputs, tmp_path
) -> None:
    def nobody(message, context):
        raise AssertionError("nobody is asked")

    with pytest.raises(OnnxTrainError):
        federate(MLP, nobody, export=tmp_path / export, outputs=outputs)


def test_a_local_federation_does_not_wait_for_clients_that_never_come() -> None:
    with pytest.raises(ArgumentError, match="there are 1 clients, and the strategy waits for 2"):
        federate(MLP, good, clients=1)
    assert federate(MLP, good, flower.FedAvg(**ALONE), clients=1, rounds=1).train_metrics_clientapp


def test_fedprox_with_artifacts_that_have_no_such_term() -> None:
    with pytest.raises(ArgumentError, match="proximal=True"):
        federate(MLP, good, flower.FedProx(proximal_mu=0.1))
    federate(MLP, good, flower.FedProx(proximal_mu=0.0), rounds=1)


# ---- replies -------------------------------------------------------------------------------------


def test_metrics_of_different_kinds_are_not_averaged() -> None:
    def client(message, context):
        reply = good(message, context)
        if context.node_config["partition-id"] == 1:
            numbers = {"num-examples": 60, "eval_loss": [1.0, 2.0], "train_loss": [1.0, 2.0]}
            reply.content["metrics"] = MetricRecord(numbers)
        return reply

    result = federate(MLP, client)
    assert [m["clients"] for m in result.train_metrics_clientapp.values()] == [3, 3]
    assert "train_loss" not in result.train_metrics_clientapp[2]


def test_a_strategy_that_fails_costs_the_round_and_not_the_federation(caplog) -> None:
    def broken(records, key):
        raise ZeroDivisionError("of the user's")

    strategy = flower.FedAvg(
        train_metrics_aggr_fn=broken, evaluate_metrics_aggr_fn=broken, min_available_nodes=3
    )
    with caplog.at_level(logging.WARNING, "flwr"):
        result = federate(MLP, good, strategy)
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert "no round had an update" in caplog.text


def test_numbers_that_are_too_large_for_the_type_are_not_finite() -> None:
    def client(message, context):
        reply = good(message, context)
        if is_training(message) and context.node_config["partition-id"] == 1:
            values = {n: a.numpy().astype(np.float64) for n, a in reply.content["arrays"].items()}
            values["fc1.weight"] *= 1e200
            reply.content["arrays"] = ArrayRecord({n: Array(a) for n, a in values.items()})
        return reply

    server = Server(open_artifacts(MLP), flower.FedAvg(fraction_evaluate=0.0), rounds=1)
    server.run(LocalGrid(client, 3), FAST)
    (left_out,) = server.guarded.left_out
    assert "not finite" in left_out.reason and server.guarded.updates == 1


def test_errors_do_not_count_as_answers_of_a_round_that_is_patient() -> None:
    def client(message, context):
        if context.node_config["partition-id"] < 2:
            raise ValueError("no data")
        time.sleep(3.0)
        return good(message, context)

    from onnxtrain.federated.stragglers import DeadlineGrid

    server = Server(open_artifacts(MLP), flower.FedAvg(fraction_evaluate=0.0), rounds=1)
    grid = DeadlineGrid(LocalGrid(client, 4, workers=4), 1.0, 2, seconds=1.0)
    result = server.run(grid, FAST)
    assert result.train_metrics_clientapp[1]["clients"] == 2


def test_running_variances_do_not_fall_below_zero(tmp_path, caplog) -> None:
    """Momentum overshoots; the exported model would give nothing but nan."""
    session = open_artifacts(CNN).session()
    names = variances(session)
    assert names and names < set(session.module.statistics)
    app = client_app(CNN, images_of_client, images_of_client)
    strategy = flower.FedAvgM(server_learning_rate=3.0, server_momentum=0.9)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = federate(CNN, app, strategy, rounds=5, evaluate=images(9), config=FAST)
    assert "was below zero" in caplog.text
    assert min(arrays(result)[name].min() for name in names) >= 0


# ---- what clients begin with ---------------------------------------------------------------------


def test_a_client_that_only_evaluated_is_sent_what_it_begins_with_again(tmp_path) -> None:
    """Its package has no weights, and evaluation keeps nothing."""
    pack(MLP, tmp_path / "package.json")
    app = client_app(tmp_path / "package.json", of_client, of_client)
    strategy = flower.FedAvg(fraction_train=0.5, min_train_nodes=1)
    server = Server(open_artifacts(MLP), strategy, rounds=4, which=["!fc2.*"])
    server.run(LocalGrid(app, 3), FAST)
    assert server.guarded.left_out == []


def test_a_restarted_server_sends_it_again(tmp_path) -> None:
    pack(MLP, tmp_path / "package.json")
    app = client_app(tmp_path / "package.json", of_client, of_client)
    for rounds in (2, 4):  # new contexts each time
        result = federate(MLP, app, rounds=rounds, which=["!fc2.*"], state=tmp_path / "state")
    clients = [m["clients"] for _, m in sorted(result.train_metrics_clientapp.items())]
    assert clients == [3, 3, 3, 3]


def test_a_client_that_lost_what_it_had_is_back_in_the_next_round(tmp_path) -> None:
    pack(MLP, tmp_path / "package.json")
    app = client_app(tmp_path / "package.json", of_client, of_client)

    def client(message, context):
        forgets = context.node_config["partition-id"] == 1 and is_training(message)
        if forgets and config_of(message)["server-round"] == 3:
            context.state.clear()
        return app(message, context)

    result = federate(MLP, client, rounds=5, which=["!fc2.*"])
    clients = [m["clients"] for _, m in sorted(result.train_metrics_clientapp.items())]
    assert clients == [3, 3, 2, 3, 3]
    down = [m["bytes-down"] for _, m in sorted(result.train_metrics_clientapp.items())]
    assert down[0] > down[3] > down[1] == down[2] == down[4]


# ---- evaluation on the server --------------------------------------------------------------------


def test_a_generator_function_gives_data_for_every_evaluation() -> None:
    def batches(context):
        for number in range(3):
            yield rows(number)

    result = federate(MLP, good, evaluate=batches)
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]


def test_an_evaluation_that_fails_later_is_noted_and_one_that_fails_at_once_is_refused(
    caplog,
) -> None:
    calls = []

    def sometimes(context):
        def batches():
            calls.append(1)
            x, labels = rows(0)
            yield (x * np.nan if len(calls) == 2 else x), labels

        return batches

    with caplog.at_level(logging.WARNING, "flwr"):
        result = federate(MLP, good, evaluate=sometimes)
    assert sorted(result.evaluate_metrics_serverapp) == [0, 2]
    assert "round 1: evaluation on the server failed" in caplog.text
    with pytest.raises(OnnxTrainError):
        federate(MLP, good, evaluate=(rows(0)[0] * np.nan, rows(0)[1]))


# ---- what is kept --------------------------------------------------------------------------------


def test_an_evaluation_that_a_stop_prevented_is_made_up_for(tmp_path) -> None:
    whole = federate(MLP, good, rounds=2, evaluate=rows(9))

    def stops(message, context):
        if not is_training(message) and config_of(message)["server-round"] == 2:
            raise KeyboardInterrupt
        return good(message, context)

    with pytest.raises(KeyboardInterrupt):
        federate(MLP, stops, rounds=2, evaluate=rows(9), state=tmp_path)
    parts = federate(MLP, good, rounds=2, evaluate=rows(9), state=tmp_path)
    assert parts.evaluate_metrics_clientapp == whole.evaluate_metrics_clientapp
    assert parts.evaluate_metrics_serverapp == whole.evaluate_metrics_serverapp


class Counting(flower.FedAvg):
    """A strategy with a state of every kind."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.rates = [0.1, 0.2]
        self.losses, self.by_round, self.pair = [], {}, (0, np.zeros(2))
        self.scale = np.float32(1.0)

    def aggregate_train(self, server_round, replies):
        self.losses.append(float(server_round))
        self.by_round[server_round] = np.int64(server_round)
        self.pair = (server_round, np.full(2, server_round))
        self.scale = np.float32(server_round / 2)
        return super().aggregate_train(server_round, replies)


def test_the_state_of_a_strategy_comes_back(tmp_path) -> None:
    federate(MLP, good, Counting(), rounds=2, state=tmp_path)
    strategy = Counting()
    strategy.rates = [0.3]  # a setting, which is not part of its state
    federate(MLP, good, strategy, rounds=3, state=tmp_path)
    assert strategy.losses == [1.0, 2.0, 3.0] and strategy.rates == [0.3]
    assert strategy.by_round == {1: 1, 2: 2, 3: 3}
    assert all(isinstance(n, np.int64) for n in strategy.by_round.values())
    assert strategy.pair[0] == 3 and strategy.scale == np.float32(1.5)


def test_a_state_that_cannot_be_saved_does_not_end_the_federation(tmp_path, caplog) -> None:
    class Odd(flower.FedAvg):
        def state_dict(self):
            return {"steps": np.int64(3), "lock": object()}

        def load_state_dict(self, state):
            raise AssertionError("nothing was saved")

    with caplog.at_level(logging.WARNING, "flwr"):
        federate(MLP, good, Odd(), rounds=1, state=tmp_path)
        federate(MLP, good, Odd(), rounds=2, state=tmp_path)
    assert "state_dict() of Odd" in caplog.text
    plain = flower.FedAvg()
    restore(plain, capture(plain, settings_of(plain)))


def test_a_federation_does_not_go_on_with_another_strategy(tmp_path) -> None:
    federate(MLP, good, flower.FedAdam(), rounds=1, state=tmp_path)
    with pytest.raises(StateError, match="was run with FedAdam, not with FedAvg"):
        federate(MLP, good, flower.FedAvg(), rounds=2, state=tmp_path)


def test_a_damaged_history_costs_metrics_only(tmp_path, caplog) -> None:
    first = federate(MLP, good, rounds=1, state=tmp_path)
    (tmp_path / "history.json").write_text("{")
    with caplog.at_level(logging.WARNING, "flwr"):
        again = federate(MLP, good, rounds=1, state=tmp_path)
    assert "history.json cannot be read" in caplog.text
    assert {n: a.tobytes() for n, a in arrays(first).items()} == {
        n: a.tobytes() for n, a in arrays(again).items()
    }


def test_two_servers_do_not_share_a_folder(tmp_path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(StateError, match="another server runs a federation"),
    ):
        federate(MLP, good, rounds=1, state=tmp_path)
    federate(MLP, good, rounds=1, state=tmp_path)


PROGRAM = """
import sys, time
from pathlib import Path
from onnxtrain.federated.progress import locked
with locked(Path(sys.argv[1])):
    if len(sys.argv) > 2:
        import os
        if os.fork() == 0:
            time.sleep(5)  # a child that outlives the server
            os._exit(0)
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_server_of_another_process_has_the_folder_until_it_ends(tmp_path) -> None:
    pytest.importorskip("fcntl", reason="Windows has no such locks")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "fork"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout.readline() == "locked\n"
        second = subprocess.run(command[:-1], input="", capture_output=True, text=True)
        assert "another server runs a federation" in second.stderr
        first.kill()
    third = subprocess.run(command[:-1], input="", capture_output=True, text=True)
    assert third.stdout == "locked\n", third.stderr
