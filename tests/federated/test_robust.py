"""Clients that fail, in every way, and servers that are started again: the federation goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from federations import FAST, GOLDEN, LOG, arrays, federate, of_client, rows, same
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from onnxtrain.errors import ArgumentError, StateError
from onnxtrain.federated import LocalGrid, client_app, open_artifacts
from onnxtrain.federated.server import Server

HERE = Path(__file__).parent
good = client_app(GOLDEN / "mlp", of_client, of_client, metrics=["accuracy"])


def spoiled(how):
    """A client that is good, but for the one whose reply is changed."""

    def answer(message, context):
        reply = good(message, context)
        if context.node_config["partition-id"] != 1 or message.metadata.message_type != "train":
            return reply
        made = how(message, reply.content)
        return Message(made, reply_to=message) if isinstance(made, RecordDict) else made

    return answer


def with_arrays(change):
    def how(message, content):
        values = {n: a.numpy().copy() for n, a in content["arrays"].items()}
        changed = change(values) or values
        content["arrays"] = ArrayRecord({n: Array(np.asarray(a)) for n, a in changed.items()})
        return content

    return spoiled(how)


def with_metrics(**changed):
    def how(message, content):
        numbers = {**content["metrics"], **{k.replace("_", "-"): v for k, v in changed.items()}}
        content["metrics"] = MetricRecord({k: v for k, v in numbers.items() if v is not None})
        return content

    return spoiled(how)


def nan(values):
    values["fc2.bias"][1] = np.nan


def inf(values):
    values["fc1.weight"][0, 0] = np.inf


def other_shape(values):
    values["fc2.bias"] = np.zeros(4, np.float32)


def transposed(values):
    values["fc2.weight"] = values["fc2.weight"].T


def missing(values):
    del values["fc1.bias"]


def more(values):
    values["fc3.bias"] = np.zeros(3, np.float32)


def integers(values):
    values["fc2.bias"] = np.zeros(3, np.int64)


def broken(message, content):
    content["arrays"]["fc2.bias"] = Array("float32", (3,), "numpy.ndarray", b"xx")
    return content


def unknown_compression(message, content):
    content["arrays"]["fc2.bias"] = Array("float32", (3,), "onnxtrain/zip", b"xx")
    return content


def nothing(message, content):
    return RecordDict()


def raising(message, content):
    raise OSError("the disk is full")


def without_data(context):
    return None if context.node_config["partition-id"] == 1 else of_client(context)


def with_empty_data(context):
    x, y = of_client(context)
    return (x[:0], y[:0]) if context.node_config["partition-id"] == 1 else (x, y)


def with_nan_data(context):
    x, y = of_client(context)
    if context.node_config["partition-id"] == 1:
        x[3, 2] = np.nan
    return x, y


def with_wrong_data(context):
    x, y = of_client(context)
    return (x[:, :5] if context.node_config["partition-id"] == 1 else x), y


def with_a_broken_loader(context):
    if context.node_config["partition-id"] == 1:
        raise FileNotFoundError("user.npz")
    return of_client(context)


BAD = {
    "nan": (with_arrays(nan), "its 'fc2.bias' has 1 values that are not finite"),
    "inf": (with_arrays(inf), "its 'fc1.weight' has 1 values that are not finite"),
    "other shape": (with_arrays(other_shape), "has the shape [4] instead of [3]"),
    "transposed": (with_arrays(transposed), "has the shape [16, 3] instead of [3, 16]"),
    "missing array": (with_arrays(missing), "it has no 'fc1.bias'"),
    "more arrays": (with_arrays(more), "it has 'fc3.bias', which is unknown"),
    "integers": (with_arrays(integers), "is int64 instead of a float"),
    "broken bytes": (spoiled(broken), "the array 'fc2.bias' cannot be read"),
    "unknown compression": (spoiled(unknown_compression), "compressed in an unknown way: 'zip'"),
    "no weight": (with_metrics(num_examples=None), "it has no 'num-examples'"),
    "no samples": (with_metrics(num_examples=0), "it has no data"),
    "less than none": (with_metrics(num_examples=-5), "it has no data"),
    "nan as loss": (with_metrics(loss=float("nan")), "its 'loss' is nan"),
    "empty reply": (spoiled(nothing), "does not repeat the token"),
    "exception": (spoiled(raising), "OSError at client"),
    "no data": (client_app(GOLDEN / "mlp", without_data), "ArgumentError at training data"),
    "empty data": (client_app(GOLDEN / "mlp", with_empty_data), "ArgumentError at training data"),
    "nan in data": (client_app(GOLDEN / "mlp", with_nan_data), "NonFiniteError at training"),
    "wrong data": (client_app(GOLDEN / "mlp", with_wrong_data), "InputError at training"),
    "broken loader": (client_app(GOLDEN / "mlp", with_a_broken_loader), "FileNotFoundError at tra"),
}  # fmt: skip


def run(client, strategy=None, rounds=1, **options):
    """Run a federation with access to what the server noted."""
    server = Server(
        open_artifacts(GOLDEN / "mlp"), strategy or flower.FedAvg(fraction_evaluate=0.0),
        rounds=rounds, **options,
    )  # fmt: skip
    result = server.run(LocalGrid(client, 3), FAST)
    return server, result


@pytest.mark.parametrize("name", BAD)
def test_a_bad_client_is_left_out_and_it_is_said_why(name) -> None:
    client, words = BAD[name]
    server, result = run(client)
    assert server.guarded is not None
    (left_out,) = server.guarded.left_out
    assert words in left_out.reason
    assert left_out.round == 1
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["clients"], metrics["left-out"]) == (2, 1)
    # The others count as if it had never been there.
    two = [{"partition-id": 0}, {"partition-id": 2}]
    wanted = federate(GOLDEN / "mlp", good, flower.FedAvg(fraction_evaluate=0.0), clients=two,
                      rounds=1)  # fmt: skip
    assert same(arrays(result), arrays(wanted))


@pytest.mark.parametrize("name", ["FedAdam", "FedMedian", "Krum", "QFedAvg", "FedAvgM", "Bulyan"])
def test_bad_clients_do_not_stop_other_strategies(name) -> None:
    options = {"fraction_evaluate": 0.0}
    if name == "QFedAvg":
        options["client_learning_rate"] = 0.1
    _, result = run(BAD["nan"][0], getattr(flower, name)(**options), rounds=2)
    assert [m["left-out"] for m in result.train_metrics_clientapp.values()] == [1, 1]


def test_the_weights_stay_if_all_clients_fail() -> None:
    _, result = run(client_app(GOLDEN / "mlp", lambda context: None), rounds=2)
    began = open_artifacts(GOLDEN / "mlp").session().state.parameters
    assert same(arrays(result), {name: parameter.data for name, parameter in began})
    assert result.train_metrics_clientapp[2]["clients"] == 0


def test_artifacts_of_another_version(tmp_path) -> None:
    """Same parameters, another optimizer: nothing else would notice."""
    sys.path.insert(0, str(GOLDEN))
    from make_artifacts import mlp

    from onnxtrain import artifacts

    artifacts.generate_artifacts(
        mlp(), loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.SGD,
        artifact_directory=tmp_path, additional_output_names=["output"],
    )  # fmt: skip
    old = client_app(tmp_path, of_client)

    def client(message, context):
        return (old if context.node_config["partition-id"] == 1 else good)(message, context)

    server, _ = run(client)
    (left_out,) = server.guarded.left_out
    assert left_out.reason == "StateError at artifacts version"
    assert "install the server's artifacts here" in LOG.texts[-1]
    trusting, _ = run(client, check_version=False)
    assert not trusting.guarded.left_out


def test_a_client_of_another_model_is_left_out() -> None:
    from federations import images_of_client

    other = client_app(GOLDEN / "cnn", images_of_client)

    def client(message, context):
        if context.node_config["partition-id"] == 1:
            del next(iter(message.content.config_records.values()))["onnxtrain-artifacts"]
            return other(message, context)
        return good(message, context)

    server, _ = run(client)
    (left_out,) = server.guarded.left_out
    assert left_out.reason == "UnknownNameError at received weights"
    assert "there is no parameter 'fc1.weight' here" in LOG.texts[-1]


@pytest.mark.parametrize(
    "config",
    [{"learning-rate": -1.0}, {"learning-rate": float("nan")}, {"local-epochs": 0},
     {"local-epochs": 1.5}, {"batch-size": 0}, {"seed": -1}, {"proximal-mu": 0.1},
     {"clip-norm": 0.0}, {"compression": "zip"}, {"compression": "top-k:2"},
     {"compression": "top-k:x"}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_said(config) -> None:
    server = Server(open_artifacts(GOLDEN / "mlp"), flower.FedAvg(fraction_evaluate=0.0), rounds=1)
    server.run(LocalGrid(good, 3), {**FAST, **config})
    assert len(server.guarded.left_out) == 3
    key = next(iter(config))
    said = {left_out.reason.partition(" at ")[2] for left_out in server.guarded.left_out}
    assert said == {f"setting {key}"}


def test_a_node_without_a_partition_and_with_the_largest_number(tmp_path) -> None:
    """Nodes are numbered with 64 bits, and what travels has a sign."""
    from flwr.app import ConfigRecord, Context
    from flwr.common.serde import recorddict_to_proto

    app = client_app(GOLDEN / "mlp", rows(0), state=tmp_path, keep_optimizer=True)
    grid = LocalGrid(app, 1)
    session = open_artifacts(GOLDEN / "mlp").session()
    from onnxtrain.federated import to_arrays

    content = RecordDict({"arrays": to_arrays(session), "config": ConfigRecord(dict(FAST))})
    message = grid.create_message(content, "train", 1, "1")
    reply = app(message, Context(1, 2**64 - 1, {}, RecordDict(), {}))
    assert not reply.has_error()
    assert recorddict_to_proto(reply.content).ByteSize() > 100
    assert [file.name for file in tmp_path.iterdir()] == ["client-0.npz"]


# ---- servers that are started again --------------------------------------------------------------

STATEFUL = {
    "FedAvg": flower.FedAvg,
    "FedAvgM": lambda: flower.FedAvgM(server_learning_rate=0.9, server_momentum=0.5),
    "FedAdam": lambda: flower.FedAdam(eta=0.05),
    "FedYogi": lambda: flower.FedYogi(eta=0.05),
    "adaptive": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        flower.FedAdam(eta=0.05), 0.0, 3, initial_clipping_norm=0.3, clipped_count_stddev=0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", STATEFUL)
def test_a_server_that_is_started_again_goes_on(name, tmp_path) -> None:
    whole = federate(GOLDEN / "mlp", good, STATEFUL[name](), rounds=5, evaluate=rows(9))
    for rounds in (2, 3, 5):
        parts = federate(GOLDEN / "mlp", good, STATEFUL[name](), rounds=rounds, state=tmp_path,
                         evaluate=rows(9))  # fmt: skip
    assert same(arrays(whole), arrays(parts))
    for kind in ("evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        assert getattr(whole, kind) == getattr(parts, kind)
    assert sorted(parts.train_metrics_clientapp) == [1, 2, 3, 4, 5]


def test_a_federation_that_is_over_is_not_repeated(tmp_path) -> None:
    first = federate(GOLDEN / "mlp", good, rounds=2, state=tmp_path)

    def nobody(message, context):
        raise AssertionError("nobody is asked")

    again = federate(GOLDEN / "mlp", nobody, rounds=2, state=tmp_path, export=tmp_path / "m.onnx",
                     outputs=["output"])  # fmt: skip
    assert same(arrays(first), arrays(again))
    assert (tmp_path / "m.onnx").exists()


def test_a_server_does_not_go_on_with_another_federation(tmp_path) -> None:
    federate(GOLDEN / "mlp", good, rounds=1, state=tmp_path)
    with pytest.raises(StateError, match="federation of other artifacts"):
        federate(GOLDEN / "cnn", good, rounds=2, state=tmp_path)
    with pytest.raises(StateError, match="shares other parameters"):
        federate(GOLDEN / "mlp", good, rounds=2, state=tmp_path, which=["fc1.*"])
    fresh = federate(GOLDEN / "mlp", good, rounds=2, state=tmp_path, resume=False)
    assert sorted(fresh.train_metrics_clientapp) == [1, 2]
    (tmp_path / "federation.npz").write_bytes(b"PK nothing")
    with pytest.raises(StateError, match="delete it to start anew"):
        federate(GOLDEN / "mlp", good, rounds=2, state=tmp_path)


def test_a_server_that_was_killed_goes_on_to_the_same_weights(tmp_path) -> None:
    """Killed with no warning in its third round, by its own client."""
    program = HERE / "resume_program.py"

    def start(folder, kill_at):
        return subprocess.run(
            [sys.executable, str(program), str(folder), str(kill_at)], capture_output=True,
            text=True, env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0"},
        )  # fmt: skip

    killed = start(tmp_path / "a", 3)
    assert killed.returncode == -signal.SIGKILL
    ended = start(tmp_path / "a", 0)
    whole = start(tmp_path / "b", 0)
    assert ended.returncode == whole.returncode == 0, ended.stderr
    one, other = (json.loads(done.stdout.splitlines()[-1]) for done in (ended, whole))
    assert one["weights"] == other["weights"]
    assert one["rounds"] == other["rounds"] == [1, 2, 3, 4]
    assert (one["asked"], other["asked"]) == ([3, 4], [1, 2, 3, 4])


def test_a_number_of_rounds_that_is_none() -> None:
    for rounds in (0, 1.5, True):
        with pytest.raises(ArgumentError, match="number of rounds"):
            federate(GOLDEN / "mlp", good, rounds=rounds)
